"""Processes that are asked a line at a time, and ended where they do not answer in time."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
"""Seconds that a process has until it is ready."""


class Ended(Exception):
    """The process is gone; `late`: it was out of time."""

    def __init__(self, late: bool):
        super().__init__("out of time" if late else "died")
        self.late = late


class Process:
    """`python -m MODULE ARGUMENTS`, asked by one thread at a time. Its first line says that it is ready."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        heard: bool = False,
    ):
        """Start it, with `environment` beside the caller's own. `heard`: what it writes to stderr is shown."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Its own group: Ctrl-C is for the run, which then ends it, with whatever it has started.
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if heard else subprocess.DEVNULL,
            process_group=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self._readable, self._writable = selectors.DefaultSelector(), selectors.DefaultSelector()
        for pipe, selector, event in (
            (self._output, self._readable, selectors.EVENT_READ),
            (self._input, self._writable, selectors.EVENT_WRITE),
        ):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, event)
        self._greeting: str | None = None

    def greeting(self) -> str:
        """Its first line, waited for once. Raises `Ended`."""
        if self._greeting is None:
            self._greeting = self._read(time.monotonic() + START_SECONDS)
        return self._greeting

    def ask(self, line: str, seconds: float) -> str:
        """The line that answers `line` within `seconds` of the clock. Raises `Ended`."""
        self.greeting()
        deadline = time.monotonic() + seconds
        self._write(line.encode() + b"\n", deadline)
        return self._read(deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        while data:
            if not self._writable.select(max(0.0, deadline - time.monotonic())):
                self.end()
                raise Ended(late=True)
            try:
                data = data[os.write(self._input.fileno(), data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self.end()
                raise Ended(late=False) from error

    def _read(self, deadline: float) -> str:
        text = b""
        while not text.endswith(b"\n"):
            if not self._readable.select(max(0.0, deadline - time.monotonic())):
                self.end()
                raise Ended(late=True)
            piece = self._output.read(65_536)
            if not piece:
                self.end(wait=5.0)
                raise Ended(late=self.process.returncode == -signal.SIGPROF)  # over its processor time
            text += piece
        return text.decode().strip()

    def kill(self) -> None:
        """End it and whatever it has started at once; who asks it is told."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, wait: float = 0.0) -> None:
        """End it if it has not ended by itself within `wait` seconds, and collect it."""
        with contextlib.suppress(OSError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait)
        self.kill()
        self.process.wait()
        self._readable.close()
        self._writable.close()
        self._output.close()


P = TypeVar("P", bound=Process)
T = TypeVar("T")


class Workers(Generic[P]):
    """Up to `size` processes, started when first needed, each lent to one thread at a time. Any thread may ask.

    They belong to the process that made this; `close` ends them.
    """

    def __init__(self, start: Callable[[], P], size: int):
        self.size = size
        self.started = 0
        """Processes started so far."""
        self._start, self._owner, self._closed = start, os.getpid(), False
        self._turns = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[P] = []
        self._busy: set[P] = set()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @contextlib.contextmanager
    def lent(self) -> Iterator[P]:
        """A process, waited for where all are lent, and ended where what is done with it raises.

        Raises `Ended` once closed.
        """
        with self._turns:
            with self._lock:
                if self._closed:
                    raise Ended(late=False)
                if self._idle:
                    worker = self._idle.pop()
                else:
                    worker, self.started = self._start(), self.started + 1
                self._busy.add(worker)
            try:
                yield worker
            except BaseException:
                with self._lock:
                    self._busy.discard(worker)
                worker.end()
                raise
            with self._lock:
                self._busy.discard(worker)
                if not self._closed:
                    self._idle.append(worker)
            if self._closed:
                worker.end()

    def asked(self, ask: Callable[[P], T]) -> T:
        """What `ask` gets out of a process; one that dies over it is given one more try. Raises `Ended`."""
        try:
            with self.lent() as worker:
                return ask(worker)
        except Ended as ended:
            if ended.late:
                raise
        with self.lent() as worker:
            return ask(worker)

    def close(self) -> None:
        """End all, those at work too. Does nothing in a process forked from the one that they belong to."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            idle, busy, self._idle = self._idle, list(self._busy), []
        for worker in busy:  # collected by the thread that waits for it
            worker.kill()
        for worker in idle:
            worker.end()

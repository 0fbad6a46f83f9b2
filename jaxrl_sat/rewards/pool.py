"""Processes that compare answers, so that no text costs the caller time, memory or its life. Any thread may ask."""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0
"""Seconds by the clock that one case may take; its processor time is bounded in the worker."""
START_SECONDS = 120.0
REMEMBERED = 65_536
"""Cases whose outcome is kept."""


class Outcome(enum.Enum):
    """What became of a case. `OPEN`: it was stopped before its turn."""

    RIGHT = "right"
    WRONG = "wrong"
    TIMED_OUT = "timed out"
    DIED = "died"
    OPEN = "open"


class _Ended(Exception):
    """The worker is gone, with the outcome that this is for the case it was at."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.value)
        self.outcome = outcome


class Worker:
    """One process, asked by one thread at a time."""

    def __init__(self) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
        # Its own group: Ctrl-C is for the run, which then ends its workers.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxrl_sat.rewards.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self._selector = selectors.DefaultSelector()
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._selector.register(self._output, selectors.EVENT_READ)
        self._ready = False

    def ask(self, case: tuple[str, str, str]) -> Outcome:
        """Right or wrong. Raises `_Ended` where the process ended or was ended over it."""
        if not self._ready:
            if self._line(START_SECONDS) != "ready":
                raise _Ended(Outcome.DIED)
            self._ready = True
        try:
            self._input.write(json.dumps(case).encode() + b"\n")
            self._input.flush()
        except OSError as error:
            raise _Ended(Outcome.DIED) from error
        return Outcome(self._line(SECONDS))

    def _line(self, seconds: float) -> str:
        deadline, text = time.monotonic() + seconds, b""
        while not text.endswith(b"\n"):
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self.end()
                raise _Ended(Outcome.TIMED_OUT)
            piece = self._output.read(4096)
            if not piece:
                self.end(wait=5.0)
                killed = self.process.returncode == -signal.SIGPROF  # over its processor time
                raise _Ended(Outcome.TIMED_OUT if killed else Outcome.DIED)
            text += piece
        return text.decode().strip()

    def end(self, wait: float = 0.0) -> None:
        """End the process if it has not ended by itself within `wait` seconds, and collect it."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self.process.wait(wait)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._selector.close()
        self._output.close()


class Pool:
    """Up to `size` workers (as many as cores, eight at most), started when first needed, and what they said before.

    Belongs to the process that made it; `close` ends the workers, and what is asked then is left open.
    """

    def __init__(self, size: int | None = None):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.size = size or min(8, cores)
        self.started = 0
        """Workers started so far."""
        self._owner, self._closed = os.getpid(), False
        self._turns = threading.BoundedSemaphore(self.size)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._known: OrderedDict[tuple[str, str, str], Outcome] = OrderedDict()

    def ask(self, question: str, found: str, answer: str) -> Outcome:
        """The outcome of "same" (is `found` the answer?) or "readable" (of `answer`), remembered."""
        case = (question, found, answer)
        with self._lock:
            if case in self._known:
                self._known.move_to_end(case)
                return self._known[case]
        outcome = self._fresh(case)
        with self._lock:
            # That a worker died says nothing of the case: somebody may have ended it.
            if outcome not in (Outcome.DIED, Outcome.OPEN):
                self._known[case] = outcome
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return outcome

    def _fresh(self, case: tuple[str, str, str]) -> Outcome:
        """The outcome of a case with a worker of its own; one that dies over it is given one more try."""
        outcome = Outcome.OPEN
        for _ in range(2):
            if self._closed:
                return Outcome.OPEN
            try:
                with self._worker() as worker:
                    return worker.ask(case)
            except _Ended as ended:
                outcome = ended.outcome
                if outcome is Outcome.TIMED_OUT:
                    break
        return outcome

    @contextlib.contextmanager
    def _worker(self) -> Iterator[Worker]:
        with self._turns:
            with self._lock:
                worker = self._idle.pop() if self._idle else self._start()
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

    def _start(self) -> Worker:
        self.started += 1
        return Worker()

    def map(
        self,
        cases: Sequence[tuple[str, str, str]],
        progress: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> list[Outcome]:
        """Outcomes of many cases at once. `progress` is told how many are done, in any thread; `stop` ends it."""
        done = 0

        def one(case: tuple[str, str, str]) -> Outcome:
            nonlocal done
            if stop is not None and stop.is_set():
                return Outcome.OPEN
            outcome = self.ask(*case)
            with self._lock:
                done += 1
                count = done
            if progress is not None:
                progress(count)
            return outcome

        with concurrent.futures.ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(one, cases))

    def close(self) -> None:
        """End all workers, those at work too. Does nothing in a process forked from the pool's."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            idle, busy, self._idle = self._idle, list(self._busy), []
        for worker in busy:  # collected by the thread that waits for it
            worker.process.kill()
        for worker in idle:
            worker.end()

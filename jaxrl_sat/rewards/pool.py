"""Processes that compare answers, so that no text costs the caller time, memory or its life. Any thread may ask."""

from __future__ import annotations

import concurrent.futures
import enum
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from jaxrl_sat.rewards.process import Ended, Process, Workers

SECONDS = 5.0
"""Seconds by the clock that one case may take; its processor time is bounded in the worker."""
REMEMBERED = 65_536
"""Cases whose outcome is kept."""


class Outcome(enum.Enum):
    """What became of a case. `OPEN`: it was stopped before its turn."""

    RIGHT = "right"
    WRONG = "wrong"
    TIMED_OUT = "timed out"
    DIED = "died"
    OPEN = "open"


class Worker(Process):
    """One process that compares, asked by one thread at a time."""

    def __init__(self) -> None:
        super().__init__("jaxrl_sat.rewards.worker", environment={"OPENBLAS_NUM_THREADS": "1"})

    def compare(self, case: tuple[str, str, str]) -> Outcome:
        """Right or wrong. Raises `Ended` where the process ended or was ended over it."""
        return Outcome(self.ask(json.dumps(case), SECONDS))


class Pool(Workers[Worker]):
    """Up to `size` workers (as many as cores, eight at most) and what they said before. Once closed, what is asked is
    left open.
    """

    def __init__(self, size: int | None = None):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        super().__init__(Worker, size or min(8, cores))
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
        """The outcome of a case with a worker of its own."""
        try:
            return self.asked(lambda worker: worker.compare(case))
        except Ended as ended:
            if ended.late:
                return Outcome.TIMED_OUT
            return Outcome.OPEN if self.closed else Outcome.DIED

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

"""A live queue of requests before the slots of one engine or several: continuous batching that takes new weights.

    submit -> waiting -> a slot of some engine -> Ticket.result, and `take` for those submitted to be kept

Each engine has a thread and takes from the one queue when it has a free slot. One lock guards what threads share; none
computes, calls back or calls out while it holds it. What goes wrong in a request fails that request alone. What goes
wrong in a dispatch fails the requests in that engine's slots; it then starts with an empty cache and goes on.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.engine_thread import EngineThread, Turn
from jaxrl_sat.sampler.fleet import load_checked
from jaxrl_sat.sampler.record import Fields
from jaxrl_sat.sampler.slots import Outcome, unstarted
from jaxrl_sat.sampler.stop_strings import Codec
from jaxrl_sat.sampler.tickets import Busy, RequestFailed, Ticket, text_of
from jaxrl_sat.sampler.waiting import Order, Waiting
from jaxrl_sat.sampler.weights import WeightHolder
from jaxrl_sat.types import InputError, Params, Request, Rollout

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Health:
    """What a service is at. `hung`: engines whose turn takes longer than `dispatch_limit_s`, by number."""

    waiting: int
    in_slots: int
    unread: int
    versions: tuple[int, ...]  # of the weights of each engine
    hung: tuple[int, ...]
    steps: int  # dispatched so far, of all engines
    tokens: int  # filed so far
    compilations: int  # programs compiled so far, of all engines
    error: str | None  # what ended the service, if anything did


class SamplerService:
    """See the module. `engines` on disjoint devices take from one queue; each has its weights in its holder.

    `waiting_limit`: requests that may wait. `output_limit`: with so many rollouts unread by `take`, no slot is filled.
    `order`: whose turn it is. `codec` reads stop strings. `dispatch_limit_s`: seconds after which a turn of an engine,
    compilation included, is reported as hung.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        holders: Sequence[WeightHolder],
        *,
        waiting_limit: int = 1024,
        output_limit: int = 256,
        order: Order = "fifo",
        codec: Codec | None = None,
        dispatch_limit_s: float = 600.0,
    ):
        if not engines or any(engine.buckets != engines[0].buckets for engine in engines):
            raise ValueError("engines: at least one needed, all with the same prompt buckets")
        self._waiting_limit, self._output_limit, self._dispatch_limit_s = waiting_limit, output_limit, dispatch_limit_s
        self._swapping = threading.Lock()
        self._serial = itertools.count()
        # Guarded by the lock, each condition for one kind of waiter:
        lock = threading.Lock()
        self._work, self._output, self._alarm = (threading.Condition(lock) for _ in range(3))
        self._lock = lock
        self._waiting: Waiting[Ticket] = Waiting(engines[0].bucket, order)
        self._open: dict[int, Ticket] = {}  # handed in and not ended
        self._deadlines: list[tuple[float, int]] = []  # a heap; of ended tickets too
        self._unread: collections.deque[Outcome[Ticket]] = collections.deque()
        self._closed = False
        self._error: BaseException | None = None
        self._threads = [
            EngineThread[Ticket](f"sampler {i}", *both, codec, self._next_turn, self._settle, self._broke)
            for i, both in enumerate(zip(engines, holders, strict=True))
        ]
        self._watchdog = threading.Thread(target=self._watch, name="sampler watchdog", daemon=True)
        for thread in (*self._threads, self._watchdog):
            thread.start()

    # --------------------------------------------------------------------------------------------- other threads

    def submit(
        self,
        request: Request,
        *,
        timeout_s: float | None = None,
        on_tokens: Callable[[Fields], object] | None = None,
        keep: bool = False,
    ) -> Ticket:
        """Hand in a request: see `submit_all`."""
        [ticket] = self.submit_all([request], timeout_s=timeout_s, on_tokens=[on_tokens], keep=keep)
        return ticket

    def submit_all(
        self,
        requests: Sequence[Request],
        *,
        timeout_s: float | None = None,
        on_tokens: Sequence[Callable[[Fields], object] | None] | None = None,
        keep: bool = False,
    ) -> list[Ticket]:
        """Hand in requests, all or none; those of one group share a prefill.

        After `timeout_s` seconds a request ends with what it has. `on_tokens` gets the new records of a request after
        each dispatch that made some, in the engine's thread, which waits meanwhile. What is to be had from `take` has
        to be submitted with `keep`. Raises `InputError` for a request that cannot be served, `Busy` if too many wait.
        """
        callbacks = [None] * len(requests) if on_tokens is None else on_tokens
        if len(requests) > self._waiting_limit:
            raise InputError(f"n: {len(requests)} responses at once; allowed: {self._waiting_limit} or fewer may wait")
        if timeout_s is not None and not timeout_s > 0:
            raise InputError(f"timeout_s: {timeout_s}; a number above 0 needed")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        own = self._threads[0].engine.sampling
        tickets = [
            Ticket(request, request.sampling or own, callback, keep, deadline, self._withdraw, next(self._serial))
            for request, callback in zip(requests, callbacks, strict=True)
        ]
        for ticket in tickets:
            ticket.future.set_running_or_notify_cancel()  # so that only we end it
            for thread in self._threads:
                thread.slots.check(ticket)
        with self._lock:
            self._check_open()
            if len(self._waiting) + len(tickets) > self._waiting_limit:
                waiting = f"{len(self._waiting)} requests wait, {len(tickets)} more asked for"
                raise Busy(f"{waiting}; at most {self._waiting_limit} may wait: try again later")
            for ticket in tickets:
                self._admit(ticket)
            self._work.notify_all()
        return tickets

    def _admit(self, ticket: Ticket) -> None:
        self._open[ticket.serial] = ticket
        self._waiting.add(ticket)
        if ticket.deadline is None:
            return
        heapq.heappush(self._deadlines, (ticket.deadline, ticket.serial))
        if self._deadlines[0][1] == ticket.serial:
            self._alarm.notify()

    def take(self, timeout: float | None = None) -> Rollout:
        """The next rollout, in the order in which they finish, of a request submitted with `keep`.

        Raises `RequestFailed` in the turn of one that failed, `TimeoutError` after `timeout` seconds, and RuntimeError
        when the service was closed and nothing is left.
        """
        with self._lock:
            self._output.wait_for(lambda: self._unread or self._closed, timeout)
            if not self._unread:
                self._check_open()
                raise TimeoutError(f"no rollout within {timeout} s")
            outcome = self._unread.popleft()
            self._work.notify_all()
        return outcome.job.result()

    def swap(self, params: Params, version: int, at: Literal["step", "batch"] = "step") -> None:
        """Load weights on every engine, to be used from its next dispatch on, or once its slots have drained.

        Raises `InputError` for weights that are not finite; no engine takes them then.
        """
        with self._swapping:
            loaded = load_checked([thread.engine for thread in self._threads], params, version)
            with self._lock:
                for thread, weights in zip(self._threads, loaded.engines, strict=True):
                    thread.pending = weights if at == "batch" else None
                    if at == "step":
                        thread.holder.swap(weights)
                self._work.notify_all()

    def health(self) -> Health:
        """What the service is at."""
        with self._lock:
            slots = [thread.slots for thread in self._threads]
            return Health(
                waiting=len(self._waiting),
                in_slots=sum(thread.engine.max_concurrent_decodes - thread.slots.free for thread in self._threads),
                unread=len(self._unread),
                versions=tuple(thread.holder.current.version for thread in self._threads),
                hung=tuple(i for i, thread in enumerate(self._threads) if self._overdue(thread)),
                steps=sum(one.steps for one in slots),
                tokens=sum(one.tokens for one in slots),
                compilations=sum(sum(thread.engine.compilations.values()) for thread in self._threads),
                error=None if self._error is None else text_of(self._error),
            )

    def close(self) -> None:
        """End after the dispatches under way. What has not finished fails, whoever waits is told. May be repeated.

        A dispatch that hangs is waited for `dispatch_limit_s`, and then left to itself.
        """
        self._end()
        for thread in (*self._threads, self._watchdog):
            if thread is not threading.current_thread():
                thread.join(self._dispatch_limit_s)

    def __enter__(self) -> SamplerService:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the sampler stopped: {text_of(self._error)}")
        if self._closed:
            raise RuntimeError("the sampler was closed")

    def _withdraw(self, ticket: Ticket, reason: str = "cancelled") -> None:
        with self._lock:
            ended = [outcome] if (outcome := self._end_early(ticket, reason)) else []
        self._settle(ended)

    # ------------------------------------------------------------------------------------------- engines' threads

    def _next_turn(self, thread: EngineThread[Ticket]) -> Turn[Ticket] | None:
        """What an engine is to do next, waited for; None once closed."""
        with self._lock:
            self._work.wait_for(
                lambda: self._closed or thread.slots.occupied or thread.pending is not None or self._share(thread)
            )
            if self._closed:
                return None
            if thread.pending is not None and not thread.slots.occupied:
                thread.holder.swap(thread.pending)
                thread.pending = None
            taken = self._waiting.take(self._share(thread), thread.engine.prefill_rows)
            ended = {ticket: ticket.ended for ticket in thread.slots.jobs if ticket.ended is not None}
        return Turn(taken, ended)

    def _share(self, thread: EngineThread[Ticket]) -> int:
        """How many waiting requests an engine may take now: its part of all free slots, at least one."""
        if thread.pending is not None or len(self._unread) >= self._output_limit:
            return 0
        everywhere = sum(one.slots.free for one in self._threads if one.pending is None)
        return self._waiting.share(thread.slots.free, everywhere)

    def _settle(self, outcomes: list[Outcome[Ticket]]) -> None:
        """Tell each ticket, once, how it ended."""
        with self._lock:
            first = [outcome for outcome in outcomes if self._open.pop(outcome.job.serial, None) is not None]
            for outcome in first:
                self._waiting.remove(outcome.job)
        for outcome in first:
            ticket, result = outcome.job, outcome.result
            if isinstance(result, Rollout):
                ticket.future.set_result(result)
            else:
                # A new error, as the old one holds on to frames, and they to arrays.
                ticket.future.set_exception(RequestFailed(ticket.request, text_of(result)))
        with self._lock:
            self._unread.extend(outcome for outcome in first if outcome.job.keep)
            self._output.notify_all()

    def _end_early(self, ticket: Ticket, reason: str) -> Outcome[Ticket] | None:
        """Note that a ticket is to end; how it ended if it still waited."""
        if ticket.serial not in self._open:
            return None
        ticket.ended = ticket.ended or reason
        if not self._waiting.remove(ticket):
            return None
        return Outcome(ticket, unstarted(ticket.request, self._threads[0].engine.records, ticket.ended))

    def _broke(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            why = "the sampler was closed" if self._error is None else f"the sampler stopped: {text_of(self._error)}"
            left = [Outcome(ticket, RequestFailed(ticket.request, why)) for ticket in self._open.values()]
            for condition in (self._work, self._output, self._alarm):
                condition.notify_all()
        self._settle(left)

    # ------------------------------------------------------------------------------------------- watchdog's thread

    def _watch(self) -> None:
        """End tickets at their deadline, and report turns that take too long, each once."""
        reported: set[tuple[str, float]] = set()
        while not self._closed:
            with self._lock:
                ended = self._expired()
                late = [(thread.name, thread.busy_since) for thread in self._threads if self._overdue(thread)]
            self._settle(ended)
            for name, since in late:
                if since is not None and (name, since) not in reported:
                    log.error("%s: a dispatch takes more than %g s", name, self._dispatch_limit_s)
            reported = {(name, since) for name, since in late if since is not None}
            with self._lock:
                due = self._deadlines[0][0] - time.monotonic() if self._deadlines else self._dispatch_limit_s
                if not self._closed:
                    self._alarm.wait(max(0.0, min(due, self._dispatch_limit_s / 2)))

    def _expired(self) -> list[Outcome[Ticket]]:
        now, ended = time.monotonic(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = self._open.get(heapq.heappop(self._deadlines)[1])
            if ticket is not None and (outcome := self._end_early(ticket, "timeout")):
                ended.append(outcome)
        if len(self._deadlines) > 2 * len(self._open) + 64:  # mostly of ended tickets
            self._deadlines = [one for one in self._deadlines if one[1] in self._open]
            heapq.heapify(self._deadlines)
        return ended

    def _overdue(self, thread: EngineThread[Ticket]) -> bool:
        since = thread.busy_since
        return since is not None and time.monotonic() - since > self._dispatch_limit_s

"""Continuous batching of a fixed list: requests in, rollouts out, slots refilled as they free."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.slots import Slots
from jaxrl_sat.sampler.stop_strings import Codec
from jaxrl_sat.sampler.waiting import Job, Order, Waiting
from jaxrl_sat.sampler.weights import WeightHolder, Weights, current
from jaxrl_sat.types import Request, Rollout


class Stopped(Exception):
    """Generation was asked to stop; nothing of it is returned."""


def generate(
    engine: RolloutEngine,
    weights: Weights | WeightHolder,
    requests: Sequence[Request],
    should_stop: Callable[[], bool] = lambda: False,
    temperature: float | None = None,
    *,
    order: Order = "fifo",
    codec: Codec | None = None,
) -> list[Rollout]:
    """One rollout a request, in the order of `requests`, whatever the `order` they are put into slots in.

    Requests of one group and prompt share a prefill. Weights swapped in their holder are used from the next dispatch
    on. `temperature` overrides that of every request; its top-p stays. `codec` reads stop strings. Raises `InputError`
    for a request that cannot be served, before any work is done, and `Stopped` within one dispatch of `should_stop()`
    turning true.
    """
    return generate_on([(engine, weights)], requests, should_stop, temperature, order=order, codec=codec)


def generate_on(
    engines: Sequence[tuple[RolloutEngine, Weights | WeightHolder]],
    requests: Sequence[Request],
    should_stop: Callable[[], bool] = lambda: False,
    temperature: float | None = None,
    *,
    order: Order = "fifo",
    codec: Codec | None = None,
    finished: Callable[[Rollout], object] = lambda _: None,
) -> list[Rollout]:
    """`generate` by engines on disjoint devices, alike but for those, that take from one queue as their slots free.

    The first works in the calling thread, each other in one of its own; `should_stop` is asked in all, and in each
    `finished` is told of a rollout once it is made. What any of them raises ends the others within one dispatch, and is
    raised.
    """
    override = {} if temperature is None else {"temperature": temperature}
    own = engines[0][0].sampling
    jobs = [Job(request, dataclasses.replace(request.sampling or own, **override)) for request in requests]
    slots, waiting = [Slots(engine, codec) for engine, _ in engines], Waiting[Job](engines[0][0].bucket, order)
    batch = _Batch(slots, waiting, should_stop, finished)
    batch.admit(jobs)
    with ThreadPoolExecutor(len(engines)) as pool:  # starts no thread for one engine alone
        for index, (engine, weights) in list(enumerate(engines))[1:]:
            pool.submit(batch.work, index, engine, weights)
        batch.work(0, *engines[0])
    if batch.errors:
        raise batch.errors[0]
    return [batch.rollouts[job] for job in jobs]


class _Batch:
    """Jobs under way on the slots of some engines. A lock guards the queue; slots are their engine's thread's."""

    def __init__(
        self,
        slots: Sequence[Slots[Job]],
        waiting: Waiting[Job],
        should_stop: Callable[[], bool],
        finished: Callable[[Rollout], object],
    ):
        self.rollouts: dict[Job, Rollout] = {}
        self.errors: list[BaseException] = []
        self._slots, self._waiting, self._should_stop, self._finished = slots, waiting, should_stop, finished
        self._lock = threading.Lock()

    def admit(self, jobs: Sequence[Job]) -> None:
        """Let jobs wait. Raises `InputError` for one that cannot be served."""
        for job in jobs:
            self._slots[0].check(job)
            self._waiting.add(job)

    def work(self, index: int, engine: RolloutEngine, weights: Weights | WeightHolder) -> None:
        """Keep an engine's slots full until nothing waits and they are empty, or somebody failed."""
        try:
            while not self.errors and self._turn(self._slots[index], engine, weights):
                pass
        except BaseException as error:  # noqa: B902 - raised where the batch was asked for
            self.errors.append(error)

    def _turn(self, slots: Slots[Job], engine: RolloutEngine, weights: Weights | WeightHolder) -> bool:
        """One dispatch; False where there is nothing to do, nor will be."""
        with self._lock:
            everywhere = sum(one.free for one in self._slots)
            taken = self._waiting.take(self._waiting.share(slots.free, everywhere), engine.prefill_rows)
        if not taken.jobs and not slots.occupied:
            return False
        if self._should_stop():
            raise Stopped
        now = current(weights)
        slots.insert(now, taken)
        slots.advance(now)
        for outcome in slots.settled():
            if isinstance(outcome.result, Exception):
                raise outcome.result
            self.rollouts[outcome.job] = outcome.result
            self._finished(outcome.result)
        return True

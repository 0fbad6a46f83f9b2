"""Continuous batching of a fixed list: requests in, rollouts out, slots refilled as they free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

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
    override = {} if temperature is None else {"temperature": temperature}
    jobs = [Job(request, dataclasses.replace(request.sampling or engine.sampling, **override)) for request in requests]
    waiting, slots = Waiting[Job](engine.bucket, order), Slots[Job](engine, codec)
    for job in jobs:
        slots.check(job)
        waiting.add(job)
    rollouts: dict[Job, Rollout] = {}
    while len(rollouts) < len(jobs):
        if should_stop():
            raise Stopped
        now = current(weights)
        slots.insert(now, waiting.take(slots.free, engine.prefill_rows))
        slots.advance(now)
        for outcome in slots.settled():
            if isinstance(outcome.result, Exception):
                raise outcome.result
            rollouts[outcome.job] = outcome.result
    return [rollouts[job] for job in jobs]

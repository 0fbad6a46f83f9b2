"""Continuous batching: requests in, rollouts out, slots refilled as they free.

On a CPU each step is waited for. On an accelerator one step is always under way while the host reads the one before:
the device itself retires a finished slot, so a step too many computes nothing that is kept. Records go into one
preallocated array, all slots of a step at once; Python is spent on requests, not on tokens.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.record import FINISH_REASONS, RolloutTokens
from jaxrl_sat.sampler.state import DecodeState, Prefix
from jaxrl_sat.sampler.weights import WeightHolder, Weights, current
from jaxrl_sat.types import Request, Rollout, SamplingParams, TopK


class Stopped(Exception):
    """Generation was asked to stop; nothing of it is returned."""


def generate(
    engine: RolloutEngine,
    weights: Weights | WeightHolder,
    requests: Sequence[Request],
    should_stop: Callable[[], bool] = lambda: False,
    temperature: float | None = None,
) -> list[Rollout]:
    """One rollout a request, in the order of `requests`.

    Requests of one group that stand together share a prefill. Weights swapped in their holder are used from the next
    step on. `temperature` overrides that of every request; its top-p stays. Raises `InputError` for a request
    that cannot be served, before any work is done, and `Stopped` within one decode step of `should_stop()` turning true.
    """
    for request in requests:
        engine.check(request)
    batch = _Batch(engine, requests, temperature)
    lookahead = 0 if engine.mesh.devices.flat[0].platform == "cpu" else 1
    under_way: collections.deque[RolloutTokens] = collections.deque()
    while not batch.done:
        if should_stop():
            raise Stopped
        stepped = batch.fill_and_step(current(weights))
        if stepped is not None:
            stepped.copy_to_host_async()
            under_way.append(stepped)
        while len(under_way) > (lookahead if stepped is not None else 0):
            batch.record(under_way.popleft())
    return batch.rollouts()


class _Prompts:
    """The prefills of a batch: what has been read, on the device until inserted, its routing on the host."""

    def __init__(self, engine: RolloutEngine, requests: Sequence[Request]):
        self._engine = engine
        self.tokens: list[np.ndarray] = []
        self.of_request = np.zeros(len(requests), np.int64)
        for i, request in enumerate(requests):
            if i == 0 or not _same_prompt(requests[i - 1], request):
                self.tokens.append(request.prompt.tokens)
            self.of_request[i] = len(self.tokens) - 1
        self._bucket = [engine.bucket(len(tokens)) for tokens in self.tokens]
        self._waiting = {bucket: collections.deque[int]() for bucket in engine.buckets}
        for prompt, bucket in enumerate(self._bucket):
            self._waiting[bucket].append(prompt)
        self._requests_of = np.bincount(self.of_request, minlength=len(self.tokens))
        self._read: dict[int, tuple[_Prefilled, int]] = {}

    def read(self, prompt: int, weights: Weights) -> None:
        """Have a prompt read, unless it is. The next ones of its bucket are read with it, as many as fit."""
        if prompt in self._read:
            return
        bucket = self._bucket[prompt]
        queue = self._waiting[bucket]
        chosen = [queue.popleft() for _ in range(min(len(queue), self._engine.prefill_rows(bucket)))]
        prefix = self._engine.prefill_prompts(weights, [self.tokens[p] for p in chosen])
        prefix.expert_ids.copy_to_host_async()
        uses = int(self._requests_of[chosen].sum())
        prefilled = _Prefilled(prefix, prefix.expert_ids, weights.version, uses)
        self._read |= {p: (prefilled, row) for row, p in enumerate(chosen)}

    def __getitem__(self, prompt: int) -> tuple[_Prefilled, int]:
        """The prefill that read a prompt, and its row there."""
        return self._read[prompt]


@dataclasses.dataclass(eq=False)
class _Prefilled:
    """One prefill. `prefix` goes when its last request is inserted; the routing stays."""

    prefix: Prefix | None
    expert_ids: jax.Array | np.ndarray
    version: int
    uses: int  # requests still to be inserted from it

    def used(self, times: int) -> None:
        """Count insertions; after the last one the device memory is let go."""
        self.uses -= times
        if self.uses == 0:
            self.prefix = None

    def routing(self, row: int) -> np.ndarray:
        """Expert ids of a prompt, [P, M * k]."""
        self.expert_ids = np.asarray(self.expert_ids)
        return self.expert_ids[row]


def _same_prompt(a: Request, b: Request) -> bool:
    return a.group == b.group and (a.prompt is b.prompt or np.array_equal(a.prompt.tokens, b.prompt.tokens))


class _Batch:
    """The state of one `generate`: which request is in which slot, and the records so far."""

    def __init__(self, engine: RolloutEngine, requests: Sequence[Request], temperature: float | None):
        self._engine = engine
        self._requests = requests
        sampling = [request.sampling or engine.sampling for request in requests]
        override = {} if temperature is None else {"temperature": temperature}
        self._sampling = [dataclasses.replace(one, **override) for one in sampling]
        self._prompts = _Prompts(engine, requests)
        self._state: DecodeState | None = engine.init_decode_state() if requests else None
        slots, limit = engine.max_concurrent_decodes, engine.max_response_tokens
        self._free = list(range(slots - 1, -1, -1))
        self._next = 0  # the first request not yet in a slot
        self._request_in = np.zeros(slots, np.int64)
        self._steps_left = np.zeros(slots, np.int64)  # dispatches a slot can still use
        self._records = np.zeros((slots, limit, engine.records.width), np.int32)
        self._rollouts: list[Rollout | None] = [None] * len(requests)
        self._finished = 0

    @property
    def done(self) -> bool:
        return self._finished == len(self._requests)

    def rollouts(self) -> list[Rollout]:
        """All of them, once done."""
        return [rollout for rollout in self._rollouts if rollout is not None]

    def fill_and_step(self, weights: Weights) -> RolloutTokens | None:
        """Put waiting requests into free slots and dispatch a step, unless no slot could use one."""
        if self._free and self._next < len(self._requests):
            self._fill(weights)
        if not self._steps_left.any():
            return None
        self._steps_left -= self._steps_left > 0
        assert self._state is not None
        self._state, result = self._engine.generate(weights, self._state)
        return result

    def _fill(self, weights: Weights) -> None:
        inserts: dict[_Prefilled, tuple[list[int], list[int], list[int], list[SamplingParams]]] = {}
        while self._free and self._next < len(self._requests):
            prompt = int(self._prompts.of_request[self._next])
            self._prompts.read(prompt, weights)
            prefilled, row = self._prompts[prompt]
            slot = self._free.pop()
            rows, slots, seeds, sampling = inserts.setdefault(prefilled, ([], [], [], []))
            rows.append(row)
            slots.append(slot)
            seeds.append(self._requests[self._next].seed)
            sampling.append(self._sampling[self._next])
            self._request_in[slot] = self._next
            self._steps_left[slot] = self._sampling[self._next].max_response_tokens
            self._next += 1
        for prefilled, inserted in inserts.items():
            assert prefilled.prefix is not None and self._state is not None
            self._state = self._engine.insert_rows(prefilled.prefix, self._state, *inserted)
            prefilled.used(len(inserted[0]))

    def record(self, result: RolloutTokens) -> None:
        """File the records of a step; retire the slots it finished."""
        data = np.asarray(result.data)
        fields = self._engine.records.unpack(data)
        slots = np.flatnonzero(fields.valid)
        self._records[slots, fields.lengths[slots] - 1] = data[slots]
        for slot in np.flatnonzero(fields.finish):
            self._finish(int(slot), int(fields.lengths[slot]), FINISH_REASONS[int(fields.finish[slot])])

    def _finish(self, slot: int, length: int, reason: str) -> None:
        index = int(self._request_in[slot])
        prompt = int(self._prompts.of_request[index])
        prefilled, row = self._prompts[prompt]
        fields = self._engine.records.unpack(self._records[slot, :length])
        # The first step fed the last prompt token again, and that pass is the one sampled from: its routing counts.
        before = len(self._prompts.tokens[prompt]) - 1
        layers, per_token = fields.expert_ids.shape[1:]
        expert_ids = np.empty((layers, before + length, per_token), fields.expert_ids.dtype)
        expert_ids[:, :before] = prefilled.routing(row)[:before].reshape(before, layers, per_token).swapaxes(0, 1)
        expert_ids[:, before:] = fields.expert_ids.swapaxes(0, 1)
        longest = max(1, int((fields.nucleus_ids >= 0).sum(axis=-1).max()))
        self._rollouts[index] = Rollout(
            request=self._requests[index],
            tokens=fields.tokens.copy(),
            logp=fields.logp.copy(),
            topk=TopK(ids=fields.topk_ids.copy(), logp=fields.topk_logp.copy()),
            nucleus_ids=fields.nucleus_ids[:, :longest].copy(),
            expert_ids=expert_ids,
            versions=fields.versions.copy(),
            prefill_version=prefilled.version,
            finish_reason=reason,
        )
        self._finished += 1
        self._steps_left[slot] = 0
        self._free.append(slot)

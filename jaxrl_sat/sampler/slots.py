"""The slots of one engine: prompts read, jobs put into free slots, steps dispatched, records filed, slots retired.

On a CPU each dispatch is waited for. On an accelerator one is always under way while the host reads the one before: the
device itself retires a finished slot, so a step too many computes nothing that is kept, and each dispatch remembers who
was in which slot, so that nothing of it is filed under who came after. Records go into one preallocated array, all
slots of a dispatch at once; Python is spent on requests, not on tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Generic

import jax
import numpy as np

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.prompts import Prefill, Prompts, Reading
from jaxrl_sat.sampler.record import FINISH_REASONS, Fields, RecordLayout
from jaxrl_sat.sampler.state import DecodeState
from jaxrl_sat.sampler.stop_strings import Codec, StopStrings, check_stop_strings
from jaxrl_sat.sampler.waiting import J, Taken
from jaxrl_sat.sampler.weights import Weights
from jaxrl_sat.types import InputError, Request, Rollout, TopK


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[J]):
    """How a job ended: its rollout, or the error that belongs to it."""

    job: J
    result: Rollout | Exception


@dataclasses.dataclass(eq=False)
class _Occupant(Generic[J]):
    """A job in a slot."""

    job: J
    reading: Reading  # of its prompt, at `row`
    row: int
    stop_strings: StopStrings | None

    @property
    def watched(self) -> bool:
        return self.stop_strings is not None or self.job.on_tokens is not None


@dataclasses.dataclass(frozen=True)
class _Dispatch:
    """Records under way, [steps, S, W], and who was in each slot: serial numbers of occupants, 0 for none."""

    data: jax.Array
    serials: np.ndarray


class Slots(Generic[J]):
    """See the module. `settled` hands out how jobs ended; every job put in comes out there once.

    An error that belongs to one job settles that job. Any other is raised, and `fail` must be called then.
    """

    def __init__(self, engine: RolloutEngine, codec: Codec | None = None):
        self._engine, self._codec = engine, codec
        self._lookahead = 0 if engine.mesh.devices.flat[0].platform == "cpu" else 1
        slots = engine.max_concurrent_decodes
        self._records = np.zeros((slots, engine.max_response_tokens, engine.records.width), np.int32)
        self._serial = itertools.count(1)
        self._settled: list[Outcome[J]] = []
        self.steps = 0
        """Steps dispatched so far."""
        self.tokens = 0
        """Tokens filed so far."""
        self._reset()

    def _reset(self) -> None:
        slots = self._engine.max_concurrent_decodes
        self._state: DecodeState | None = None  # made when first needed
        self._prompts: Prompts[J] = Prompts(self._engine)
        self._under_way: collections.deque[_Dispatch] = collections.deque()
        self._occupants: dict[int, _Occupant[J]] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._serials = np.zeros(slots, np.int64)  # of occupants; 0: none
        self._lengths = np.zeros(slots, np.int64)  # tokens filed
        self._steps_left = np.zeros(slots, np.int64)  # that a slot can still use

    @property
    def free(self) -> int:
        """Slots that nobody is in."""
        return len(self._free)

    @property
    def occupied(self) -> bool:
        """Whether somebody is in a slot."""
        return bool(self._occupants)

    @property
    def jobs(self) -> list[J]:
        """Jobs in slots."""
        return [occupant.job for occupant in self._occupants.values()]

    def check(self, job: J) -> None:
        """`InputError`, which names the field, for a job that cannot be served here."""
        self._engine.check(dataclasses.replace(job.request, sampling=job.sampling))
        check_stop_strings(job.sampling, self._codec)
        if not 0 <= job.request.seed < 2**32:
            raise InputError(f"seed: {job.request.seed}; from 0 to {2**32 - 1} allowed")

    def settled(self) -> list[Outcome[J]]:
        """How jobs ended since the last call, in that order."""
        outcomes, self._settled = self._settled, []
        return outcomes

    # ----------------------------------------------------------------------------------------------- in and out

    def insert(self, weights: Weights, taken: Taken[J]) -> None:
        """Put jobs into free slots, their prompts read by `weights` where they are not yet."""
        if taken.jobs:
            self._insert(weights, taken)
        self._prompts.let_go()

    def _insert(self, weights: Weights, taken: Taken[J]) -> None:
        failed = self._prompts.read(weights, [group for _, group in taken.jobs], taken.ahead)
        inserts: dict[Prefill[J], list[tuple[int, int, J]]] = {}
        for job, group in taken.jobs:
            if group in failed:
                self._settled.append(Outcome(job, failed[group]))
            else:
                prefill = self._prompts[group]
                row = prefill.rows[group]
                inserts.setdefault(prefill, []).append((row, self._occupy(job, prefill, row), job))
        if self._state is None:
            self._state = self._engine.init_decode_state()
        for prefill, placed in inserts.items():
            rows, slots, jobs = zip(*placed, strict=True)
            seeds, sampling = [job.request.seed for job in jobs], [job.sampling for job in jobs]
            self._state = self._engine.insert_rows(prefill.prefix, self._state, rows, slots, seeds, sampling)

    def _occupy(self, job: J, prefill: Prefill[J], row: int) -> int:
        slot = self._free.pop()
        strings = job.sampling.stop_strings
        watch = StopStrings(strings, self._codec) if strings and self._codec is not None else None
        self._occupants[slot] = _Occupant(job, prefill.reading, row, watch)
        self._serials[slot] = next(self._serial)
        self._lengths[slot] = 0
        self._steps_left[slot] = job.sampling.max_response_tokens
        return slot

    def release(self, reasons: Mapping[J, str]) -> None:
        """End the responses of jobs at once, for the reasons given; what has been filed of them is their rollout."""
        slots = {slot: reasons[one.job] for slot, one in self._occupants.items() if one.job in reasons}
        for slot, reason in slots.items():
            self._retire(slot, self._rollout(slot, reason))
        self._release(list(slots))

    def _release(self, slots: Sequence[int]) -> None:
        if slots and self._state is not None:
            self._state = self._engine.release(self._state, slots)

    def fail(self, error: Exception, taken: Sequence[J] = ()) -> None:
        """Settle the jobs in slots, and those `taken` that may not have got into one, with `error`; start afresh."""
        self._settled += [Outcome(job, error) for job in dict.fromkeys([*self.jobs, *taken])]
        self._reset()

    # --------------------------------------------------------------------------------------------------- forward

    def advance(self, weights: Weights) -> None:
        """Dispatch steps, unless no slot could use one, and file what has arrived; all that is under way if none."""
        left = bool(self._steps_left.any())
        if left:
            assert self._state is not None
            self._state, data = self._engine.advance(weights, self._state)
            data.copy_to_host_async()
            self._under_way.append(_Dispatch(data, self._serials.copy()))
            self._steps_left = np.maximum(self._steps_left - len(data), 0)
            self.steps += len(data)
        while len(self._under_way) > (self._lookahead if left else 0):
            self._file(self._under_way.popleft())

    def _file(self, dispatch: _Dispatch) -> None:
        data = np.asarray(dispatch.data)
        fields = self._engine.records.unpack(data)
        kept = (fields.valid != 0) & (dispatch.serials == self._serials)
        steps, slots = np.nonzero(kept)
        self._records[slots, fields.lengths[steps, slots] - 1] = data[steps, slots]
        new = kept.sum(axis=0)
        self._lengths += new
        self.tokens += len(slots)
        finish = np.where(kept, fields.finish, 0).max(axis=0)
        watched = {slot for slot, occupant in self._occupants.items() if occupant.watched and new[slot]}
        ended: list[int] = []
        for slot in sorted(watched.union(np.flatnonzero(finish).tolist())):
            result = self._judge(slot, int(new[slot]), FINISH_REASONS.get(int(finish[slot])))
            if result is not None:
                self._retire(slot, result)
                ended += [] if finish[slot] else [slot]
        self._release(ended)

    def _judge(self, slot: int, new: int, reason: str | None) -> Rollout | Exception | None:
        """What has become of a slot after `new` tokens, with which the device saw it finish for `reason`, if it did."""
        occupant = self._occupants[slot]
        first = int(self._lengths[slot]) - new
        try:
            if occupant.stop_strings is not None:
                tokens = self._engine.records.unpack(self._records[slot, first : first + new]).tokens
                count = occupant.stop_strings.feed(tokens.tolist())
                if count is not None:
                    self._lengths[slot], reason = first + count, "stop"
            if occupant.job.on_tokens is not None:
                made = self._records[slot, first : self._lengths[slot]].copy()
                occupant.job.on_tokens(self._engine.records.unpack(made))
        except Exception as error:
            return error
        return None if reason is None else self._rollout(slot, reason)

    def _rollout(self, slot: int, reason: str) -> Rollout:
        one, length = self._occupants[slot], int(self._lengths[slot])
        fields = self._engine.records.unpack(self._records[slot, :length])
        # The first step fed the last prompt token again, and that pass is the one sampled from: its routing counts.
        routing, version = one.reading.row(one.row)
        return _rollout_of(one.job.request, routing[: len(one.job.tokens) - 1], fields, version, reason)

    def _retire(self, slot: int, result: Rollout | Exception) -> None:
        self._settled.append(Outcome(self._occupants.pop(slot).job, result))
        self._serials[slot] = self._steps_left[slot] = 0
        self._free.append(slot)


def unstarted(request: Request, records: RecordLayout, reason: str) -> Rollout:
    """The rollout of a request that ended before it got a slot: no tokens, no routing, prefill version -1."""
    routing = np.zeros((0, records.num_expert_ids), records.expert_dtype)
    return _rollout_of(request, routing, records.unpack(np.zeros((0, records.width), np.int32)), -1, reason)


def _rollout_of(request: Request, routing: np.ndarray, fields: Fields, version: int, reason: str) -> Rollout:
    """A rollout of copies of the records of R >= 0 tokens, after prompt tokens with `routing` [n, M * k]."""
    before, length = len(routing), len(fields.tokens)
    layers, per_token = fields.expert_ids.shape[1:]
    expert_ids = np.empty((layers, before + length, per_token), fields.expert_ids.dtype)
    expert_ids[:, :before] = routing.reshape(before, layers, per_token).swapaxes(0, 1)
    expert_ids[:, before:] = fields.expert_ids.swapaxes(0, 1)
    longest = int((fields.nucleus_ids >= 0).sum(axis=-1).max(initial=1))
    return Rollout(
        request=request,
        tokens=fields.tokens.copy(),
        logp=fields.logp.copy(),
        topk=TopK(ids=fields.topk_ids.copy(), logp=fields.topk_logp.copy()),
        nucleus_ids=fields.nucleus_ids[:, :longest].copy(),
        expert_ids=expert_ids,
        versions=fields.versions.copy(),
        prefill_version=version,
        finish_reason=reason,
    )

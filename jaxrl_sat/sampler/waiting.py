"""Requests that wait for a slot, in the order they will be taken, those of a group together."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import numpy as np

from jaxrl_sat.sampler.record import Fields
from jaxrl_sat.types import Request, SamplingParams

Order = Literal["fifo", "longest", "shortest"]
"""Which group is taken first: the oldest, or by its prompt tokens and the response tokens it may take."""

_SIGN = {"fifo": 0, "longest": -1, "shortest": 1}


@dataclasses.dataclass(eq=False)
class Job:
    """A request, how it is sampled, and who is told of its tokens as they are made."""

    request: Request
    sampling: SamplingParams
    on_tokens: Callable[[Fields], object] | None = None

    @property
    def tokens(self) -> np.ndarray:
        """Ids of the prompt, int32 [P]."""
        return self.request.prompt.tokens


J = TypeVar("J", bound=Job)


@dataclasses.dataclass(eq=False)
class Group(Generic[J]):
    """Jobs of one prompt. Those that still wait are in `jobs`; once one has been taken, none joins."""

    tokens: np.ndarray
    bucket: int
    key: tuple[int, int]  # smallest first
    jobs: collections.deque[J] = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass(frozen=True)
class Taken(Generic[J]):
    """Jobs whose turn it is, each with its group, and the groups that come next by bucket, to be read with them."""

    jobs: list[tuple[J, Group[J]]]
    ahead: dict[int, list[Group[J]]]


class Waiting(Generic[J]):
    """Waiting jobs. Not safe to share between threads without a lock."""

    def __init__(self, bucket: Callable[[int], int], order: Order = "fifo"):
        self._bucket = bucket
        self._sign = _SIGN[order]
        self._groups: dict[int, list[Group[J]]] = {}  # by bucket, in order
        self._open: dict[int, Group[J]] = {}  # by group number, while none of its jobs has been taken
        self._of: dict[J, Group[J]] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._of)

    def add(self, job: J) -> None:
        """Let a job wait: with those of its group and prompt if they still all wait, else as a group of its own."""
        group = self._open.get(job.request.group)
        if group is None or not np.array_equal(group.tokens, job.tokens):
            size = len(job.tokens) + job.sampling.max_response_tokens
            group = Group(job.tokens, self._bucket(len(job.tokens)), (self._sign * size, next(self._arrivals)))
            bisect.insort(self._groups.setdefault(group.bucket, []), group, key=lambda one: one.key)
            self._open[job.request.group] = group
        group.jobs.append(job)
        self._of[job] = group

    def share(self, free: int, everywhere: int) -> int:
        """How many jobs an engine with `free` of all `everywhere` free slots may take: its part, at least one."""
        return min(free, -(-len(self) * free // everywhere)) if free else 0

    def take(self, count: int, rows: Callable[[int], int]) -> Taken[J]:
        """Up to `count` jobs in order, and up to `rows(bucket)` groups after them of each of their buckets."""
        jobs: list[tuple[J, Group[J]]] = []
        while len(jobs) < count and self._of:
            group = min((groups[0] for groups in self._groups.values()), key=lambda one: one.key)
            job = group.jobs.popleft()
            self._close(job, group)
            self._forget(job, group)
            jobs.append((job, group))
        buckets = dict.fromkeys(group.bucket for _, group in jobs)
        return Taken(jobs, {bucket: self._groups.get(bucket, [])[: rows(bucket)] for bucket in buckets})

    def remove(self, job: J) -> bool:
        """Let a job wait no more; False if it did not."""
        group = self._of.get(job)
        if group is None:
            return False
        group.jobs.remove(job)
        self._forget(job, group)
        return True

    def _close(self, job: J, group: Group[J]) -> None:
        if self._open.get(job.request.group) is group:
            del self._open[job.request.group]

    def _forget(self, job: J, group: Group[J]) -> None:
        del self._of[job]
        if group.jobs:
            return
        self._close(job, group)
        groups = self._groups[group.bucket]
        groups.remove(group)
        if not groups:
            del self._groups[group.bucket]

"""Prompts read for the slots of one engine: once for all jobs of a group, as many prompts together as fit.

What has been read stays on the device while jobs of its groups wait, one prefill a bucket at most, and is forgotten
when the weights change, unless the engine is to keep it. The routing goes to the host.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

import jax
import numpy as np

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.state import Prefix
from jaxrl_sat.sampler.waiting import Group, J
from jaxrl_sat.sampler.weights import Weights


@dataclasses.dataclass(eq=False)
class Reading:
    """What is recorded of the prompts of one prefill, fetched from the device when first asked for."""

    expert_ids: jax.Array | np.ndarray  # [B, P, M * k]
    versions: jax.Array | np.ndarray  # int32 [B]

    @classmethod
    def of(cls, prefix: Prefix) -> Reading:
        """Starts the copies."""
        prefix.expert_ids.copy_to_host_async()
        prefix.versions.copy_to_host_async()
        return cls(prefix.expert_ids, prefix.versions)

    def row(self, row: int) -> tuple[np.ndarray, int]:
        """Expert ids [P, M * k] of one prompt, and the oldest version that read any of it."""
        self.expert_ids, self.versions = np.asarray(self.expert_ids), np.asarray(self.versions)
        return self.expert_ids[row], int(self.versions[row])


@dataclasses.dataclass(frozen=True, eq=False)
class Prefill(Generic[J]):
    """Prompts read together, and the row of each group's."""

    prefix: Prefix
    reading: Reading
    weights: weakref.ref[Weights]  # that read them; they may go before it does
    bucket: int
    rows: Mapping[Group[J], int]


class Prompts(Generic[J]):
    """See the module."""

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._of: dict[Group[J], Prefill[J]] = {}

    def __getitem__(self, group: Group[J]) -> Prefill[J]:
        """The prefill that read a group's prompt."""
        return self._of[group]

    def read(
        self, weights: Weights, groups: Iterable[Group[J]], ahead: Mapping[int, Sequence[Group[J]]]
    ) -> dict[Group[J], Exception]:
        """Have the prompts of `groups` read, unless they are, and with each bucket's last as many of `ahead` as fit.

        Returns the errors of those that could not be read.
        """
        if not self._engine.keep_cache_at_swap:
            self._of = {group: one for group, one in self._of.items() if one.weights() is weights}
        unread: dict[int, list[Group[J]]] = {}
        for group in dict.fromkeys(groups):
            if group not in self._of:
                unread.setdefault(group.bucket, []).append(group)
        failed: dict[Group[J], Exception] = {}
        for bucket, needed in unread.items():
            rows = self._engine.prefill_rows(bucket)
            later = [group for group in ahead.get(bucket, ()) if group not in self._of and group not in needed]
            for first in range(0, len(needed), rows):
                chunk = needed[first : first + rows]
                failed |= self._read(weights, bucket, chunk, later[: rows - len(chunk)])
        return failed

    def _read(
        self, weights: Weights, bucket: int, needed: list[Group[J]], later: list[Group[J]]
    ) -> dict[Group[J], Exception]:
        """Read prompts together; where that fails, those needed one by one, so that the error finds its owner."""
        together = [*needed, *later]
        try:
            prefix = self._engine.prefill_prompts(weights, [group.tokens for group in together])
            reading = Reading.of(prefix)
        except Exception as error:
            if len(together) == 1:
                return {together[0]: error}
            failed: dict[Group[J], Exception] = {}
            for group in needed:
                failed |= self._read(weights, bucket, [group], [])
            return failed
        rows = {group: row for row, group in enumerate(together)}
        prefill = Prefill(prefix, reading, weakref.ref(weights), bucket, rows)
        self._of |= dict.fromkeys(together, prefill)
        return {}

    def let_go(self) -> None:
        """Forget what no waiting job needs, and all but the newest prefill of each bucket."""
        newest = {prefill.bucket: prefill for prefill in self._of.values()}
        self._of = {group: one for group, one in self._of.items() if group.jobs and one is newest[one.bucket]}

"""Slot 5, the reduction: per-token values -> (sum, count), so that shards and microbatches add up exactly."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.ratio import check_choice
from jaxrl_sat.objectives.segments import active_lengths, segment_any, spread
from jaxrl_sat.types import InputError

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Loss = sum of w x over the active tokens, as (sum, count) with loss = sum / count: SPEC 1, "Aggregation".

        mode                      w         count
        token-mean                1         N
        seq-mean-token-mean       1 / T_b   B'
        seq-mean-token-sum        1         B'
        seq-mean-token-sum-norm   1 / L     B'
        token-sum                 1         0     (a sum has no denominator: see `normalise`)

    N is the number of active tokens, T_b that of response b, B' the number of responses that have one (with
    `count_empty`: of all responses), L = `norm` (None: the row length T).
    """

    mode: str = "token-mean"
    norm: float | None = None
    count_empty: bool = False

    def __post_init__(self) -> None:
        check_choice("aggregation", self.mode, Aggregation)
        if self.norm is not None and not self.norm > 0:
            raise InputError(f"norm: {self.norm!r} is not a number above 0")

    def __call__(self, values: Float[Array, "N T"], evidence: Evidence) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """(sum, count) of `values` (0 off the active set) over clean evidence."""
        return jnp.sum(values * self._relative(evidence)), self._count(evidence).astype(values.dtype)

    def weights(self, evidence: Evidence) -> Float[Array, "N T"]:
        """What each token's value is multiplied by in the loss of this evidence alone; 0 off the active set."""
        relative = self._relative(evidence)
        return normalise(relative, self._count(evidence).astype(relative.dtype))

    def _relative(self, evidence: Evidence) -> Float[Array, "N T"]:
        on = evidence.mask.astype(evidence.logp.dtype)
        if self.mode == "seq-mean-token-mean":
            lengths = active_lengths(evidence).astype(on.dtype)
            return on / jnp.maximum(spread(lengths, evidence), 1)
        if self.mode == "seq-mean-token-sum-norm":
            return on / (on.shape[1] if self.norm is None else self.norm)
        return on

    def _count(self, evidence: Evidence) -> Int[Array, ""]:
        if self.mode == "token-mean":
            return jnp.sum(evidence.mask)
        if self.mode == "token-sum":
            return jnp.zeros((), jnp.int32)
        if self.count_empty:
            return jnp.sum(segment_any(evidence.segment_ids > 0, evidence))
        return jnp.sum(segment_any(evidence.mask, evidence))


def normalise(total: Float[Array, "*shape"], count: Float[Array, ""]) -> Float[Array, "*shape"]:
    """total / count; `total` itself where count is 0: nothing active, or a "token-sum", which has no denominator."""
    return total / jnp.maximum(count, 1)

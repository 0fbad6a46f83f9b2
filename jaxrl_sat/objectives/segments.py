"""Sums over the responses of packed rows, by (row, segment), and back to tokens.

Written as a masked sum over a [N, S, T] comparison, without a scatter: the result does not depend on the order of
threads, rows stay on their shard, and the gradient is the same kind of sum. Accelerators fuse the comparison into the
reduction; a CPU holds it (4 MB a row of 2048 tokens and 256 segments), which costs sequence methods 50 ms on [8, 2048].
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl_sat.objectives.evidence import Evidence


def segment_sum(values: Num[Array, "N T"], evidence: Evidence) -> Num[Array, "N S"]:
    """Sum over the tokens of each response: out[n, s] = sum of values[n, t] where segment_ids[n, t] = s + 1."""
    return jnp.sum(jnp.where(_membership(evidence), values[:, None, :], 0), axis=-1)


def segment_mean(values: Float[Array, "N T"], evidence: Evidence) -> Float[Array, "N S"]:
    """Mean over the active tokens of each response, of `values` that are 0 off them; 0 where it has none."""
    return segment_sum(values, evidence) / jnp.maximum(active_lengths(evidence), 1)


def segment_any(flags: Bool[Array, "N T"], evidence: Evidence) -> Bool[Array, "N S"]:
    """Whether any token of a response carries the flag."""
    return jnp.any(_membership(evidence) & flags[:, None, :], axis=-1)


def spread(per_segment: Float[Array, "N S"], evidence: Evidence) -> Float[Array, "N T"]:
    """Each response's number at each of its positions; 0 at padding (segment 0)."""
    return jnp.sum(jnp.where(_membership(evidence), per_segment[:, :, None], 0), axis=1)


def active_lengths(evidence: Evidence) -> Int[Array, "N S"]:
    """T_b: active tokens of each response."""
    return segment_sum(evidence.mask.astype(jnp.int32), evidence)


def _membership(evidence: Evidence) -> Bool[Array, "N S T"]:
    numbers = jnp.arange(1, evidence.num_segments + 1, dtype=evidence.segment_ids.dtype)
    return evidence.segment_ids[:, None, :] == numbers[None, :, None]

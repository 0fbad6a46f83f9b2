"""Group-normalised advantages: seed 000 3.3, SPEC 4."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def group_normalised(
    rewards: Float[Array, " N"],
    group_ids: Int[Array, " N"],
    num_groups: int,
    std_normalize: bool = True,
    eps: float = 1e-6,
    ddof: int = 1,
) -> Float[Array, " N"]:
    """A_b = (R_b - mean_g) / (std_g + eps) within the group g = `group_ids[b]` of samples of one prompt; detached.

    `group_ids` run from 0 to num_groups - 1. std has `ddof` 1; `std_normalize` False centres only (Dr.GRPO). A group
    of one member, or whose rewards are all equal (max = min; in float32 their std need not be 0), has A = 0 exactly.
    """
    rewards = jax.lax.stop_gradient(rewards)

    def per_group(values: Float[Array, " N"]) -> Float[Array, " G"]:
        return jax.ops.segment_sum(values, group_ids, num_groups)

    size = per_group(jnp.ones_like(rewards))
    centred = rewards - (per_group(rewards) / jnp.maximum(size, 1))[group_ids]
    highest = jax.ops.segment_max(rewards, group_ids, num_groups)
    lowest = jax.ops.segment_min(rewards, group_ids, num_groups)
    if std_normalize:
        std = jnp.sqrt(per_group(centred * centred) / jnp.maximum(size - ddof, 1))
        centred = centred / (std + eps)[group_ids]
    return jnp.where((highest == lowest)[group_ids], 0, centred)

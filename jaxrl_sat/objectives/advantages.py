"""Advantages of responses from their rewards, group by group, and the length term a reward may carry: SPEC 4.

A response whose reward is not finite, or whose group id lies outside 0 .. num_groups - 1, is a data fault: its A is 0
and its group is formed by the others. Nothing here returns NaN: a group whose sums overflow has A = 0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_sat.objectives.checks import expect
from jaxrl_sat.types import InputError


def group_normalised(
    rewards: Float[Array, " N"],
    group_ids: Int[Array, " N"],
    num_groups: int,
    std_normalize: bool = True,
    eps: float = 1e-6,
    ddof: int = 1,
) -> Float[Array, " N"]:
    """A_b = (R_b - mean_g) / (std_g + eps) within the group g = `group_ids[b]` of samples of one prompt: seed 000 3.3.

    `group_ids` run from 0 to num_groups - 1. std has `ddof` 1; `std_normalize` False centres only. A group of one
    member, or whose rewards are all equal (max = min; in float32 their std need not be 0), has A = 0 exactly. Detached.
    """
    centred, size, members, differs = _centred(rewards, group_ids, num_groups)
    if std_normalize:
        square = jax.ops.segment_sum(centred * centred, members, num_groups + 1)
        std = jnp.sqrt(square / jnp.maximum(size - ddof, 1))
        centred = centred / (std + eps)[members]
    return _where_sound(differs, centred)


def group_centred(rewards: Float[Array, " N"], group_ids: Int[Array, " N"], num_groups: int) -> Float[Array, " N"]:
    """A_b = R_b - mean_g, Dr. GRPO's: `group_normalised` without the division. SPEC 4."""
    return group_normalised(rewards, group_ids, num_groups, std_normalize=False)


def leave_one_out(rewards: Float[Array, " N"], group_ids: Int[Array, " N"], num_groups: int) -> Float[Array, " N"]:
    """RLOO: A_b = R_b - mean of the other members of its group = n/(n - 1) (R_b - mean_g), n the group's size.

    A group of one, or whose rewards are all equal, has A = 0 exactly. Detached.
    """
    centred, size, members, differs = _centred(rewards, group_ids, num_groups)
    return _where_sound(differs, centred * (size / jnp.maximum(size - 1, 1))[members])


ADVANTAGES: dict[str, Callable[[Float[Array, " N"], Int[Array, " N"], int], Float[Array, " N"]]] = {
    "group": group_normalised,
    "centred": group_centred,
    "rloo": leave_one_out,
}
"""One slot, (rewards, group_ids, num_groups) -> advantages, by the name a configuration gives it."""


def overlong_shaping(
    lengths: Int[Array, " N"], max_length: int, buffer: int, penalty: float = 1.0
) -> Float[Array, " N"]:
    """What is added to a reward for length in tokens, DAPO's soft overlong punishment.

        0                                              length <= max_length - buffer
        -penalty (length - max_length + buffer) / buffer    between
        -penalty                                       length >= max_length

    A buffer of 0 is a step: -penalty where length > max_length, 0 elsewhere.
    """
    if not 0 <= buffer <= max_length:
        raise InputError(f"buffer: {buffer!r} is not a number of tokens from 0 to max_length, {max_length}")
    if not 0 <= penalty < float("inf"):
        raise InputError(f"penalty: {penalty!r} is not a number of at least 0")
    expect("lengths", lengths, lengths.shape, jnp.integer)
    over = (lengths - (max_length - buffer)).astype(float)
    return -penalty * jnp.clip(over / buffer, 0, 1) if buffer else jnp.where(over > 0, -penalty, 0.0)


def _centred(
    rewards: Float[Array, " N"], group_ids: Int[Array, " N"], num_groups: int
) -> tuple[Float[Array, " N"], Float[Array, " G"], Int[Array, " N"], Bool[Array, " N"]]:
    """R_b - mean_g, the sizes of the groups, each response's group, and whether its group has unequal rewards.

    Group `num_groups` collects the responses that are left out.
    """
    expect("rewards", rewards, (rewards.size,), jnp.floating)
    expect("group_ids", group_ids, rewards.shape, jnp.integer)
    rewards = jax.lax.stop_gradient(rewards)
    sound = jnp.isfinite(rewards) & (group_ids >= 0) & (group_ids < num_groups)
    rewards, members = jnp.where(sound, rewards, 0), jnp.where(sound, group_ids, num_groups)
    size = jax.ops.segment_sum(jnp.ones_like(rewards), members, num_groups + 1)
    mean = jax.ops.segment_sum(rewards, members, num_groups + 1) / jnp.maximum(size, 1)
    highest = jax.ops.segment_max(rewards, members, num_groups + 1)
    lowest = jax.ops.segment_min(rewards, members, num_groups + 1)
    return rewards - mean[members], size, members, (highest > lowest)[members] & sound


def _where_sound(differs: Bool[Array, " N"], advantages: Float[Array, " N"]) -> Float[Array, " N"]:
    return jnp.where(differs & jnp.isfinite(advantages), advantages, 0)

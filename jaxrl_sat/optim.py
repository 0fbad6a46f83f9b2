"""The optimizer: global-norm clipping, then Adam at a constant rate, as in seed 000, section 3.3."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sat.types import Params


class MasterCopy(NamedTuple):
    """State of `with_master_copy`: the parameters in float32, and the state of the optimizer that updates them."""

    master: Params
    inner: optax.OptState


def make_optimizer(
    learning_rate: float, b1: float, b2: float, eps: float, max_grad_norm: float, master_copy: bool = False
) -> optax.GradientTransformation:
    """Adam with clipped gradients; `max_grad_norm` is the largest global L2 norm let through.

    Its moments are float32. `master_copy`: so is what it updates, and the parameters are that copy rounded, so that
    updates too small for them add up; apply the updates with `apply_updates`.
    """
    adam = optax.adam(learning_rate, b1=b1, b2=b2, eps=eps)

    def init(params: Params) -> optax.OptState:
        # Gradients come in float32 whatever the parameters are, and moments lose too much in less.
        return adam.init(optax.tree.cast(params, jnp.float32))

    clipped = optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.GradientTransformation(init, adam.update))
    return with_master_copy(clipped) if master_copy else clipped


def with_master_copy(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on a float32 copy of the parameters, which its state (`MasterCopy`) holds.

    The updates lead from the given parameters to the new copy; `apply_updates` takes the copy itself.
    """

    def init(params: Params) -> MasterCopy:
        master = optax.tree.cast(params, jnp.float32)
        return MasterCopy(master, inner.init(master))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MasterCopy]:
        assert isinstance(state, MasterCopy)
        updates, moved = inner.update(updates, state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        return jax.tree.map(jnp.subtract, master, params), MasterCopy(master, moved)

    return optax.GradientTransformation(init, update)


def apply_updates(params: Params, updates: optax.Updates, state: optax.OptState) -> Params:
    """The parameters after an optimizer's `updates`, which left it in `state`: the master copy rounded, if it has one.

    The sum of the old parameters and a difference would not always round to the same number.
    """
    if isinstance(state, MasterCopy):
        return jax.tree.map(lambda old, master: master.astype(old.dtype), params, state.master)
    return optax.apply_updates(params, updates)


def state_shardings(optimizer: optax.GradientTransformation, params: Params, shardings: Params) -> optax.OptState:
    """Where each leaf of the optimizer's state lives: moments and master beside their parameter, the rest everywhere.

    `params` may be shape structs; `shardings` is a pytree of `NamedSharding` shaped like it.
    """
    everywhere = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: everywhere,
    )

"""The optimizer: global-norm clipping, then Adam at a constant rate, as in seed 000, section 3.3."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sat.types import Params


def make_optimizer(
    learning_rate: float, b1: float, b2: float, eps: float, max_grad_norm: float
) -> optax.GradientTransformation:
    """Adam with clipped gradients; `max_grad_norm` is the largest global L2 norm let through."""
    adam = optax.adam(learning_rate, b1=b1, b2=b2, eps=eps)

    def init(params: Params) -> optax.OptState:
        # Gradients come in float32 whatever the parameters are, and moments lose too much in less.
        return adam.init(optax.tree.cast(params, jnp.float32))

    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.GradientTransformation(init, adam.update))


def state_shardings(optimizer: optax.GradientTransformation, params: Params, shardings: Params) -> optax.OptState:
    """Where each leaf of the optimizer's state lives: moments beside their parameter, the rest on every device.

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

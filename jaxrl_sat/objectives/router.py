"""Auxiliary losses of the router, from sums over tokens: balance between experts, and small logits.

Both are means over the n tokens of a microbatch and its M sparse layers, so a microbatch is balanced by itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_sat.objectives.metrics import Metrics
from jaxrl_sat.types import RouterSums


def load_balance(sums: RouterSums) -> Float[Array, ""]:
    """E sum_e f_e P_e, as Qwen3-MoE is trained with in transformers (Switch Transformer, equations 4 to 6).

    f_e = c_e / (M n), the share of tokens that expert e gets, and P_e = p_e / (M n), its mean probability, both with
    all layers taken together. The gradient flows through P_e alone. k where tokens are spread evenly, E at most.
    0 without tokens or sparse layers.
    """
    layers, experts = sums.counts.shape
    rows = jnp.maximum(layers * sums.tokens, 1)
    share = jax.lax.stop_gradient(jnp.sum(sums.counts, axis=0)) / rows
    return experts * jnp.sum(share * jnp.sum(sums.probabilities, axis=0) / rows)


def z_loss(sums: RouterSums) -> Float[Array, ""]:
    """1/B sum_i (log sum_e exp x_ie)^2, ST-MoE's equation 5; x are router logits, B = M n the tokens of all layers."""
    return jnp.sum(sums.z) / jnp.maximum(sums.z.size * sums.tokens, 1)


def load_max(sums: RouterSums) -> Float[Array, ""]:
    """The largest load of an expert in any layer, as a multiple of the even one: 1 if all are even, E / k at most."""
    even = jnp.mean(sums.counts, axis=1, keepdims=True)
    return jnp.max(sums.counts / jnp.where(even > 0, even, 1), initial=0.0)


def router_loss(sums: RouterSums, load_balance_coef: float, z_coef: float) -> tuple[Float[Array, ""], Metrics]:
    """load_balance_coef * load balance + z_coef * z, and metrics `router/load_balance`, `router/z`, `router/load_max`.

    Metrics are means over tokens; of a whole update the largest load of its microbatches.
    """
    balance, z = load_balance(sums), z_loss(sums)
    weight = sums.tokens
    means = {"router/load_balance": (balance * weight, weight), "router/z": (z * weight, weight)}
    loss = load_balance_coef * balance + z_coef * z
    return loss, jax.lax.stop_gradient(Metrics(means=means, maxima={"router/load_max": load_max(sums)}))

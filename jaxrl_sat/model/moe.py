"""The mixture of experts: a router picks k experts a token, or a recorded trace does (R3 replay)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.dispatch import experts
from jaxrl_sat.model.ops import ROUTING, einsum, saved
from jaxrl_sat.types import Params

Replay = tuple[Integer[Array, "N k"], Bool[Array, " N"]]


def gates(router_logits: Float[Array, "N E"], expert_ids: Int[Array, "N k"], normalise: bool) -> Float[Array, "N k"]:
    """Weights of the given experts, from live router logits, in float32: differentiable in the logits.

    normalise (`norm_topk_prob`): softmax over the given experts alone, which equals the softmax over all of them,
    taken at the given ones and divided by their sum. Otherwise the softmax over all experts, taken at the given ones.
    """
    kept = jnp.take_along_axis(router_logits, expert_ids, axis=-1)
    if normalise:
        return jax.nn.softmax(kept, axis=-1)
    return jnp.exp(kept - jax.nn.logsumexp(router_logits, axis=-1, keepdims=True))


def moe(
    params: Params, config: ModelConfig, x: Float[Array, "N D"], replay: Replay | None
) -> tuple[Float[Array, "N D"], Int[Array, "N k"]]:
    """Each token's experts, weighted and summed, and their ids. Where a replay is valid its ids fix membership."""
    router_logits = einsum("nd,de->ne", x, params["router"], out=jnp.float32)
    # Stopped before top_k, whose own gradient (of values never used) costs a scatter.
    _, expert_ids = jax.lax.top_k(jax.lax.stop_gradient(router_logits), config.num_experts_per_tok)
    if replay is not None:
        recorded, valid = replay
        expert_ids = jnp.where(valid[:, None], recorded.astype(expert_ids.dtype), expert_ids)
    expert_ids = saved(expert_ids, ROUTING)
    weights = gates(router_logits, expert_ids, config.norm_topk_prob).astype(x.dtype)
    return experts(x, expert_ids, weights, params["gate"], params["up"], params["down"]), expert_ids

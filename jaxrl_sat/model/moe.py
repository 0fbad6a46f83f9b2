"""A sparse layer: the router picks k experts a token, or a recorded trace does (R3 replay)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxrl_sat.model import expert_parallel
from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.ops import ROUTING, einsum, saved
from jaxrl_sat.model.piece import Piece
from jaxrl_sat.types import AnyArray, Params, RouterSums

Replay = tuple[Integer[Array, "N k"], Bool[Array, " N"]]


@struct.dataclass
class Router:
    """What the router of one layer did with N tokens."""

    expert_ids: AnyArray  # int32 [N, k]
    logits: AnyArray  # float32 [N, E]


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
    params: Params, config: ModelConfig, x: Float[Array, "N D"], replay: Replay | None, piece: Piece
) -> tuple[Float[Array, "N D"], Router]:
    """Each token's experts, weighted and summed, and its routing. Where a replay is valid its ids fix membership.

    Of the experts, `params` has those of this device, each cut along its width as `piece.expert_mlp` says.
    """
    router_logits = einsum("nd,de->ne", x, params["router"], out=jnp.float32)
    # Stopped before top_k, whose own gradient (of values never used) costs a scatter.
    _, expert_ids = jax.lax.top_k(jax.lax.stop_gradient(router_logits), config.num_experts_per_tok)
    if replay is not None:
        recorded, valid = replay
        expert_ids = jnp.where(valid[:, None], recorded.astype(expert_ids.dtype), expert_ids)
    # One long row: what waits for the backward pass would be padded to whole tiles of a TPU along k.
    expert_ids = saved(expert_ids.reshape(-1), ROUTING).reshape(expert_ids.shape)
    weights = gates(router_logits, expert_ids, config.norm_topk_prob).astype(x.dtype)
    out = expert_parallel.experts(x, expert_ids, weights, params["gate"], params["up"], params["down"], piece)
    return out, Router(expert_ids=expert_ids, logits=router_logits)


def router_sums(router: Router, real: Bool[Array, "B T"], piece: Piece) -> RouterSums:
    """The sums over all real tokens of one layer that its auxiliary losses are made of; `router` is [B, T, ...]."""
    weight = real.astype(jnp.float32)
    chosen = jnp.sum(router.expert_ids[..., None] == jnp.arange(router.logits.shape[-1]), axis=-2)
    log_total = jax.nn.logsumexp(router.logits, axis=-1)
    probabilities = jnp.exp(router.logits - log_total[..., None])
    sums = RouterSums(
        counts=jnp.einsum("bt,bte->e", weight, chosen.astype(jnp.float32)),
        probabilities=jnp.einsum("bt,bte->e", weight, probabilities),
        z=jnp.sum(weight * jnp.square(log_total)),
        tokens=jnp.sum(weight),
    )
    return jax.tree.map(lambda x: piece.layout.total(x, piece.rows, piece.sequence), sums)

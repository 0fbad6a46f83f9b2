"""The language-model head: logits, and per-token statistics without ever holding [tokens, vocabulary]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.ops import einsum
from jaxrl_sat.types import AnyArray, Params

# Logits held at once, in float32 elements: 128 MiB.
BLOCK_ELEMENTS = 1 << 25
MIN_WORDS = 1024


@struct.dataclass
class TokenStatistics:
    """Of the next-token distribution at each position (after temperature), float32, in nats."""

    logp: AnyArray  # [B, T]
    entropy: AnyArray  # [B, T]
    nucleus_logp: AnyArray  # [B, T, C], differentiable as logp is
    topk_logp: AnyArray  # [B, T, K], constants


def head_weight(params: Params) -> Float[Array, "V D"]:
    """The output embedding: the head, or the input embedding if the head is tied."""
    return params["head"] if "head" in params else params["embedding"]


def unembed(params: Params, config: ModelConfig, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
    """Logits in float32."""
    return einsum("...d,vd->...v", hidden, head_weight(params), out=jnp.float32)


def token_statistics(
    params: Params,
    config: ModelConfig,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    temperature: float | Float[Array, ""] = 1.0,
    nucleus_ids: Int[Array, "B T C"] | None = None,
    topk_ids: Int[Array, "B T K"] | None = None,
) -> TokenStatistics:
    """Log-probs of `targets[b, t]` and of further words under softmax(logits[b, t] / temperature), and entropy.

    `hidden[b, t]` predicts `targets[b, t]`: the caller shifts. The vocabulary is taken in chunks with an online
    log-sum-exp; the gradient recomputes them and keeps only log-sum-exp and entropy a token. Gradient flows from
    `logp`, `entropy` and `nucleus_logp`; those of `topk_ids` feed masks, take none and cost none. The temperature takes
    none either. An id outside the vocabulary (-1: no word) gives a finite number that means nothing.
    """
    batch, length, width = hidden.shape
    rows = batch * length
    none = jnp.zeros((batch, length, 0), jnp.int32)
    nucleus_ids = none if nucleus_ids is None else nucleus_ids
    topk_ids = none if topk_ids is None else topk_ids
    live = 1 + nucleus_ids.shape[-1]
    ids = jnp.concatenate([targets[..., None], nucleus_ids, topk_ids], -1).reshape(rows, -1).astype(jnp.int32)
    scale = jax.lax.stop_gradient(1.0 / jnp.asarray(temperature, jnp.float32))
    logp, constant, entropy = _statistics(hidden.reshape(-1, width), head_weight(params), ids, scale, live)
    return TokenStatistics(
        logp=logp[:, 0].reshape(batch, length),
        entropy=entropy.reshape(batch, length),
        nucleus_logp=logp[:, 1:].reshape(nucleus_ids.shape),
        topk_logp=constant.reshape(topk_ids.shape),
    )


def _chunk_words(rows: int, words: int) -> int:
    return min(words, max(MIN_WORDS, BLOCK_ELEMENTS // max(rows, 1)))


def _chunk(index: Array, size: int, weight: Array) -> tuple[Array, Array, Array]:
    """Rows index*size.. of the head, moved back at the end to stay inside it; which are new; the first one's number."""
    start = jnp.minimum(index * size, weight.shape[0] - size)
    block = jax.lax.dynamic_slice_in_dim(weight, start, size)
    return block, start + jnp.arange(size) >= index * size, start


def _pick(ids: Array, start: Array, fresh: Array) -> tuple[Array, Array]:
    """Each id's column in the chunk, and whether it is (newly) there."""
    column = ids - start
    inside = (column >= 0) & (column < fresh.shape[0])
    column = jnp.where(inside, column, 0)
    return column, inside & fresh[column]


def _run(body, count: int, carry):
    """A loop over the chunks; a single one is not wrapped in a loop."""
    return body(jnp.int32(0), carry) if count == 1 else jax.lax.fori_loop(0, count, body, carry)


def _primal(hidden: Array, weight: Array, ids: Array, scale: Array, live: int) -> tuple[Array, Array, Array]:
    return _statistics_fwd(hidden, weight, ids, scale, live)[0]


def _statistics_fwd(hidden: Array, weight: Array, ids: Array, scale: Array, live: int):
    """Log-probs of the first `live` ids, of the others, and entropy; gradient reaches the first and the last alone."""
    rows, words = hidden.shape[0], weight.shape[0]
    size = _chunk_words(rows, words)

    def body(index, carry):
        peak, total, weighted, picked = carry
        block, fresh, start = _chunk(index, size, weight)
        z = einsum("nd,vd->nv", hidden, block, out=jnp.float32) * scale
        masked = jnp.where(fresh, z, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(masked, axis=-1))
        keep = jnp.exp(peak - new_peak)
        mass = jnp.exp(masked - new_peak[:, None])
        # Sums z - peak rather than z, so that a large common offset of the logits does not swamp the entropy.
        centred = jnp.where(fresh, z - new_peak[:, None], 0.0)
        shift = jnp.where(keep > 0, peak - new_peak, 0.0)
        weighted = (weighted + shift * total) * keep + jnp.sum(mass * centred, axis=-1)
        total = total * keep + jnp.sum(mass, axis=-1)
        column, there = _pick(ids, start, fresh)
        picked = jnp.where(there, jnp.take_along_axis(z, column, axis=-1), picked)
        return new_peak, total, weighted, picked

    zeros = jnp.zeros(rows, jnp.float32)
    carry = (jnp.full(rows, -jnp.inf), zeros, zeros, jnp.zeros(ids.shape, jnp.float32))
    peak, total, weighted, picked = _run(body, -(-words // size), carry)
    lse = peak + jnp.log(total)
    entropy = jnp.log(total) - weighted / total
    logp = picked - lse[:, None]
    return (logp[:, :live], logp[:, live:], entropy), (hidden, weight, ids[:, :live], scale, lse, entropy)


def _statistics_bwd(live: int, saved, cotangents):
    """dz_v = sum_j g_j (1[v = id_j] - p_v) - g_H p_v (log p_v + H), chunk by chunk."""
    hidden, weight, ids, scale, lse, entropy = saved
    g_logp, _, g_entropy = cotangents
    rows, words = hidden.shape[0], weight.shape[0]
    size = _chunk_words(rows, words)
    g_all = jnp.sum(g_logp, axis=-1)

    def body(index, carry):
        d_hidden, d_weight = carry
        block, fresh, start = _chunk(index, size, weight)
        log_p = einsum("nd,vd->nv", hidden, block, out=jnp.float32) * scale - lse[:, None]
        dz = -jnp.exp(log_p) * (g_all[:, None] + g_entropy[:, None] * (log_p + entropy[:, None]))
        dz = jnp.where(fresh, dz, 0.0)
        column, there = _pick(ids, start, fresh)
        dz = dz.at[jnp.arange(rows)[:, None], column].add(jnp.where(there, g_logp, 0.0))
        dz = (dz * scale).astype(hidden.dtype)
        d_hidden = d_hidden + einsum("nv,vd->nd", dz, block, out=jnp.float32)
        d_block = einsum("nv,nd->vd", dz, hidden, out=jnp.float32)
        old = jax.lax.dynamic_slice_in_dim(d_weight, start, size)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_weight, old + d_block, start, 0)

    carry = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(weight.shape, jnp.float32))
    d_hidden, d_weight = _run(body, -(-words // size), carry)
    return d_hidden.astype(hidden.dtype), d_weight.astype(weight.dtype), None, None


_statistics: Any = jax.custom_vjp(_primal, nondiff_argnums=(4,))
_statistics.defvjp(_statistics_fwd, _statistics_bwd)

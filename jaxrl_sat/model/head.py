"""The language-model head: logits, and per-token statistics without ever holding [tokens, vocabulary].

Words may be cut over devices: each takes its own in chunks, and only numbers a token are combined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_sat.layout import Cut, Layout
from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.execution import ONE_DEVICE, Execution
from jaxrl_sat.model.ops import einsum
from jaxrl_sat.model.output_first import times_transposed
from jaxrl_sat.types import AnyArray, Params

# Logits of a chunk, in float32 elements: 32 MiB, which caches can hold. Wider chunks than MIN_WORDS gain nothing more.
BLOCK_ELEMENTS = 1 << 23
MIN_WORDS = 1024

AXES = ("vocab", "embed")


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


def unembed(
    params: Params, config: ModelConfig, hidden: Float[Array, "*b D"], execution: Execution = ONE_DEVICE
) -> Float[Array, "*b V"]:
    """Logits in float32. The first axes of `hidden` are rows and, where there are three in all, the sequence."""
    layout, weight = execution.layout, head_weight(params)
    weight_cut = layout.spec(AXES, weight.shape)
    cut = layout.spec((*("rows", "sequence")[: hidden.ndim - 1], None), hidden.shape)

    def local(hidden: Array, weight: Array) -> Array:
        return _logits(hidden, layout.gather(weight, weight_cut[1], 1))

    return layout.manual(local, (cut, weight_cut), PartitionSpec(*cut[:-1], weight_cut[0]))(hidden, weight)


def local_logits(
    params: Params, hidden: Float[Array, "N D"], spec: PartitionSpec, execution: Execution = ONE_DEVICE
) -> Float[Array, "N V"]:
    """Logits of all words, float32, inside `Layout.manual`, where the head is this device's piece, cut by `spec`."""
    layout = execution.layout
    weight = layout.gather(head_weight(params), spec[1], 1)
    # The head lies output first as it is.
    z = times_transposed(hidden, weight, jnp.float32) if execution.output_first else _logits(hidden, weight)
    return layout.gather(z, spec[0], z.ndim - 1)


def _logits(hidden: Array, weight: Array) -> Array:
    return einsum("...d,vd->...v", hidden, weight, out=jnp.float32)


def token_statistics(
    params: Params,
    config: ModelConfig,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    temperature: float | Float[Array, ""] = 1.0,
    nucleus_ids: Int[Array, "B T C"] | None = None,
    topk_ids: Int[Array, "B T K"] | None = None,
    execution: Execution = ONE_DEVICE,
) -> TokenStatistics:
    """Log-probs of `targets[b, t]` and of further words under softmax(logits[b, t] / temperature), and entropy.

    `hidden[b, t]` predicts `targets[b, t]`: the caller shifts. The vocabulary is taken in chunks with an online
    log-sum-exp; the gradient recomputes them and keeps only log-sum-exp and entropy a token. Gradient flows from
    `logp`, `entropy` and `nucleus_logp`; those of `topk_ids` feed masks, take none and cost none. The temperature takes
    none either. An id outside the vocabulary (-1: no word) gives a finite number that means nothing.
    """
    layout, weight = execution.layout, head_weight(params)
    none = jnp.zeros((*targets.shape, 0), jnp.int32)
    nucleus_ids = none if nucleus_ids is None else nucleus_ids
    topk_ids = none if topk_ids is None else topk_ids
    live = 1 + nucleus_ids.shape[-1]
    ids = jnp.concatenate([targets[..., None], nucleus_ids, topk_ids], -1).astype(jnp.int32)
    scale = jax.lax.stop_gradient(1.0 / jnp.asarray(temperature, jnp.float32))
    weight_cut = layout.spec(AXES, weight.shape)
    cut = layout.spec(("rows", "sequence", None), hidden.shape)

    def local(hidden: Array, weight: Array, ids: Array, scale: Array) -> tuple[Array, Array, Array]:
        batch, length, width = hidden.shape
        whole = layout.gather(weight, weight_cut[1], 1)
        flat = hidden.reshape(-1, width), whole, ids.reshape(batch * length, -1), scale
        found = _statistics(*flat, live, layout, weight_cut[0])
        return jax.tree.map(lambda x: x.reshape(batch, length, *x.shape[1:]), found)

    run = layout.manual(local, (cut, weight_cut, cut, PartitionSpec()), (cut, cut, PartitionSpec(*cut[:2])))
    logp, constant, entropy = run(hidden, weight, ids, scale)
    return TokenStatistics(logp[..., 0], entropy, logp[..., 1:], constant)


# ---------------------------------------------------------------------------------------- the words of one device


class _Chunk(NamedTuple):
    """Words start..start+n of this device, and their rows of the head."""

    start: Any
    weight: Array


def _over_chunks(body: Callable[[_Chunk, Any], Any], weight: Array, rows: int, carry: Any) -> Any:
    """Folds over the head in equal chunks and a smaller last one, so that no word is masked or taken twice."""
    words = weight.shape[0]
    size = _chunk_words(rows, words)
    count = words // size
    if count == 1:
        carry = body(_Chunk(0, weight[:size]), carry)
    else:

        def step(index: Array, carry: Any) -> Any:
            start = index * size
            return body(_Chunk(start, jax.lax.dynamic_slice_in_dim(weight, start, size)), carry)

        carry = jax.lax.fori_loop(0, count, step, carry)
    return body(_Chunk(count * size, weight[count * size :]), carry) if words % size else carry


def _chunk_words(rows: int, words: int) -> int:
    """Chunks of about one size, as few as the block allows."""
    chunks = -(-words // max(MIN_WORDS, BLOCK_ELEMENTS // max(rows, 1)))
    return -(-words // chunks)


def _columns(ids: Array, chunk: _Chunk) -> tuple[Array, Array]:
    """Each id's column in the chunk, and whether it is there."""
    column = ids - chunk.start
    inside = (column >= 0) & (column < chunk.weight.shape[0])
    return jnp.where(inside, column, 0), inside


def _primal(*args: Any) -> tuple[Array, Array, Array]:
    return _statistics_fwd(*args)[0]


def _statistics_fwd(hidden: Array, weight: Array, ids: Array, scale: Array, live: int, layout: Layout, cut: Cut):
    """Log-probs of the first `live` ids, of the others, and entropy; gradient reaches the first and the last alone."""
    rows = hidden.shape[0]
    own = ids - layout.index(cut) * weight.shape[0]  # counted from this device's first word

    def body(chunk: _Chunk, carry):
        peak, total, weighted, picked = carry
        z = _logits(hidden, chunk.weight) * scale
        new_peak = jnp.maximum(peak, jnp.max(z, axis=-1))
        # Sums z - peak rather than z, so that a large common offset of the logits does not swamp the entropy.
        centred = z - new_peak[:, None]
        mass = jnp.exp(centred)
        total, weighted = _moved(peak, new_peak, total, weighted)
        column, there = _columns(own, chunk)
        picked = jnp.where(there, jnp.take_along_axis(z, column, axis=-1), picked)
        return new_peak, total + jnp.sum(mass, axis=-1), weighted + jnp.sum(mass * centred, axis=-1), picked

    zeros = jnp.zeros(rows, jnp.float32)
    carry = (jnp.full(rows, -jnp.inf), zeros, zeros, jnp.zeros(ids.shape, jnp.float32))
    peak, total, weighted, picked = _over_chunks(body, weight, rows, carry)
    highest = layout.largest(peak, cut)
    total, weighted, picked = layout.total((*_moved(peak, highest, total, weighted), picked), cut)
    lse = highest + jnp.log(total)
    entropy = jnp.log(total) - weighted / total
    logp = picked - lse[:, None]
    return (logp[:, :live], logp[:, live:], entropy), (hidden, weight, own[:, :live], scale, lse, entropy)


def _moved(peak: Array, new_peak: Array, total: Array, weighted: Array) -> tuple[Array, Array]:
    """sum of exp(z - peak) and of (z - peak) exp(z - peak), with the new peak in place of the old."""
    keep = jnp.exp(peak - new_peak)
    shift = jnp.where(keep > 0, peak - new_peak, 0.0)
    return total * keep, (weighted + shift * total) * keep


def _statistics_bwd(live: int, layout: Layout, cut: Cut, saved, cotangents):
    """dz_v = sum_j g_j (1[v = id_j] - p_v) - g_H p_v (log p_v + H), chunk by chunk."""
    hidden, weight, own, scale, lse, entropy = saved
    # What lies on several devices alike has a cotangent that is spread over them.
    g_logp, g_entropy = layout.total((cotangents[0], cotangents[2]), cut)
    rows = hidden.shape[0]
    g_all = jnp.sum(g_logp, axis=-1)

    def body(chunk: _Chunk, carry):
        d_hidden, d_weight = carry
        log_p = _logits(hidden, chunk.weight) * scale - lse[:, None]
        dz = -jnp.exp(log_p) * (g_all[:, None] + g_entropy[:, None] * (log_p + entropy[:, None]))
        column, there = _columns(own, chunk)
        dz = dz.at[jnp.arange(rows)[:, None], column].add(jnp.where(there, g_logp, 0.0))
        dz = (dz * scale).astype(hidden.dtype)
        d_hidden = d_hidden + einsum("nv,vd->nd", dz, chunk.weight, out=jnp.float32)
        d_chunk = einsum("nv,nd->vd", dz, hidden, out=jnp.float32).astype(weight.dtype)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_weight, d_chunk, chunk.start, 0)

    carry = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(weight.shape, weight.dtype))
    d_hidden, d_weight = _over_chunks(body, weight, rows, carry)
    return d_hidden.astype(hidden.dtype), d_weight, None, None


_statistics: Any = jax.custom_vjp(_primal, nondiff_argnums=(4, 5, 6))
_statistics.defvjp(_statistics_fwd, _statistics_bwd)

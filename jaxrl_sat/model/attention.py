"""Rotary embeddings, and causal attention over packed rows or over a cache of keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.ops import einsum

Rope = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]

# Queries are taken in chunks, each against its causal prefix of the keys. There are at most MAX_PREFIXES prefixes, so
# that a long row does not unroll into hundreds of programs; inside one prefix the chunks run in a loop.
QUERY_CHUNK = 128
MAX_PREFIXES = 8


def rope(positions: Int[Array, "B T"], head_dim: int, theta: float) -> Rope:
    """cos and sin of position * theta^(-2i/head_dim), i < head_dim/2, in float32."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T H hd"], angles: Rope) -> Float[Array, "B T H hd"]:
    """Rotary embedding in the rotate-half layout: pairs are (i, i + head_dim/2). Computed in float32."""
    cos, sin = (a[:, :, None, :] for a in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend_segments(
    q: Float[Array, "B T H hd"],
    k: Float[Array, "B T KV hd"],
    v: Float[Array, "B T KV hd"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T H hd"]:
    """Causal attention inside each segment: row t sees s <= t of the same segment. Softmax in float32.

    Never holds [T, T] for more than QUERY_CHUNK queries; the chunks are recomputed in the backward pass.
    """
    batch, length, heads, head_dim = q.shape
    q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
    if length <= QUERY_CHUNK:
        return _attend_prefix(q, k, v, segment_ids, segment_ids, 0).reshape(batch, length, heads, head_dim)

    chunks = -(-length // QUERY_CHUNK)
    chunks_per_prefix = -(-chunks // MAX_PREFIXES)
    outs = []
    for start in range(0, length, chunks_per_prefix * QUERY_CHUNK):
        stop = min(start + chunks_per_prefix * QUERY_CHUNK, length)
        prefix = (k[:, :stop], v[:, :stop], segment_ids[:, :stop])
        outs.append(_attend_chunks(q[:, start:stop], *prefix, segment_ids[:, start:stop], start))
    return jnp.concatenate(outs, axis=1).reshape(batch, length, heads, head_dim)


def attend_segments_from(
    q: Float[Array, "B Q H hd"],
    k: Float[Array, "B T KV hd"],
    v: Float[Array, "B T KV hd"],
    q_segments: Int[Array, "B Q"],
    k_segments: Int[Array, "B T"],
    start: Int[Array, ""],
) -> Float[Array, "B Q H hd"]:
    """The same for queries start, start + 1, ... of the row alone, against all of its keys."""
    batch, length, heads, head_dim = q.shape
    q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
    return _attend_chunks(q, k, v, k_segments, q_segments, start).reshape(batch, length, heads, head_dim)


def _attend_chunks(q: Array, k: Array, v: Array, k_segments: Array, q_segments: Array, start: int | Array) -> Array:
    """Queries start..start+n-1 against one prefix of the keys, QUERY_CHUNK at a time."""
    block = jax.checkpoint(_attend_prefix)
    count = q.shape[1]
    whole = count // QUERY_CHUNK * QUERY_CHUNK
    outs = []
    if whole > QUERY_CHUNK:
        starts = start + jnp.arange(0, whole, QUERY_CHUNK)
        split = (_split(q[:, :whole]), _split(q_segments[:, :whole]), starts)
        _, out = jax.lax.scan(lambda _, x: (None, block(x[0], k, v, x[1], k_segments, x[2])), None, split)
        outs.append(jnp.moveaxis(out, 0, 1).reshape(q.shape[0], whole, *q.shape[2:]))
    elif whole:
        outs.append(block(q[:, :whole], k, v, q_segments[:, :whole], k_segments, start))
    if whole < count:
        outs.append(block(q[:, whole:], k, v, q_segments[:, whole:], k_segments, start + whole))
    return jnp.concatenate(outs, axis=1)


def _split(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(x.shape[0], -1, QUERY_CHUNK, *x.shape[2:]), 1, 0)


def _attend_prefix(
    q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array, start: int | Int[Array, ""]
) -> Array:
    """Queries [B, Q, KV, G, hd] at rows start, start+1, ... against all keys given."""
    rows = start + jnp.arange(q.shape[1])
    visible = (rows[:, None] >= jnp.arange(k.shape[1])) & (q_segments[:, :, None] == k_segments[:, None, :])
    scores = einsum("bqkgd,bskd->bkgqs", q * q.shape[-1] ** -0.5, k, out=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    return einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


def attend_cache(
    q: Float[Array, "S H hd"],
    k: Float[Array, "S L KV hd"],
    v: Float[Array, "S L KV hd"],
    positions: Int[Array, " S"],
) -> Float[Array, "S H hd"]:
    """One query a slot against the cached positions 0..position. Softmax in float32."""
    slots, heads, head_dim = q.shape
    q = q.reshape(slots, k.shape[2], heads // k.shape[2], head_dim) * head_dim**-0.5
    scores = einsum("skgd,slkd->skgl", q, k, out=jnp.float32)
    visible = jnp.arange(k.shape[1]) <= positions[:, None]
    probs = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    return einsum("skgl,slkd->skgd", probs.astype(v.dtype), v).reshape(slots, heads, head_dim)

"""Rotary embeddings, and causal attention over packed rows or over a cache of keys and values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.ops import einsum, saved
from jaxrl_sat.types import AnyArray

Rope = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]

# Queries are taken in chunks, each against its causal prefix of the keys. There are at most MAX_PREFIXES prefixes, so
# that a long row does not unroll into hundreds of programs; inside one prefix the chunks run in a loop.
QUERY_CHUNK = 64
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

    Never holds scores of more than QUERY_CHUNK queries. For the backward pass only the output and the log of each
    query's normaliser are kept (Dao et al. 2022, arXiv:2205.14135, Algorithms 2 and 4).
    """
    return _grouped(_Plan.of_row(q.shape[1]), q, k, v, segment_ids, segment_ids, jnp.int32(0))


def attend_segments_from(
    q: Float[Array, "B Q H hd"],
    k: Float[Array, "B T KV hd"],
    v: Float[Array, "B T KV hd"],
    q_segments: Int[Array, "B Q"],
    k_segments: Int[Array, "B T"],
    start: Int[Array, ""],
) -> Float[Array, "B Q H hd"]:
    """The same for queries start, start + 1, ... of the row alone, against all of its keys."""
    return _grouped(_Plan.of_piece(q.shape[1], k.shape[1]), q, k, v, q_segments, k_segments, start)


class _Plan(tuple[tuple[int, int, int, int], ...]):
    """Runs of equal chunks: (first query, end of the queries, queries a chunk, keys in sight), in order."""

    @classmethod
    def of_row(cls, length: int) -> _Plan:
        chunks = -(-length // QUERY_CHUNK)
        size = -(-chunks // MAX_PREFIXES) * QUERY_CHUNK
        ends = [min(first + size, length) for first in range(0, length, size)]
        return cls(run for first, end in zip([0, *ends], ends, strict=False) for run in cls._runs(first, end, end))

    @classmethod
    def of_piece(cls, queries: int, keys: int) -> _Plan:
        return cls(cls._runs(0, queries, keys))

    @staticmethod
    def _runs(first: int, end: int, keys: int) -> list[tuple[int, int, int, int]]:
        whole = first + (end - first) // QUERY_CHUNK * QUERY_CHUNK
        runs = [(first, whole, QUERY_CHUNK, keys), (whole, end, end - whole, keys)]
        return [run for run in runs if run[0] < run[1]]


def _grouped(
    plan: _Plan, q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array, start: Int[AnyArray, ""]
) -> Float[Array, "B Q H hd"]:
    """Heads first, so that every product is one of two plain matrices for each key head and row."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim).transpose(0, 2, 3, 1, 4)
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    out: Array = _attention(plan, grouped * head_dim**-0.5, k, v, q_segments, k_segments, start)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    plan: _Plan,
    q: Float[Array, "B KV G Q hd"],
    k: Float[Array, "B KV T hd"],
    v: Float[Array, "B KV T hd"],
    q_segments: Int[Array, "B Q"],
    k_segments: Int[Array, "B T"],
    start: Int[AnyArray, ""],
) -> Float[Array, "B KV G Q hd"]:
    return _attention_forward(plan, q, k, v, q_segments, k_segments, start)[0]


def _attention_forward(
    plan: _Plan, q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array, start: AnyArray
) -> tuple[Array, tuple[AnyArray, ...]]:
    """The output, and what the backward pass keeps: with it the log of each query's normaliser, [B, KV, G, Q, 1]."""
    outs, normalisers = [], []
    for first, end, chunk, keys in plan:
        prefix = (k[:, :, :keys], v[:, :, :keys], k_segments[:, :keys])
        xs = (_chunks(chunk, q[:, :, :, first:end]), *_places(q_segments, start, first, end, chunk))
        _, (out, normaliser) = jax.lax.scan(functools.partial(_forward_block, prefix), None, xs)
        outs.append(_queries(q.shape[2], out))
        normalisers.append(_queries(q.shape[2], normaliser))
    out, normaliser = (saved(jnp.concatenate(parts, axis=3)) for parts in (outs, normalisers))
    return out, (q, k, v, q_segments, k_segments, start, out, normaliser)


def _forward_block(
    prefix: tuple[Array, Array, Array], _: None, chunk: tuple[Array, Array, Array]
) -> tuple[None, tuple[Array, Array]]:
    k, v, k_segments = prefix
    q, q_segments, at = chunk
    scores = _scores(q, k, q_segments, k_segments, at)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = _product("bkrs,bksd->bkrd", weights.astype(v.dtype), v) / total
    return None, (out.astype(v.dtype), largest + jnp.log(total))


def _attention_backward(plan: _Plan, kept: tuple[AnyArray, ...], d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, q_segments, k_segments, start, out, normaliser = kept
    wide = normaliser.dtype
    # sum over keys of weight * d_weight, as the output already holds it
    inner = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1, keepdims=True)
    # With the keys last, so that the larger operand of their products need not be transposed.
    d_k, d_v = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), wide) for x in (k, v))
    d_qs = []
    for first, end, chunk, keys in plan:
        prefix = (k[:, :, :keys], v[:, :, :keys], k_segments[:, :keys])
        own = (_chunks(chunk, x[:, :, :, first:end]) for x in (q, d_out, normaliser, inner))
        xs = (*own, *_places(q_segments, start, first, end, chunk))
        sums = (d_k[..., :keys], d_v[..., :keys])
        sums, d_q = jax.lax.scan(functools.partial(_backward_block, prefix), sums, xs)
        d_k, d_v = d_k.at[..., :keys].set(sums[0]), d_v.at[..., :keys].set(sums[1])
        d_qs.append(_queries(q.shape[2], d_q))
    d_k, d_v = (d.swapaxes(2, 3).astype(x.dtype) for d, x in ((d_k, k), (d_v, v)))
    return jnp.concatenate(d_qs, axis=3), d_k, d_v, None, None, None


def _backward_block(
    prefix: tuple[Array, Array, Array], sums: tuple[Array, Array], chunk: tuple[Array, ...]
) -> tuple[tuple[Array, Array], Array]:
    k, v, k_segments = prefix
    q, d_out, normaliser, inner, q_segments, at = chunk
    weights = jnp.exp(_scores(q, k, q_segments, k_segments, at) - normaliser)
    d_scores = (weights * (_product("bkrd,bksd->bkrs", d_out, v) - inner)).astype(q.dtype)
    d_k = sums[0] + _product("bkrd,bkrs->bkds", q, d_scores)
    d_v = sums[1] + _product("bkrd,bkrs->bkds", d_out, weights.astype(d_out.dtype))
    return (d_k, d_v), _product("bkrs,bksd->bkrd", d_scores, k).astype(q.dtype)


_attention.defvjp(_attention_forward, _attention_backward)


def _places(q_segments: Array, start: AnyArray, first: int, end: int, chunk: int) -> tuple[Array, Array]:
    """Of each chunk the segment ids, [N, B, C], and where in the row it starts."""
    ids = q_segments[:, first:end].reshape(q_segments.shape[0], -1, chunk)
    return ids.swapaxes(0, 1), start + jnp.arange(first, end, chunk)


def _scores(q: Array, k: Array, q_segments: Array, k_segments: Array, at: Array) -> Float[Array, "B KV R T"]:
    """Queries at, at + 1, ... against the keys; -inf where they do not see. R rows: C queries of each of G heads."""
    positions = at + jnp.arange(q_segments.shape[1])
    visible = (positions[:, None] >= jnp.arange(k.shape[2])) & (q_segments[:, :, None] == k_segments[:, None, :])
    visible = jnp.tile(visible, (1, q.shape[2] // q_segments.shape[1], 1))
    return jnp.where(visible[:, None], _product("bkrd,bksd->bkrs", q, k), -jnp.inf)


def _product(spec: str, a: Array, b: Array) -> Array:
    """`einsum` with its result in float32, or wider."""
    return einsum(spec, a, b, out=jnp.promote_types(a.dtype, jnp.float32))


def _chunks(size: int, x: Float[Array, "B KV G Q d"]) -> Float[Array, "N B KV R d"]:
    """Queries in N chunks, those of the G heads of one key head as rows of one matrix."""
    chunks = jnp.moveaxis(x.reshape(*x.shape[:3], -1, size, x.shape[-1]), 3, 0)
    return chunks.reshape(*chunks.shape[:3], -1, x.shape[-1])


def _queries(groups: int, x: Float[Array, "N B KV R d"]) -> Float[Array, "B KV G Q d"]:
    """The other way."""
    chunks = jnp.moveaxis(x.reshape(*x.shape[:3], groups, -1, x.shape[-1]), 0, 3)
    return chunks.reshape(*chunks.shape[:3], -1, x.shape[-1])

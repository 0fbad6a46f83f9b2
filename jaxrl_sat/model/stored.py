"""Keys and values of one layer as a cache stores them, in floating point or in 8-bit integers, and attention to them.

An 8-bit entry is an integer times the scale of its token and head, the largest |x| over 127. A scale is the same for
all of a head's numbers, so it multiplies scores and probabilities, and no cache is ever held in full precision.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.ops import einsum
from jaxrl_sat.types import AnyArray


@struct.dataclass
class Int8:
    """Numbers in 8 bits; also a place for what there is to say of each of the two arrays, as of their cuts."""

    values: AnyArray  # int8 [S, L, KV, hd]
    scale: AnyArray  # float32 [S, KV, L]


Stored = Any
"""A floating-point array [S, L, KV, hd], or the same in `Int8`."""


def is_stored(node: Any) -> bool:
    """Whether a node of a tree is one layer's keys or values: `is_leaf` of a cache."""
    return isinstance(node, Int8)


def empty(slots: int, length: int, heads: int, head_dim: int, dtype: Any) -> Stored:
    """Zeros; `dtype` int8 or floating."""
    values = jnp.zeros((slots, length, heads, head_dim), dtype)
    return Int8(values, jnp.zeros((slots, heads, length), jnp.float32)) if jnp.dtype(dtype) == jnp.int8 else values


def dtype_of(stored: Stored) -> Any:
    """int8, or that of the array."""
    return stored.values.dtype if isinstance(stored, Int8) else stored.dtype


def stored(x: Float[Array, "S L KV hd"], dtype: Any) -> Stored:
    """Keys or values as a cache of `dtype` has them."""
    if jnp.dtype(dtype) != jnp.int8:
        return x.astype(dtype)
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / 127
    values = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8)
    return Int8(values, scale.swapaxes(1, 2))


def write(cache: Stored, new: Float[Array, "S C KV hd"], positions: Int[Array, "S C"]) -> Stored:
    """The cache with each slot's entries at its `positions`; those at and beyond its length are dropped."""
    put = stored(new, dtype_of(cache))
    slots = jnp.arange(positions.shape[0])[:, None]
    if isinstance(cache, Int8):
        scale = cache.scale.at[slots, :, positions].set(put.scale.swapaxes(1, 2), mode="drop")
        return Int8(cache.values.at[slots, positions].set(put.values, mode="drop"), scale)
    return cache.at[slots, positions].set(put, mode="drop")


def insert(cache: Stored, rows: Stored, slots: Int[Array, " N"]) -> Stored:
    """The cache with N rows of a shorter one at the start of `slots`; those at and beyond its slots are dropped."""
    if isinstance(cache, Int8):
        length = rows.values.shape[1]
        scale = cache.scale.at[slots, :, :length].set(rows.scale, mode="drop")
        return Int8(cache.values.at[slots, :length].set(rows.values, mode="drop"), scale)
    return cache.at[slots, : rows.shape[1]].set(rows, mode="drop")


def from_blocks(pool: Stored, blocks: Int[Array, "S n"]) -> Stored:
    """Rows put together from the entries of a pool [N, C, ...], n one after the other; zeros for those beyond it."""

    def taken(array: Array) -> Array:
        return jnp.take(array, blocks, axis=0, mode="fill", fill_value=0)

    slots, count = blocks.shape
    if isinstance(pool, Int8):
        scale = jnp.moveaxis(taken(pool.scale), 1, 2)
        return Int8(from_blocks(pool.values, blocks), scale.reshape(slots, scale.shape[1], -1))
    return taken(pool).reshape(slots, count * pool.shape[1], *pool.shape[2:])


def to_blocks(pool: Stored, rows: Stored, blocks: Int[Array, "S n"]) -> Stored:
    """The pool with its entries `blocks` taken from rows [S, n * C, ...]; those beyond it are dropped."""
    if isinstance(pool, Int8):
        cut = rows.scale.reshape(*rows.scale.shape[:2], blocks.shape[1], -1)
        scale = pool.scale.at[blocks].set(jnp.moveaxis(cut, 2, 1), mode="drop")
        return Int8(to_blocks(pool.values, rows.values, blocks), scale)
    return pool.at[blocks].set(rows.reshape(*blocks.shape, *pool.shape[1:]), mode="drop")


def read(cache: Stored, start: Int[Array, ""], size: int, dtype: Any) -> Float[Array, "S C KV hd"]:
    """`size` positions of every slot from `start` on, in `dtype`."""
    if not isinstance(cache, Int8):
        return jax.lax.dynamic_slice_in_dim(cache, start, size, axis=1).astype(dtype)
    values = jax.lax.dynamic_slice_in_dim(cache.values, start, size, axis=1).astype(jnp.float32)
    scale = jax.lax.dynamic_slice_in_dim(cache.scale, start, size, axis=2)
    return (values * scale.swapaxes(1, 2)[..., None]).astype(dtype)


def attend_cache(
    q: Float[Array, "S H hd"], k: Stored, v: Stored, positions: Int[Array, " S"]
) -> Float[Array, "S H hd"]:
    """One query a slot against the cached positions 0..position. Softmax in float32."""
    slots, heads, head_dim = q.shape
    keys, values = (x.values.astype(q.dtype) if isinstance(x, Int8) else x for x in (k, v))
    q = q.reshape(slots, keys.shape[2], heads // keys.shape[2], head_dim) * head_dim**-0.5
    scores = einsum("skgd,slkd->skgl", q, keys, out=jnp.float32)
    if isinstance(k, Int8):
        scores = scores * k.scale[:, :, None]
    visible = jnp.arange(keys.shape[1]) <= positions[:, None]
    probs = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    if isinstance(v, Int8):
        probs = probs * v.scale[:, :, None]
    return einsum("skgl,slkd->skgd", probs.astype(values.dtype), values).reshape(slots, heads, head_dim)


def attend_chunk(
    q: Float[Array, "S C H hd"],
    k: Float[Array, "S C KV hd"],
    v: Float[Array, "S C KV hd"],
    cache: tuple[Stored, Stored],
    start: Int[Array, ""],
) -> Float[Array, "S C H hd"]:
    """Queries at start, start + 1, ... against themselves causally and the cached positions before `start`.

    `start` is a multiple of C. The cache is read C positions at a time with a running softmax in float32, so what a
    chunk gives does not depend on how long the cache is (Dao et al. 2022, arXiv:2205.14135, Algorithm 1).
    """
    slots, size, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = (q * head_dim**-0.5).reshape(slots, size, kv_heads, heads // kv_heads, head_dim)

    def block(keys: Array, values: Array, visible: Array | None) -> tuple[Array, Array, Array]:
        """Largest score, sum of weights, weighted values: float32 [S, KV, G, C, 1 or hd]."""
        scores = einsum("sckgd,slkd->skgcl", grouped, keys, out=jnp.float32)
        scores = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        out = einsum("skgcl,slkd->skgcd", weights.astype(values.dtype), values, out=jnp.float32)
        return largest, jnp.sum(weights, axis=-1, keepdims=True), out

    def join(index: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        keys, values = (read(part, index * size, size, k.dtype) for part in cache)
        found = block(keys, values, None)
        largest = jnp.maximum(so_far[0], found[0])
        old, new = jnp.exp(so_far[0] - largest), jnp.exp(found[0] - largest)
        return largest, so_far[1] * old + found[1] * new, so_far[2] * old + found[2] * new

    own = block(k, v, jnp.tril(jnp.ones((size, size), bool)))
    _, total, out = jax.lax.fori_loop(0, start // size, join, own)
    return jnp.moveaxis(out / total, 3, 1).reshape(slots, size, heads, head_dim).astype(q.dtype)

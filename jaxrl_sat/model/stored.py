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

    values: AnyArray  # int8 [S, KV, L, hd]
    scale: AnyArray  # float32 [S, KV, L]


Stored = Any
"""A floating-point array [S, KV, L, hd], or the same in `Int8`. Heads first: attention reads a head's entries in a row.
"""


def is_stored(node: Any) -> bool:
    """Whether a node of a tree is one layer's keys or values: `is_leaf` of a cache."""
    return isinstance(node, Int8)


def empty(slots: int, length: int, heads: int, head_dim: int, dtype: Any) -> Stored:
    """Zeros; `dtype` int8 or floating."""
    values = jnp.zeros((slots, heads, length, head_dim), dtype)
    return Int8(values, jnp.zeros((slots, heads, length), jnp.float32)) if jnp.dtype(dtype) == jnp.int8 else values


def dtype_of(stored: Stored) -> Any:
    """int8, or that of the array."""
    return stored.values.dtype if isinstance(stored, Int8) else stored.dtype


def stored(x: Float[Array, "S L KV hd"], dtype: Any) -> Stored:
    """Keys or values as a cache of `dtype` has them."""
    x = x.swapaxes(1, 2)
    if jnp.dtype(dtype) != jnp.int8:
        return x.astype(dtype)
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / 127
    values = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8)
    return Int8(values, scale)


def write(cache: Stored, new: Float[Array, "S C KV hd"], positions: Int[Array, "S C"]) -> Stored:
    """The cache with each slot's entries at its `positions`; those at and beyond its length are dropped."""
    slots, heads = jnp.arange(positions.shape[0])[:, None, None], jnp.arange(new.shape[2])[:, None]

    def put(old: Array, entries: Array) -> Array:
        # Heads one by one: written together, a TPU would have them side by side, and turn the whole cache for it.
        return old.at[slots, heads, positions[:, None]].set(entries, mode="drop")

    return jax.tree.map(put, cache, stored(new, dtype_of(cache)))


def insert(cache: Stored, rows: Stored, slots: Int[Array, " N"]) -> Stored:
    """The cache with N rows of a shorter one at the start of `slots`; those at and beyond its slots are dropped."""

    def put(old: Array, new: Array) -> Array:
        return old.at[slots, :, : new.shape[2]].set(new, mode="drop")

    return jax.tree.map(put, cache, rows)


def from_blocks(pool: Stored, blocks: Int[Array, "S n"]) -> Stored:
    """Rows put together from the entries of a pool [N, KV, C, ...], n one after the other; zeros for those beyond it.

    Also of an array that is no cache, if of so many axes.
    """

    def rows(array: Array) -> Array:
        taken = jnp.moveaxis(jnp.take(array, blocks, axis=0, mode="fill", fill_value=0), 1, 2)
        return taken.reshape(*taken.shape[:2], -1, *taken.shape[4:])

    return jax.tree.map(rows, pool)


def to_blocks(pool: Stored, rows: Stored, blocks: Int[Array, "S n"]) -> Stored:
    """The pool with its entries `blocks` taken from rows [S, KV, n * C, ...]; those beyond it are dropped."""

    def put(old: Array, new: Array) -> Array:
        cut = new.reshape(*new.shape[:2], blocks.shape[1], *old.shape[2:])
        return old.at[blocks].set(jnp.moveaxis(cut, 2, 1), mode="drop")

    return jax.tree.map(put, pool, rows)


def read(cache: Stored, start: Int[Array, ""], size: int, dtype: Any) -> Float[Array, "S KV C hd"]:
    """`size` positions of every slot from `start` on, in `dtype`."""
    part = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, size, axis=2), cache)
    if not isinstance(part, Int8):
        return part.astype(dtype)
    return (part.values.astype(jnp.float32) * part.scale[..., None]).astype(dtype)


def attend_cache(
    q: Float[Array, "S H hd"], k: Stored, v: Stored, positions: Int[Array, " S"]
) -> Float[Array, "S H hd"]:
    """One query a slot against the cached positions 0..position. Softmax in float32.

    Rounded where `attention.attend_segments` rounds, so that in bfloat16 the trainer's numbers are these too.
    """
    slots, heads, head_dim = q.shape
    keys, values = (x.values.astype(q.dtype) if isinstance(x, Int8) else x for x in (k, v))
    q = q.reshape(slots, keys.shape[1], heads // keys.shape[1], head_dim) * head_dim**-0.5
    scores = jax.lax.platform_dependent(q, keys, cpu=_scores_of_few, default=_scores)
    if isinstance(k, Int8):
        scores = scores * k.scale[:, :, None]
    visible = jnp.arange(keys.shape[2]) <= positions[:, None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if isinstance(v, Int8):
        weights = weights * v.scale[:, :, None]
    out = einsum("skgl,skld->skgd", weights.astype(values.dtype), values, out=jnp.float32) / total
    return out.astype(values.dtype).reshape(slots, heads, head_dim)


def _scores(q: Float[Array, "S KV G hd"], keys: Float[Array, "S KV L hd"]) -> Float[Array, "S KV G L"]:
    return einsum("skgd,skld->skgl", q, keys, out=jnp.float32)


def _scores_of_few(q: Array, keys: Array) -> Array:
    """The same with the long operand on the left, where a CPU reads it as it lies: see `output_first`."""
    return jax.lax.optimization_barrier(einsum("skld,skgd->sklg", keys, q, out=jnp.float32)).swapaxes(2, 3)


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
    k, v = (x.swapaxes(1, 2) for x in (k, v))

    def block(keys: Array, values: Array, visible: Array | None) -> tuple[Array, Array, Array]:
        """Largest score, sum of weights, weighted values: float32 [S, KV, G, C, 1 or hd]."""
        scores = einsum("sckgd,skld->skgcl", grouped, keys, out=jnp.float32)
        scores = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        out = einsum("skgcl,skld->skgcd", weights.astype(values.dtype), values, out=jnp.float32)
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

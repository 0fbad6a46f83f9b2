"""Drawing a word from logits, and the log-probs of the distribution it was drawn from.

Everything is per slot: a slot's word depends on its own logits, seed and position, never on its neighbours. A large
vocabulary is read in blocks: `jax.random.categorical` needs a random number a word and a sort-based top-K orders all of
them, where two short searches do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

BLOCK = 512
"""Words a block holds where the vocabulary is searched in two levels."""


@struct.dataclass
class Draw:
    """A word a slot, its log-prob, and the K most likely words with theirs, most likely first."""

    tokens: Int[Array, " S"]
    logp: Float[Array, " S"]
    topk_ids: Int[Array, "S K"]
    topk_logp: Float[Array, "S K"]


def draw(
    logits: Float[Array, "S V"],
    seeds: UInt[Array, " S"],
    positions: Int[Array, " S"],
    temperature: Float[Array, " S"],
    topk: int,
) -> Draw:
    """Sample one word a slot from softmax(logits / temperature); temperature 0 takes the first argmax.

    Log-probs are those of the full vocabulary after the temperature, in float32 (of the untempered softmax where it
    is 0). The random numbers are a function of (seed, position) alone.
    """
    greedy = temperature == 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None]
    top = jnp.max(scaled, axis=-1, keepdims=True)
    weight = jnp.exp(scaled - top)
    log_total = top[:, 0] + jnp.log(jnp.sum(weight, axis=-1))
    sampled = inverse_cdf(weight, uniforms(seeds, positions))
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), sampled)
    values, ids = top_k(scaled, topk)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return Draw(tokens, chosen - log_total, ids, values - log_total[:, None])


def uniforms(seeds: UInt[Array, " S"], positions: Int[Array, " S"]) -> Float[Array, "S 2"]:
    """Two numbers in [0, 1) a slot from its own key, fold_in(key(seed), position)."""

    def one(seed, position):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.uniform(key, (2,), jnp.float32)

    return jax.vmap(one)(seeds, positions)


def inverse_cdf(weight: Float[Array, "S V"], u: Float[Array, "S 2"]) -> Int[Array, " S"]:
    """The word where the running sum of unnormalised probabilities passes a uniform number.

    A large vocabulary takes two levels, P(word) = P(block) P(word | block), each with a number of its own: words far
    rarer than the spacing of float32 just below 1 keep their probability. Never a word of weight 0.
    """
    slots, words = weight.shape
    if words <= 4 * BLOCK:
        return _search(weight, u[:, 0])
    blocks = -(-words // BLOCK)
    tiled = jnp.pad(weight, ((0, 0), (0, blocks * BLOCK - words))).reshape(slots, blocks, BLOCK)
    block = _search(jnp.sum(tiled, axis=-1), u[:, 0])
    inside = jnp.take_along_axis(tiled, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _search(inside, u[:, 1])


def _search(weight: Float[Array, "S n"], u: Float[Array, " S"]) -> Int[Array, " S"]:
    """First index whose running sum exceeds u times the total. `weight > 0` is asked for beside it, since a parallel
    sum rounds and may rise across a zero; where rounding leaves no such index, the last one that has weight."""
    running = jnp.cumsum(weight, axis=-1)
    possible: Bool[Array, "S n"] = weight > 0
    passed = possible & (running > u[:, None] * running[:, -1:])
    first = jnp.argmax(passed, axis=-1)
    last = weight.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), first, last).astype(jnp.int32)


def top_k(values: Float[Array, "S V"], k: int) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:
    """`lax.top_k`, ties included, without ordering a large vocabulary.

    The k largest lie in the k blocks of largest maximum (earlier blocks first where maxima tie): any block left out is
    preceded by k words, one from each block kept.
    """
    slots, words = values.shape
    block = 64
    blocks = -(-words // block)
    if blocks < 4 * k:
        found, ids = jax.lax.top_k(values, k)
        return found, ids.astype(jnp.int32)
    tiled = jnp.pad(values, ((0, 0), (0, blocks * block - words)), constant_values=-jnp.inf)
    tiled = tiled.reshape(slots, blocks, block)
    kept = jnp.sort(jax.lax.top_k(jnp.max(tiled, axis=-1), k)[1], axis=-1)
    near = jnp.take_along_axis(tiled, kept[:, :, None], axis=1).reshape(slots, k * block)
    found, where = jax.lax.top_k(near, k)
    ids = jnp.take_along_axis(kept, where // block, axis=-1) * block + where % block
    return found, ids.astype(jnp.int32)

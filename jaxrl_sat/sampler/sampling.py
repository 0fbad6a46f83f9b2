"""Drawing a word from logits, and the log-probs of the distribution it was drawn from: all words, or a nucleus.

Everything is per slot: a slot's word depends on its own logits, seed and position, never on its neighbours. A large
vocabulary is read in blocks: `jax.random.categorical` needs a random number a word and a sort-based top-K orders all of
them, where two short searches do.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

BLOCK = 512
"""Words a block holds where the vocabulary is searched in two levels."""

LANES = 8
"""Words of a block that a CPU adds to as many others at once."""


@struct.dataclass
class Draw:
    """A word a slot, its log-prob, and the K most likely words with theirs, most likely first.

    `nucleus_ids`: the words that could be drawn, most likely first, -1 behind the last; C is 0 where every word could.
    """

    tokens: Int[Array, " S"]
    logp: Float[Array, " S"]
    topk_ids: Int[Array, "S K"]
    topk_logp: Float[Array, "S K"]
    nucleus_ids: Int[Array, "S C"]


def draw(
    logits: Float[Array, "S V"],
    seeds: UInt[Array, " S"],
    positions: Int[Array, " S"],
    temperature: Float[Array, " S"],
    topk: int,
    nucleus: int = 0,
    top_p: Float[Array, " S"] | float = 1.0,
    top_k: Int[Array, " S"] | int = 0,
) -> Draw:
    """Sample one word a slot from softmax(logits / temperature); temperature 0 takes the first argmax.

    Log-probs are those of the full vocabulary after the temperature, in float32 (of the untempered softmax where it
    is 0). With `nucleus` above 0 a slot whose `top_p` is below 1 or whose `top_k` is above 0 draws from its nucleus
    instead, see `nucleus_weight`, cut at `nucleus` words, and log-probs are those of what is drawn from: -inf for a
    top-K word outside it. The random numbers are a function of (seed, position) alone.
    """
    greedy = temperature == 0
    divisor = jnp.where(greedy, 1.0, temperature)[:, None]
    if nucleus:
        argmax = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        scaled = logits.astype(jnp.float32) / divisor
        kept = tuple(jnp.broadcast_to(jnp.asarray(value), greedy.shape) for value in (top_p, top_k))
        return _draw_restricted(scaled, uniforms(seeds, positions), greedy, argmax, topk, nucleus, *kept)
    wide = logits.astype(jnp.float32)
    # The order is that of the tempered logits, which are never written out: two passes over the words are all.
    values, ids = _ranked(wide, max(1, topk))
    largest = values[:, :1]

    def weigh(z: Array) -> Array:
        top, rate = (x.reshape(-1, *(1,) * (z.ndim - 1)) for x in (largest, 1 / divisor))
        return jnp.exp((z - top) * rate)

    sampled, total = _inverse_cdf(wide, weigh, -jnp.inf, uniforms(seeds, positions))
    tokens = jnp.where(greedy, ids[:, 0], sampled)
    log_total = jnp.log(total)[:, None]
    chosen = jnp.take_along_axis(wide, tokens[:, None], axis=-1)
    logp, topk_logp = ((z - largest) / divisor - log_total for z in (chosen, values))
    return Draw(tokens, logp[:, 0], ids[:, :topk], topk_logp[:, :topk], jnp.zeros((len(ids), 0), jnp.int32))


def _draw_restricted(
    scaled: Float[Array, "S V"],
    u: Float[Array, "S 2"],
    greedy: Bool[Array, " S"],
    argmax: Int[Array, " S"],
    topk: int,
    cap: int,
    top_p: Float[Array, " S"],
    top_k: Int[Array, " S"],
) -> Draw:
    """One word a slot from its nucleus. From all words and with an empty record where nothing restricts it; the same
    with `argmax` for the word where `greedy`."""
    values, ids = _ranked(scaled, max(topk, cap))
    largest = values[:, :1]
    every = jnp.exp(scaled - largest)
    total = jnp.sum(every, axis=-1)
    values = values - largest
    weight = nucleus_weight(jnp.exp(values[:, :cap]), total, top_p, top_k)
    inside = weight > 0
    whole = greedy | ((top_p >= 1) & (top_k <= 0))
    ranked = jnp.take_along_axis(ids, inverse_cdf(weight, u)[:, None], axis=-1)[:, 0]
    free = jax.lax.cond(jnp.any(whole & ~greedy), inverse_cdf, lambda _, __: argmax, every, u)
    tokens = jnp.where(greedy, argmax, jnp.where(whole, free, ranked))
    log_total = jnp.log(jnp.where(whole, total, jnp.sum(weight, axis=-1)))[:, None]
    drawable = whole[:, None] | jnp.pad(inside, ((0, 0), (0, values.shape[1] - cap)))
    return Draw(
        tokens=tokens,
        logp=(jnp.take_along_axis(scaled, tokens[:, None], axis=-1) - largest - log_total)[:, 0],
        topk_ids=ids[:, :topk],
        topk_logp=jnp.where(drawable, values - log_total, -jnp.inf)[:, :topk],
        nucleus_ids=jnp.where(inside & ~whole[:, None], ids[:, :cap], -1),
    )


def _ranked(values: Float[Array, "S V"], k: int) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:
    # Without barriers slices of the result reach into the sort, which XLA then does in full: eight times the whole.
    # One each: its compiler for CPUs ends the process where both go through one.
    found, ids = block_top_k(values, k)
    return jax.lax.optimization_barrier(found), jax.lax.optimization_barrier(ids)


def nucleus_weight(
    weight: Float[Array, "S C"],
    total: Float[Array, " S"],
    top_p: Float[Array, " S"],
    top_k: Int[Array, " S"],
) -> Float[Array, "S C"]:
    """`weight`, unnormalised probabilities of the C most likely words in falling order, 0 outside the nucleus.

    The nucleus is the shortest run of them from the first whose sum reaches `top_p` of that of the first `top_k` words,
    or of `total`, that of all words, where `top_k` is not above 0; all of these or all C where none does. It has the
    first word, and never a word of weight 0.
    """
    rank = jnp.arange(weight.shape[-1])
    limited = top_k > 0
    weight = jnp.where(limited[:, None] & (rank >= top_k[:, None]), 0.0, weight)
    total = jnp.where(limited, jnp.sum(weight, axis=-1), total)
    reached = (jnp.cumsum(weight, axis=-1) >= (top_p * total)[:, None]) & (top_p < 1)[:, None]
    last = jnp.where(jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), weight.shape[-1] - 1)
    return jnp.where(rank <= last[:, None], weight, 0.0)


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
    return _inverse_cdf(weight, lambda some: some, 0.0, u)[0]


def _inverse_cdf(
    values: Float[Array, "S V"], weigh: Callable[[Array], Array], nothing: float, u: Float[Array, "S 2"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """The word, and the sum of the weights. `weigh` makes them of values [S, ...], 0 of `nothing`."""
    if values.shape[1] <= 4 * BLOCK:
        return _search(weigh(values), u[:, 0])
    # Blocks that divide the vocabulary need no copy of it with padding.
    size = next((size for size in (BLOCK, BLOCK // 2, BLOCK // 4) if values.shape[1] % size == 0), BLOCK)
    tiled = _tiled(values, size, nothing)
    sums = _block_sums(tiled, weigh)
    block, total = _search(sums, u[:, 0])
    inside = weigh(jnp.take_along_axis(tiled, block[:, None, None], axis=1)[:, 0])
    return block * size + _search(inside, u[:, 1])[0], total


def _block_sums(tiled: Float[Array, "S blocks size"], weigh: Callable[[Array], Array]) -> Float[Array, "S blocks"]:
    """The sum of the weights of each block."""

    def in_lanes(tiled: Array) -> Array:
        # Of a sum XLA makes a chain of additions there, one word after the other; lanes are added at once. A product
        # ends it, since a sum would be merged with what is before it.
        parts = [weigh(part) for part in jnp.split(tiled, tiled.shape[-1] // LANES, axis=-1)]
        while len(parts) > 1:
            parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
        return jnp.einsum("sbl,l->sb", parts[0], jnp.ones(LANES), precision=jax.lax.Precision.HIGHEST)

    return jax.lax.platform_dependent(tiled, cpu=in_lanes, default=lambda tiled: jnp.sum(weigh(tiled), axis=-1))


def _tiled(values: Float[Array, "S V"], size: int, nothing: float) -> Float[Array, "S blocks size"]:
    """In blocks, the last one filled up with `nothing`."""
    slots, words = values.shape
    return jnp.pad(values, ((0, 0), (0, -words % size)), constant_values=nothing).reshape(slots, -1, size)


def _search(weight: Float[Array, "S n"], u: Float[Array, " S"]) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """First index whose running sum exceeds u times the total, and the total. `weight > 0` is asked for beside it: a
    parallel sum rounds and may rise across a zero. Where rounding leaves no such index, the last that has weight."""
    running = jnp.cumsum(weight, axis=-1)
    possible: Bool[Array, "S n"] = weight > 0
    passed = possible & (running > u[:, None] * running[:, -1:])
    index = jnp.arange(weight.shape[-1])
    first = jnp.min(jnp.where(passed, index, weight.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(possible, index, 0), axis=-1)
    # The total is the last running sum: of a sum over block sums XLA makes another one over all words.
    return jnp.minimum(first, last).astype(jnp.int32), running[:, -1]


def block_top_k(values: Float[Array, "S V"], k: int) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:
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
    tiled = _tiled(values, block, -jnp.inf)
    kept = jnp.sort(jax.lax.top_k(jnp.max(tiled, axis=-1), k)[1], axis=-1)
    near = jnp.take_along_axis(tiled, kept[:, :, None], axis=1).reshape(slots, k * block)
    found, where = jax.lax.top_k(near, k)
    ids = jnp.take_along_axis(kept, where // block, axis=-1) * block + where % block
    return found, ids.astype(jnp.int32)

"""Drawing a word from logits, and the log-probs of the distribution it was drawn from: all words, or a nucleus.

Everything is per slot: a slot's word depends on its own logits, seed and position, never on its neighbours. A large
vocabulary is read in blocks: `jax.random.categorical` needs a random number a word and a sort-based top-K orders all of
them, where two short searches do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

BLOCK = 128
"""Words a block of a large vocabulary holds."""

SMALL = 16 * BLOCK
"""Words of a vocabulary that is searched without blocks."""

GROUP = 32
"""Weights that a long running sum takes as one first."""

LANES = 8
"""Words of a block that a CPU weighs at once."""

EXP2 = (1.0, 0.69314698, 0.24022242, 0.05550734, 0.00967151, 0.00132647)
"""2^r on [-1/2, 1/2] to 1e-7, by minimax fit: the coefficients of r^0, r^1 and so on."""


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
    rate = 1 / jnp.where(greedy, 1.0, temperature)
    wide = logits.astype(jnp.float32)
    # The order is that of the tempered logits, which are never written out: two passes over the words are all.
    values, ids = _ranked(wide, max(1, topk, nucleus))
    u = uniforms(seeds, positions)
    sampled, total = inverse_cdf(wide, values[:, 0], rate, u)
    relative = (values - values[:, :1]) * rate[:, None]
    drawable = jnp.ones_like(ids, bool)
    nucleus_ids = jnp.zeros((len(ids), 0), jnp.int32)
    if nucleus:
        top_p, top_k = (jnp.broadcast_to(jnp.asarray(value), greedy.shape) for value in (top_p, top_k))
        whole = greedy | ((top_p >= 1) & (top_k <= 0))
        weight = nucleus_weight(jnp.exp(relative[:, :nucleus]), total, top_p, top_k)
        rank, kept = _search(weight, u[:, 0])
        sampled = jnp.where(whole, sampled, jnp.take_along_axis(ids, rank[:, None], axis=-1)[:, 0])
        total = jnp.where(whole, total, kept)
        drawable = whole[:, None] | jnp.pad(weight > 0, ((0, 0), (0, ids.shape[1] - nucleus)))
        nucleus_ids = jnp.where(whole[:, None] | (weight == 0), -1, ids[:, :nucleus])
    tokens = jnp.where(greedy, ids[:, 0], sampled)
    log_total = jnp.log(total)[:, None]
    chosen = jnp.take_along_axis(wide, tokens[:, None], axis=-1)
    return Draw(
        tokens=tokens,
        logp=((chosen - values[:, :1]) * rate[:, None] - log_total)[:, 0],
        topk_ids=ids[:, :topk],
        topk_logp=jnp.where(drawable, relative - log_total, -jnp.inf)[:, :topk],
        nucleus_ids=nucleus_ids,
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


def inverse_cdf(
    logits: Float[Array, "S V"], largest: Float[Array, " S"], rate: Float[Array, " S"], u: Float[Array, "S 2"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """The word where the running sum of weights, exp((logit - largest) * rate), passes a uniform number; their sum.

    A large vocabulary takes two levels, P(word) = P(block) P(word | block), each with a number of its own: words far
    rarer than the spacing of float32 just below 1 keep their probability. Never a word of logit -inf.
    """

    def weigh(some: Float[Array, "S n"]) -> Float[Array, "S n"]:
        return jnp.exp((some - largest[:, None]) * rate[:, None])

    if logits.shape[1] <= SMALL:
        return _search(weigh(logits), u[:, 0])
    tiled = _tiled(logits, BLOCK, -jnp.inf)
    sums = jax.lax.platform_dependent(tiled, largest, rate, cpu=_block_sums_in_lanes, default=_block_sums)
    block, total = _search(sums, u[:, 0])
    inside = weigh(jnp.take_along_axis(tiled, block[:, None, None], axis=1)[:, 0])
    return block * BLOCK + _search(inside, u[:, 1])[0], total


def _block_sums(
    tiled: Float[Array, "S B size"], largest: Float[Array, " S"], rate: Float[Array, " S"]
) -> Float[Array, "S B"]:
    """The sum of exp((logit - largest) * rate) over each block."""
    return jnp.sum(jnp.exp((tiled - largest[:, None, None]) * rate[:, None, None]), axis=-1)


def _block_sums_in_lanes(
    tiled: Float[Array, "S B size"], largest: Float[Array, " S"], rate: Float[Array, " S"]
) -> Float[Array, "S B"]:
    """The same, in half the time on a CPU; 0 below 2^-118.

    Of a sum XLA makes a chain of additions there, one word after the other: lanes are added at once. A product ends it,
    since a sum would be merged with what is before it.
    """
    binary_rate = rate * 1.4426950408889634
    parts = [
        _exp2((part - largest[:, None, None]) * binary_rate[:, None, None])
        for part in jnp.split(tiled, tiled.shape[-1] // LANES, axis=-1)
    ]
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    sums = jnp.einsum("sbl,l->sb", parts[0], jnp.ones(LANES), precision=jax.lax.Precision.HIGHEST)
    # A word that is impossible weighs 2^-126 here: a block of such words alone stays impossible.
    return jnp.where(sums < 2.0**-118, 0.0, sums)


def _exp2(x: Float[Array, "S B n"]) -> Float[Array, "S B n"]:
    """2^x to 2e-7 for x <= 0, not below 2^-126: what the sums need of it, in half the operations of `exp`."""
    x = jnp.maximum(x, -126.0)
    # The sum has no bits behind the point; its low bits are the nearest integer.
    whole = jax.lax.bitcast_convert_type(x + 1.5 * 2.0**23, jnp.int32) - 0x4B400000
    rest = x - whole.astype(jnp.float32)
    power = jnp.float32(EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        power = power * rest + jnp.float32(coefficient)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(power, jnp.int32) + (whole << 23), jnp.float32)


def _tiled(values: Float[Array, "S V"], size: int, nothing: float) -> Float[Array, "S blocks size"]:
    """In blocks, the last one filled up with `nothing`."""
    slots, words = values.shape
    return jnp.pad(values, ((0, 0), (0, -words % size)), constant_values=nothing).reshape(slots, -1, size)


def _search(weight: Float[Array, "S n"], u: Float[Array, " S"]) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """First index whose running sum exceeds u times the total, and the total.

    Many weights are searched by the running sum of groups of them first: XLA's of n numbers takes n log n steps.
    """
    if weight.shape[-1] <= 4 * GROUP:
        running = jnp.cumsum(weight, axis=-1)
        return _first(weight > 0, running > u[:, None] * running[:, -1:]), running[:, -1]
    groups = _tiled(weight, GROUP, 0.0)
    # A product: of a sum over sums XLA makes one over all words.
    sums = jnp.einsum("sgn,n->sg", groups, jnp.ones(GROUP), precision=jax.lax.Precision.HIGHEST)
    running = jnp.cumsum(sums, axis=-1)
    total = running[:, -1]
    group = _first(sums > 0, running > (u * total)[:, None])[:, None]
    inside = jnp.take_along_axis(groups, group[:, :, None], axis=1)[:, 0]
    before = jnp.take_along_axis(running - sums, group, axis=1)
    within = _first(inside > 0, before + jnp.cumsum(inside, axis=-1) > (u * total)[:, None])
    return group[:, 0] * GROUP + within, total


def _first(possible: Bool[Array, "S n"], passed: Bool[Array, "S n"]) -> Int[Array, " S"]:
    """The first index that is both: a parallel sum rounds and may rise across a weight of 0. Where rounding leaves
    none, the last that is possible."""
    index = jnp.arange(possible.shape[-1])
    first = jnp.min(jnp.where(possible & passed, index, possible.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(possible, index, 0), axis=-1)
    return jnp.minimum(first, last).astype(jnp.int32)


def block_top_k(values: Float[Array, "S V"], k: int) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:
    """`lax.top_k`, ties included, without ordering a large vocabulary.

    The k largest lie in the k blocks of largest maximum (earlier blocks first where maxima tie): any block left out is
    preceded by k words, one from each block kept. Of the words kept the same holds again, in smaller blocks.
    """
    slots, levels = len(values), []
    for size in (BLOCK, 16):
        tiled = _tiled(values, size, -jnp.inf)
        if tiled.shape[1] >= 4 * k:
            kept = jnp.sort(jax.lax.top_k(jnp.max(tiled, axis=-1), k)[1], axis=-1)
            values = jnp.take_along_axis(tiled, kept[:, :, None], axis=1).reshape(slots, k * size)
            levels.append((kept, size))
    found, ids = jax.lax.top_k(values, k)
    for kept, size in reversed(levels):
        ids = jnp.take_along_axis(kept, ids // size, axis=-1) * size + ids % size
    return found, ids.astype(jnp.int32)

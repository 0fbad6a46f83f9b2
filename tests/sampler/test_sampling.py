"""The distribution drawn from, its log-probs and its top-K, against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.sampler import sampling

# Upper 0.1 per cent points of chi-square: with fixed seeds a right sampler passes or fails once and for all.
CHI2 = {7: 24.32, 15: 37.70, 31: 61.10}


draw = jax.jit(sampling.draw, static_argnames="topk")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def draws(logits: np.ndarray, n: int, temperature: float) -> np.ndarray:
    """n words of one distribution: n slots with the same logits, seeds 0..n-1."""
    drawn = draw(
        jnp.broadcast_to(jnp.asarray(logits), (n, logits.size)),
        jnp.arange(n, dtype=jnp.uint32),
        jnp.full(n, 7, jnp.int32),
        jnp.full(n, temperature, jnp.float32),
        topk=1,
    )
    return np.asarray(drawn.tokens)


@pytest.mark.parametrize(("words", "temperature"), [(8, 1.0), (32, 0.5), (32, 1.7)])
def test_draws_follow_the_softmax(words, temperature):
    logits = np.random.default_rng(words).normal(size=words).astype(np.float32)
    counts = np.bincount(draws(logits, 50_000, temperature), minlength=words)
    expected = 50_000 * np.exp(log_softmax(logits / temperature))
    assert ((counts - expected) ** 2 / expected).sum() < CHI2[words - 1]


def test_draws_follow_the_softmax_in_two_levels():
    words = sampling.SMALL + 100
    logits = np.random.default_rng(0).normal(size=words).astype(np.float32) * 2
    tokens = draws(logits, 10_000, 1.0)
    bins = np.arange(words) * 2654435761 % 16  # classes that cut across the blocks
    counts = np.bincount(bins[tokens], minlength=16)
    expected = 10_000 * np.bincount(bins, weights=np.exp(log_softmax(logits)), minlength=16)
    assert ((counts - expected) ** 2 / expected).sum() < CHI2[15]


def test_successive_positions_of_one_seed_are_independent():
    """Pairs of words at positions t, t+1 of one seed, against the product distribution."""
    logits = np.array([0.0, 0.5, 1.0, -1.0], np.float32)
    n = 40_000
    drawn = draw(
        jnp.broadcast_to(logits, (n, 4)),
        jnp.full(n, 3, jnp.uint32),
        jnp.arange(n, dtype=jnp.int32),
        jnp.ones(n),
        topk=1,
    )
    tokens = np.asarray(drawn.tokens)
    counts = np.bincount(tokens[::2] * 4 + tokens[1::2], minlength=16)
    p = np.exp(log_softmax(logits))
    expected = n / 2 * np.outer(p, p).ravel()
    assert ((counts - expected) ** 2 / expected).sum() < CHI2[15]


inverse_cdf = jax.jit(sampling.inverse_cdf)


@pytest.mark.parametrize("words", [12, 4 * sampling.GROUP + 3, sampling.SMALL + 3, 100 * sampling.BLOCK])
def test_never_a_word_of_probability_zero(words):
    """Two thirds of the words and the whole first block impossible, and uniforms at both ends and in between."""
    rng = np.random.default_rng(1)
    weight = np.where(rng.random((512, words)) < 0.33, rng.random((512, words)), 0.0).astype(np.float32)
    weight[:, : min(words // 3, sampling.BLOCK)] = 0.0
    weight[:, words // 2] = 1e-20  # at least one possible word
    u = np.stack([np.linspace(0, 1 - 2**-24, 512), np.linspace(1 - 2**-24, 0, 512)], -1).astype(np.float32)
    with np.errstate(divide="ignore"):
        logits = np.log(weight)
    tokens, total = inverse_cdf(jnp.asarray(logits), jnp.asarray(logits.max(-1)), jnp.ones(512), jnp.asarray(u))
    assert (weight[np.arange(512), np.asarray(tokens)] > 0).all()
    exact = weight.astype(np.float64).sum(-1) / weight.max(-1)
    np.testing.assert_allclose(total, exact, rtol=1e-6)


def test_the_word_is_where_the_running_sum_passes_the_uniform_number():
    """Against a search of float64 running sums in the same two levels, where no sum is within rounding of it."""
    words, slots = 40 * sampling.BLOCK - 5, 256
    rng = np.random.default_rng(5)
    logits = (3 * rng.normal(size=(slots, words))).astype(np.float32)
    u = rng.random((slots, 2)).astype(np.float32)
    rate = np.linspace(0.5, 2, slots).astype(np.float32)
    tokens, _ = inverse_cdf(*map(jnp.asarray, (logits, logits.max(-1), rate, u)))
    weight = np.exp((logits.astype(np.float64) - logits.max(-1, keepdims=True)) * rate[:, None])
    tiled = np.pad(weight, ((0, 0), (0, 5))).reshape(slots, 40, -1)

    def search(weight, u):
        part = weight.cumsum(-1) / weight.sum(-1, keepdims=True)
        return (part > u[:, None]).argmax(-1), np.abs(part - u[:, None]).min(-1) > 1e-6

    block, sure = search(tiled.sum(-1), u[:, 0])
    within, sure_within = search(tiled[np.arange(slots), block], u[:, 1])
    sure &= sure_within
    assert sure.sum() > 250
    np.testing.assert_array_equal(np.asarray(tokens)[sure], (block * sampling.BLOCK + within)[sure])


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_block_sums_in_lanes_are_those_of_float64(spread):
    rng = np.random.default_rng(6)
    tiled = (spread * rng.normal(size=(3, 7, sampling.BLOCK))).astype(np.float32)
    tiled[0, 1] = -np.inf
    tiled[1, 2, 5:] = -np.inf
    largest, rate = tiled.max((1, 2)), np.array([0.3, 1.0, 1.5], np.float32)
    exact = np.exp((tiled.astype(np.float64) - largest[:, None, None]) * rate[:, None, None]).sum(-1)
    for sums in (sampling._block_sums_in_lanes, sampling._block_sums):
        found = np.asarray(jax.jit(sums)(jnp.asarray(tiled), jnp.asarray(largest), jnp.asarray(rate)))
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=2.0**-118)
        np.testing.assert_allclose(found.sum(-1), exact.sum(-1), rtol=1e-6)
        assert found[0, 1] == 0


def test_minus_infinity_is_impossible_and_a_sole_word_certain():
    logits = np.full((3, 9), -np.inf, np.float32)
    logits[[0, 1, 2], [0, 4, 8]] = 1.0
    drawn = draw(jnp.asarray(logits), jnp.arange(3, dtype=jnp.uint32), jnp.zeros(3, jnp.int32), jnp.ones(3), topk=2)
    np.testing.assert_array_equal(drawn.tokens, [0, 4, 8])
    np.testing.assert_array_equal(drawn.logp, [0.0, 0.0, 0.0])


@pytest.mark.parametrize("words", [21, 6000])
def test_log_probs_and_top_k_against_float64(words):
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(16, words)) * 3).astype(np.float32)
    temperature = np.linspace(0.3, 2.0, 16).astype(np.float32)
    drawn = draw(
        jnp.asarray(logits), jnp.arange(16, dtype=jnp.uint32), jnp.arange(16), jnp.asarray(temperature), topk=20
    )
    exact = log_softmax(logits / temperature[:, None].astype(np.float64))
    rows = np.arange(16)
    np.testing.assert_allclose(drawn.logp, exact[rows, drawn.tokens], atol=5e-6)
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(drawn.topk_ids, order)
    np.testing.assert_allclose(drawn.topk_logp, np.take_along_axis(exact, order, -1), atol=5e-6)


def test_top_k_keeps_the_order_of_ties():
    """Few distinct values, so that almost every comparison is a tie."""
    values = np.random.default_rng(3).integers(0, 4, size=(8, 6000)).astype(np.float32)
    found, ids = jax.jit(sampling.block_top_k, static_argnums=1)(jnp.asarray(values), 20)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(found, np.take_along_axis(values, order, -1))


def test_temperature_zero_is_the_first_argmax_with_untempered_log_probs():
    logits = np.array([[0.0, 2.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0]], np.float32)
    drawn = draw(jnp.asarray(logits), jnp.arange(2, dtype=jnp.uint32), jnp.zeros(2, jnp.int32), jnp.zeros(2), topk=4)
    np.testing.assert_array_equal(drawn.tokens, [1, 0])
    np.testing.assert_allclose(drawn.logp, log_softmax(logits)[[0, 1], [1, 0]], atol=1e-6)


def test_a_slot_is_the_same_alone_and_in_company():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(9, 50)).astype(np.float32)
    seeds, positions = np.arange(9, dtype=np.uint32) + 2**31, np.arange(9, dtype=np.int32)
    run = lambda rows: sampling.draw(  # noqa: E731
        *map(jnp.asarray, (logits[rows], seeds[rows], positions[rows], np.ones(len(rows), np.float32))), topk=3
    )
    together, alone = run(np.arange(9)), run(np.array([5]))
    assert together.tokens[5] == alone.tokens[0]
    assert together.logp[5] == alone.logp[0]

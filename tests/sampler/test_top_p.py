"""Draws from a nucleus, their log-probs and the record of it, against nuclei worked out in float64 NumPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny
from hypothesis import strategies
from hypothesis.extra import numpy as arrays

from jaxrl_sat.sampler import RolloutEngine, generate, sampling

CHI2 = {2: 13.82, 3: 16.27, 6: 22.46, 7: 24.32}
"""Upper 0.1 per cent points of chi-square: with fixed seeds a right sampler passes or fails once and for all."""

draw = jax.jit(sampling.draw, static_argnames=("topk", "nucleus"))


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def nucleus_of(logits: np.ndarray, top_p: float, cap: int) -> np.ndarray:
    """Ids of one distribution's nucleus, most likely first and equals by id, cut at `cap`."""
    order = np.argsort(-logits, kind="stable")
    size = int(np.searchsorted(np.cumsum(softmax(logits)[order]), top_p)) + 1
    ids = order[: min(size, cap)]
    return ids[np.isfinite(logits[ids])]


def drawn_from(
    logits: Any, temperature: Any = 1.0, seeds: int = 0, top_p: Any = 1.0, top_k: Any = 0, **kwargs: Any
) -> SimpleNamespace:
    """A word of each row, seeds counted from `seeds`, every row at position 7: a `Draw` in host memory."""
    rows = len(logits)
    place = np.arange(seeds, seeds + rows, dtype=np.uint32), np.full(rows, 7, np.int32)
    asked = [np.broadcast_to(value, (rows,)) for value in (np.float32(temperature), np.float32(top_p), np.int32(top_k))]
    temperatures, top_ps, top_ks = map(jnp.asarray, asked)
    out = draw(*map(jnp.asarray, (logits, *place)), temperatures, top_p=top_ps, top_k=top_ks, **kwargs)
    return SimpleNamespace(**{name: np.asarray(value) for name, value in vars(out).items()})


# ------------------------------------------------------------------------------------------------ distribution


@pytest.mark.parametrize(
    ("temperature", "cap", "size"),
    [(1.0, 12, 8), (0.5, 12, 7), (1.0, 3, 3)],  # the last one cut by its cap
)
def test_draws_follow_the_renormalised_nucleus(temperature, cap, size):
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32)
    inside = nucleus_of(logits / temperature, 0.8, cap)
    assert len(inside) == size
    many = drawn_from(np.broadcast_to(logits, (40_000, 12)), temperature, topk=1, top_p=0.8, nucleus=cap)
    counts = np.bincount(many.tokens, minlength=12)
    assert counts[inside].sum() == 40_000
    p = softmax(logits / temperature)[inside]
    expected = 40_000 * p / p.sum()
    assert ((counts[inside] - expected) ** 2 / expected).sum() < CHI2[size - 1]


@pytest.mark.parametrize("cap", [16, 40])  # fewer and more words than the top-K has
def test_log_probs_and_record_against_float64(cap):
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(64, 300)) * 2).astype(np.float32)
    temperature = np.linspace(0.3, 1.5, 64).astype(np.float32)
    out = drawn_from(logits, temperature, topk=20, top_p=0.9, nucleus=cap)
    sizes = []
    for row in range(64):
        scaled = logits[row].astype(np.float64) / temperature[row]
        inside = nucleus_of(scaled, 0.9, cap)
        sizes.append(len(inside))
        np.testing.assert_array_equal(out.nucleus_ids[row], np.pad(inside, (0, cap - len(inside)), constant_values=-1))
        assert out.tokens[row] in inside
        exact = np.full(300, -np.inf)
        exact[inside] = scaled[inside] - scaled.max()
        exact -= np.log(np.exp(exact).sum())
        np.testing.assert_allclose(out.logp[row], exact[out.tokens[row]], atol=1e-6, rtol=1e-6)
        order = np.argsort(-scaled, kind="stable")[:20]
        np.testing.assert_array_equal(out.topk_ids[row], order)
        np.testing.assert_allclose(out.topk_logp[row], exact[order], atol=1e-6, rtol=1e-6)
    assert min(sizes) < 10 and max(sizes) == cap


def test_each_slot_draws_from_what_it_asks_for():
    """Top-k, then top-p of what it leaves; the whole vocabulary where both are off."""
    logits = (np.random.default_rng(6).normal(size=(64, 300)) * 2).astype(np.float32)
    top_p = np.tile([1.0, 1.0, 1.0, 0.6, 0.6, 0.9, 0.9, 0.3], 8)
    top_k = np.tile([0, -1, 5, 0, 9, 16, 0, 2], 8)
    out = drawn_from(logits, 0.8, topk=20, nucleus=16, top_p=top_p, top_k=top_k)
    for row in range(64):
        scaled = logits[row].astype(np.float64) / np.float32(0.8)
        order = np.argsort(-scaled, kind="stable")
        kept = order[: top_k[row]] if top_k[row] > 0 else order
        limited = np.full(300, -np.inf)
        limited[kept] = scaled[kept]
        inside = kept if top_p[row] == 1 else nucleus_of(limited, top_p[row], 16)
        recorded = out.nucleus_ids[row]
        np.testing.assert_array_equal(recorded[recorded >= 0], inside if len(inside) < 300 else [])
        exact = np.full(300, -np.inf)
        exact[inside] = scaled[inside] - scaled.max()
        exact -= np.log(np.exp(exact).sum())
        np.testing.assert_allclose(out.logp[row], exact[out.tokens[row]], atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(out.topk_logp[row], exact[order[:20]], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 3), (0.7, 6)])
def test_draws_follow_the_first_k_words(top_p, top_k):
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32)
    kept = np.argsort(-logits, kind="stable")[:top_k]
    limited = np.where(np.isin(np.arange(12), kept), logits, -np.inf)
    inside = kept if top_p == 1 else nucleus_of(limited, top_p, 12)
    many = drawn_from(np.broadcast_to(logits, (40_000, 12)), topk=1, nucleus=12, top_p=top_p, top_k=top_k)
    counts = np.bincount(many.tokens, minlength=12)
    assert counts[inside].sum() == 40_000
    p = softmax(logits)[inside]
    expected = 40_000 * p / p.sum()
    assert ((counts[inside] - expected) ** 2 / expected).sum() < CHI2[len(inside) - 1]


LEVELS = [-np.inf, -3.0, 0.0, 0.1, 1.0, 2.0, 5.0, 60.0]


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(
    arrays.arrays(np.float32, (16, 9), elements=strategies.sampled_from(LEVELS)),
    strategies.integers(0, 2**31),
)
def test_nucleus_is_the_shortest_run_that_reaches_top_p(logits, seed):
    logits[:, 4] = np.where(np.isneginf(logits).all(-1), 0.0, logits[:, 4])
    out = drawn_from(logits, seeds=seed, topk=9, top_p=0.7, nucleus=5)
    for row, ids in enumerate(out.nucleus_ids):
        size = int((ids >= 0).sum())
        order = np.argsort(-logits[row], kind="stable")
        np.testing.assert_array_equal(ids, np.pad(order[:size], (0, 5 - size), constant_values=-1))
        p = softmax(logits[row])[order]
        possible = int((p > 1e-37).sum())
        assert p[: size - 1].sum() < 0.7 + 1e-6
        assert p[:size].sum() > 0.7 - 1e-6 or size == min(5, possible)
        assert out.tokens[row] in ids[:size]
        assert np.isfinite(out.logp[row])
        np.testing.assert_array_equal(np.isfinite(out.topk_logp[row]), np.arange(9) < size)
        np.testing.assert_allclose(np.exp(out.topk_logp[row, :size]).sum(), 1.0, atol=1e-6)


# ------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize(("top_p", "size"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (0.999999, 4)])
def test_equal_words_go_in_until_top_p_is_reached(top_p, size):
    weight = np.array([[1, 1, 1, 1, 0]], np.float32)
    asked = jnp.asarray([top_p], jnp.float32), jnp.zeros(1, jnp.int32)
    kept = sampling.nucleus_weight(jnp.asarray(weight), jnp.asarray([4.0]), *asked)
    np.testing.assert_array_equal(kept, [[1.0] * size + [0.0] * (5 - size)])


def test_a_tiny_top_p_leaves_the_argmax_alone():
    logits = np.random.default_rng(3).normal(size=(32, 50)).astype(np.float32)
    logits[0, [7, 9]] = 8.0  # the first of equals
    out = drawn_from(logits, topk=3, top_p=1e-6, nucleus=4)
    np.testing.assert_array_equal(out.tokens, logits.argmax(-1))
    np.testing.assert_array_equal(out.logp, np.zeros(32))
    np.testing.assert_array_equal(out.nucleus_ids[:, 0], out.tokens)
    np.testing.assert_array_equal(out.nucleus_ids[:, 1:], np.full((32, 3), -1))
    np.testing.assert_array_equal(out.topk_logp, np.broadcast_to(np.array([0, -np.inf, -np.inf]), (32, 3)))


def test_impossible_words_stay_out_and_a_sole_word_is_certain():
    logits = np.full((16, 9), -np.inf, np.float32)
    logits[:, 4] = 1.0
    logits[4:, 8] = 1.0
    out = drawn_from(logits, topk=9, top_p=0.7, nucleus=5)
    np.testing.assert_array_equal(out.tokens[:4], np.full(4, 4))
    assert set(out.tokens[4:].tolist()) == {4, 8}
    np.testing.assert_array_equal(out.logp[:4], np.zeros(4))
    np.testing.assert_array_equal(out.nucleus_ids[[0, 8]], [[4, -1, -1, -1, -1], [4, 8, -1, -1, -1]])


def test_temperature_zero_is_greedy_with_the_full_softmax_and_an_empty_record():
    logits = np.random.default_rng(4).normal(size=(64, 300)).astype(np.float32)
    logits[0, [7, 9]] = 8.0
    out = drawn_from(logits, 0.0, topk=20, top_p=0.9, nucleus=16)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    exact = np.take_along_axis(np.log(softmax(logits)), order, -1)
    np.testing.assert_array_equal(out.tokens, order[:, 0])
    np.testing.assert_array_equal(out.topk_ids, order)
    np.testing.assert_allclose(out.logp, exact[:, 0], atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(out.topk_logp, exact, atol=1e-6, rtol=1e-6)
    np.testing.assert_array_equal(out.nucleus_ids, np.full((64, 16), -1))


@pytest.mark.parametrize("cap", [0, 8])
def test_without_top_p_the_words_are_those_drawn_before_there_was_one(cap):
    logits = (np.random.default_rng(9).normal(size=(24, 40)) * 2).astype(np.float32)
    steps = np.arange(24)
    out = draw(
        *map(jnp.asarray, (logits, steps.astype(np.uint32), steps, np.linspace(0.5, 1.5, 24, dtype=np.float32))),
        topk=1,
        nucleus=cap,
    )
    before = [23, 23, 19, 20, 22, 9, 21, 15, 1, 28, 29, 16, 29, 10, 8, 11, 33, 8, 9, 33, 26, 12, 28, 30]
    np.testing.assert_array_equal(out.tokens, before)
    np.testing.assert_array_equal(out.nucleus_ids, np.full((24, cap), -1))


def test_top_k_by_blocks_holds_for_a_nucleus_of_256():
    """Enough words for the blocks to be searched in two levels; few distinct values, so that most are ties."""
    words = 64 * 4 * 256 + 5
    values = np.random.default_rng(5).integers(0, 400, size=(2, words)).astype(np.float32)
    found, ids = jax.jit(sampling.block_top_k, static_argnums=1)(jnp.asarray(values), 256)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :256]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(found, np.take_along_axis(values, order, -1))


# ------------------------------------------------------------------------------------------------ engine


@pytest.fixture(scope="module")
def nucleus_engine() -> RolloutEngine:
    return tiny.engine(top_p=0.8, nucleus=7)


def test_records_arrive_in_rollouts(nucleus_engine):
    rollouts = generate(nucleus_engine, nucleus_engine.load_params(tiny.params()), tiny.requests([3, 9], 4))
    logp, _ = tiny.recompute(tiny.params(), rollouts)
    widths: set[int] = set()
    for row, rollout in enumerate(rollouts):
        prompt, response = len(rollout.request.prompt.tokens), len(rollout.tokens)
        longest = 0
        for t, ids in enumerate(rollout.nucleus_ids):
            exact = logp[row, prompt - 1 + t]
            inside = nucleus_of(exact, 0.8, 7)
            longest = max(longest, len(inside))
            np.testing.assert_array_equal(ids[: len(inside)], inside)
            assert (ids[len(inside) :] == -1).all()
            assert rollout.tokens[t] in inside
            total = np.log(np.exp(exact[inside]).sum())
            np.testing.assert_allclose(rollout.logp[t], exact[rollout.tokens[t]] - total, atol=1e-5)
            assert np.isneginf(rollout.topk.logp[t]).sum() == max(0, 5 - len(inside))
        assert rollout.nucleus_ids.shape == (response, longest) and rollout.nucleus_ids.dtype == np.int32
        widths.add(longest)
    assert max(widths) <= 7 and len(widths) > 1


def test_a_greedy_evaluation_has_empty_records(nucleus_engine):
    weights = nucleus_engine.load_params(tiny.params())
    rollout, *_ = generate(nucleus_engine, weights, tiny.requests([9], 8), temperature=0.0)
    np.testing.assert_array_equal(rollout.nucleus_ids, np.full((len(rollout.tokens), 1), -1))
    logp, _ = tiny.recompute(tiny.params(), [rollout])
    np.testing.assert_allclose(rollout.logp, logp[0, 8 : 8 + len(rollout.tokens)].max(-1), atol=1e-5)


def test_an_evaluation_keeps_top_p_at_its_own_temperature(nucleus_engine):
    weights = nucleus_engine.load_params(tiny.params())
    rollout, *_ = generate(nucleus_engine, weights, tiny.requests([9], 8), temperature=0.5)
    logp, _ = tiny.recompute(tiny.params(), [rollout])
    for t, ids in enumerate(rollout.nucleus_ids):
        np.testing.assert_array_equal(ids[ids >= 0], nucleus_of(2 * logp[0, 8 + t], 0.8, 7))


def test_a_nucleus_may_take_the_whole_vocabulary():
    assert tiny.engine(top_p=0.9, nucleus=100).records.nucleus == tiny.CONFIG.vocab_size
    assert tiny.engine(nucleus=100).records.nucleus == 0

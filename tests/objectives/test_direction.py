"""The predicted direction against what really happens: finite differences, real steps, and enumerated returns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import DivergenceMask, direction_after, direction_before, direction_counts, full_divergence
from jaxrl_sat.objectives.direction import (
    PredictiveKl,
    direction_flips,
    kl_direction,
    tail_model_gap,
    tv_direction,
)
from jaxrl_sat.objectives.improvement import max_tv_bound, mean_tv_bound
from jaxrl_sat.objectives.masks import support_kl
from jaxrl_sat.objectives.softmax import FullDivergence
from jaxrl_sat.objectives.support import Support, reduced_support
from jaxrl_sat.types import InputError
from tests.objectives.distributions import LENGTH, ROWS, Pair, atoms, draw, floats, kl, logit_step, softmax, tv

TOKENS = list(itertools.product(range(ROWS), range(LENGTH)))
FLAT = np.zeros((ROWS, LENGTH))


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def support_of(pair: Pair) -> Support:
    return reduced_support(pair.evidence(FLAT))


def full_of(pair: Pair) -> FullDivergence:
    return full_divergence(floats(pair.z_mu), floats(pair.z_pi), jnp.asarray(pair.sampled))


def central(distance, mu: np.ndarray, pi: np.ndarray, k: int, h: float) -> float:
    return (distance(mu, logit_step(pi, k, h)) - distance(mu, logit_step(pi, k, -h))) / (2 * h)


def test_the_full_direction_is_the_derivative_of_the_full_softmax() -> None:
    pair = draw(0)
    got = jax.tree.map(np.asarray, full_of(pair))
    np.testing.assert_allclose(got.kl, kl(pair.mu, pair.pi), rtol=1e-12)
    np.testing.assert_allclose(got.tv, tv(pair.mu, pair.pi), rtol=1e-12)
    np.testing.assert_allclose(got.local + got.global_, got.kl_direction, atol=1e-15)
    for n, t in TOKENS:
        token = (pair.mu[n, t], pair.pi[n, t], pair.sampled[n, t])
        assert abs(got.kl_direction[n, t] - central(kl, *token, 1e-5)) < 5e-10
        assert abs(got.tv_direction[n, t] - central(tv, *token, 1e-7)) < 2e-8


@pytest.mark.parametrize("tail", ["aggregated", "uniform"])
def test_the_estimates_are_derivatives_on_the_support_each_assumes(tail: str) -> None:
    """One tail word is the (m+1)-atom softmax; an even tail is a whole vocabulary."""
    pair = draw(1)
    support = support_of(pair)
    by_kl, by_tv = jax.tree.map(np.asarray, (kl_direction(support, tail), tv_direction(support, tail)))
    for n, t in TOKENS:
        token = atoms(pair, n, t, flat=tail == "uniform")
        assert abs(by_kl.total[n, t] - central(kl, *token, 1e-5)) < 5e-10
        assert abs(by_tv[n, t] - central(tv, *token, 1e-7)) < 2e-8
    np.testing.assert_allclose(by_kl.local + by_kl.global_, by_kl.total, atol=1e-15)


def test_the_tail_models_differ_by_eq_12_and_eq_15_reads_as_written() -> None:
    support = support_of(draw(2))
    aggregated, uniform = kl_direction(support, "aggregated"), kl_direction(support, "uniform")
    np.testing.assert_allclose(aggregated.global_ - uniform.global_, tail_model_gap(support), atol=1e-15)
    for found in (aggregated, uniform):
        gap, average = np.asarray(found.local), -np.asarray(found.global_)
        literal = ((gap > 0) & (gap < average)) | ((gap < 0) & (gap > average))
        np.testing.assert_array_equal(direction_flips(found), literal)
        assert literal.any()


def test_what_the_direction_leaves_out_is_of_second_order() -> None:
    pair = draw(3)
    direction = np.asarray(full_of(pair).kl_direction)

    def left_over(size: float) -> float:
        return sum(
            abs(
                kl(pair.mu[n, t], logit_step(pair.pi[n, t], pair.sampled[n, t], size))
                - kl(pair.mu[n, t], pair.pi[n, t])
                - size * direction[n, t]
            )
            for n, t in TOKENS
        )

    assert 80 < left_over(1e-2) / left_over(1e-3) < 125


def test_the_sign_is_that_of_the_change_a_real_step_brings() -> None:
    """Independent logits moved by eta A r v: the direction foresees every token, the ratio does not."""
    agree, by_ratio, tokens = 0, 0, 0
    for seed in range(10, 20):
        pair = draw(seed)
        advantages = np.random.default_rng(seed).normal(size=(ROWS, LENGTH))
        direction = np.asarray(full_of(pair).kl_direction)
        for n, t in TOKENS:
            mu, pi, k, a = pair.mu[n, t], pair.pi[n, t], pair.sampled[n, t], advantages[n, t]
            r = pi[k] / mu[k]
            change = kl(mu, logit_step(pi, k, 1e-3 * a * r)) - kl(mu, pi)
            agree += np.sign(change) == np.sign(a * direction[n, t])
            by_ratio += np.sign(change) == np.sign(a * (r - 1))
            tokens += 1
    assert agree == tokens
    assert 0.6 * tokens < by_ratio < 0.97 * tokens


def test_with_no_top_k_the_direction_is_the_ratios_to_the_last_digits() -> None:
    """Eq. 30, in float32 and with pi(y) a hair under 1, where 1 - pi(y) rounded from pi(y) would be 0."""
    with jax.enable_x64(False):
        pair = draw(4)
        close = jnp.full((ROWS, LENGTH), -1e-9, jnp.float32)
        for logp in (pair.evidence(FLAT).logp, close):
            evidence = dataclasses.replace(pair.evidence(FLAT), logp=logp)
            got = np.asarray(kl_direction(reduced_support(evidence, top_k=False)).total, np.float64)
            log_pi, log_mu = (np.asarray(x, np.float64) for x in (evidence.logp, evidence.logp_mu))
            np.testing.assert_allclose(got, -2 * np.expm1(log_pi) * (np.exp(log_pi) - np.exp(log_mu)), rtol=2e-6)


def test_an_even_tail_needs_the_size_of_the_vocabulary() -> None:
    support = reduced_support(draw(5).evidence(FLAT, vocab_size=0))
    assert np.all(np.isfinite(kl_direction(support, "aggregated").total))
    with pytest.raises(InputError, match=r"vocab_size must be given"):
        kl_direction(support, "uniform")
    with pytest.raises(InputError, match=r"tail: 'even' is not one of 'aggregated', 'uniform'"):
        PredictiveKl("even")


def test_the_direction_analysis_counts_what_a_loop_counts() -> None:
    pair, rng = draw(6), np.random.default_rng(6)
    moved = dataclasses.replace(pair, z_pi=pair.z_pi + 0.3 * rng.normal(size=pair.z_pi.shape))
    advantages, on = rng.normal(size=(ROWS, LENGTH)), rng.random((ROWS, LENGTH)) < 0.9
    mask = DivergenceMask(support_kl, PredictiveKl(), delta=0.05)
    before, after = (p.evidence(advantages, mask=jnp.asarray(on)) for p in (pair, moved))
    got = direction_after(mask, direction_before(mask, before), after).means
    expected = {"outside": 0, "disagree": 0, "ratio": [0, 0, 0], "predicted": [0, 0, 0]}
    for n, t in (token for token in TOKENS if on[token]):
        mu, pi, k = atoms(pair, n, t, flat=False)
        later = kl(*atoms(moved, n, t, flat=False)[:2])
        outside = kl(mu, pi) > mask.delta
        outward = {
            "ratio": advantages[n, t] * (pi[k] - mu[k]) > 0,
            "predicted": advantages[n, t] * (pi[k] - mu[k] + np.sum(pi * (mu - pi))) > 0,
        }
        expected["outside"] += outside
        if outside and outward["ratio"] != outward["predicted"]:
            expected["disagree"] += 1
            keeper = min(outward, key=outward.__getitem__)
            expected[keeper][0] += 1
            expected[keeper][1] += later > kl(mu, pi)
            expected[keeper][2] += later < kl(mu, pi)
    assert got["direction/outside"] == (expected["outside"], on.sum())
    assert got["direction/disagree"] == (expected["disagree"], expected["outside"])
    assert expected["disagree"] > 0
    for rule in ("ratio", "predicted"):
        kept, unsafe, contracted = expected[rule]
        assert got[f"direction/unsafe_keep_{rule}"] == (unsafe, kept)
        assert got[f"direction/contraction_{rule}"] == (contracted, kept)
    counts = direction_counts(mask, before).means
    flips = np.asarray(direction_flips(kl_direction(reduced_support(before))))
    assert counts["direction/eq15_aggregated"] == (np.sum(flips & on), on.sum())
    assert counts["direction/eq15_aggregated_outside"][1] == expected["outside"]
    assert counts["divergence/outside"] == (expected["outside"], on.sum())


def test_both_improvement_bounds_hold_on_enumerated_trees() -> None:
    """Every response of three tokens over three words, whose policies and rewards are drawn."""
    words, horizon = 3, 3
    paths = list(itertools.product(range(words), repeat=horizon))
    states = [path[:t] for t in range(horizon) for path in paths]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        mu = {s: softmax(rng.normal(size=words)) for s in states}
        pi = {s: softmax(np.log(mu[s]) + rng.uniform(0.02, 1) * rng.normal(size=words)) for s in states}
        reward = dict(zip(paths, rng.uniform(-1, 1, len(paths)), strict=True))
        gain = improvement = tv_sum = 0.0
        for path in paths:
            prefixes = [path[:t] for t in range(horizon)]
            chance = np.prod([mu[s][w] for s, w in zip(prefixes, path, strict=True)])
            ratios = np.array([pi[s][w] / mu[s][w] for s, w in zip(prefixes, path, strict=True)])
            improvement += chance * (np.prod(ratios) - 1) * reward[path]
            gain += chance * reward[path] * np.sum(ratios - 1)
            tv_sum += chance * sum(tv(mu[s], pi[s]) for s in prefixes)
        largest, xi = max(tv(mu[s], pi[s]) for s in states), max(map(abs, reward.values()))
        assert improvement >= mean_tv_bound(gain, xi, float(tv_sum))
        assert improvement >= max_tv_bound(gain, xi, horizon, float(largest))

"""Divergences, the support they are estimated on, and the masks made of them: values, bounds and bad records."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import (
    RECIPES,
    DivergenceMask,
    Evidence,
    normalise,
    policy_loss,
    support_kl,
    support_tv,
)
from jaxrl_sat.objectives.direction import PredictiveKl, PredictiveTv, kl_direction, tv_direction
from jaxrl_sat.objectives.divergence import bernoulli_kl, log1mexp, probability_gap, sampled_tv
from jaxrl_sat.objectives.recipes_divergence import DIVERGENCE_RECIPES
from jaxrl_sat.objectives.support import reduced_support
from jaxrl_sat.types import InputError
from tests.objectives.distributions import LENGTH, ROWS, VOCAB, atoms, draw, floats, kl, tv

SHAPE = (ROWS, LENGTH)


def advantages(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE)


def test_the_numbers_of_the_specification() -> None:
    mu, pi = np.log([1e-4, 0.99]), np.log([1e-2, 0.80])
    np.testing.assert_allclose(sampled_tv(floats(pi), floats(mu)), [0.0099, 0.19], rtol=1e-5)
    np.testing.assert_allclose(bernoulli_kl(floats(mu), floats(pi)), [0.0095, 0.181], atol=5e-4)


def test_probabilities_close_to_each_other_and_to_one_keep_their_digits() -> None:
    log_p, log_q = np.array([[-1e-9, -1e-4, -3.0, -30.0], [-2e-9, -1.001e-4, -3.00001, -30.5]], np.float32)
    with jax.enable_x64(False):
        gap, rest = probability_gap(floats(log_p), floats(log_q)), log1mexp(floats(log_p))
        ends = probability_gap(floats([0.0, -np.inf, -np.inf]), floats([-np.inf, 0.0, -np.inf]))
    np.testing.assert_array_equal(ends, [1, -1, 0])
    exact_p, exact_q = log_p.astype(np.float64), log_q.astype(np.float64)
    np.testing.assert_allclose(gap, np.exp(exact_q) * np.expm1(exact_p - exact_q), rtol=1e-6)
    exact = np.where(exact_p > -1, np.log(-np.expm1(exact_p)), np.log1p(-np.exp(exact_p)))
    np.testing.assert_allclose(rest, exact, rtol=1e-6)


def test_the_binary_kl_at_its_ends() -> None:
    none, half, sure = -np.inf, math.log(0.5), 0.0
    got = bernoulli_kl(floats([none, none, half, sure, none, sure]), floats([none, half, none, half, sure, sure]))
    log_floor = math.log(1e-12)
    np.testing.assert_allclose(got, [0, math.log(2), np.inf, math.log(2), -log_floor, 0], atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_support_against_explicit_atoms(seed: int) -> None:
    """Values on the (m+1) atoms, and never above the divergence of the whole vocabulary."""
    pair = draw(seed)
    with jax.enable_x64(True):
        support = reduced_support(pair.evidence(advantages(seed)))
        by_kl, by_tv = np.asarray(support_kl(support)), np.asarray(support_tv(support))
    support = jax.tree.map(np.asarray, support)
    for n, t in itertools.product(range(ROWS), range(LENGTH)):
        mu, pi, _ = atoms(pair, n, t, flat=False)
        assert support.size[n, t] == len(mu) - 1
        np.testing.assert_allclose([by_kl[n, t], by_tv[n, t]], [kl(mu, pi), tv(mu, pi)], rtol=1e-9)
        np.testing.assert_allclose([support.mu_tail[n, t], support.pi_tail[n, t]], [mu[-1], pi[-1]], rtol=1e-9)
    assert np.all(by_kl <= kl(pair.mu, pair.pi) + 1e-12)
    assert np.all(by_tv <= tv(pair.mu, pair.pi) + 1e-12)


def test_without_the_sampled_word_its_mass_is_in_the_tail() -> None:
    pair = draw(7)
    with jax.enable_x64(True):
        support = reduced_support(pair.evidence(advantages(7)), include_sampled=False)
        got = np.asarray(support_kl(support))
    mu, pi = (np.take_along_axis(p, pair.ids, -1) for p in (pair.mu, pair.pi))
    mu, pi = (np.concatenate([p, 1 - p.sum(-1, keepdims=True)], -1) for p in (mu, pi))
    np.testing.assert_allclose(got, kl(mu, pi), rtol=1e-9)
    assert np.all(np.asarray(support.size) == pair.ids.shape[-1])


def test_with_no_top_k_the_support_is_binary() -> None:
    pair = draw(8)
    with jax.enable_x64(True):
        evidence = pair.evidence(advantages(8))
        support = reduced_support(evidence, top_k=False)
        np.testing.assert_allclose(
            support_kl(support), bernoulli_kl(evidence.logp_mu, evidence.logp), rtol=1e-9, atol=1e-14
        )
        np.testing.assert_allclose(support_tv(support), sampled_tv(evidence.logp, evidence.logp_mu), rtol=1e-12)
        none = dataclasses.replace(
            evidence,
            topk_ids=evidence.topk_ids[..., :0],
            topk_logp=evidence.topk_logp[..., :0],
            topk_logp_mu=evidence.topk_logp_mu[..., :0],
        )
        ratio, predictive = (
            DivergenceMask(support_kl, delta=0.05, top_k=False),
            DivergenceMask(support_kl, PredictiveKl(), delta=0.05),
        )
        d = evidence.logp - evidence.logp_mu
        np.testing.assert_array_equal(ratio(evidence, d), predictive(none, d))
        assert 0 < np.sum(ratio(evidence, d) == 0) < d.size


def with_faults(evidence: Evidence, ids: list[int], log_pi: list[float], log_mu: list[float]) -> Evidence:
    """The same evidence with further slots of every token: those ids and log-probabilities."""

    def joined(recorded: jax.Array, added: list) -> jax.Array:
        more = jnp.broadcast_to(jnp.asarray(added, recorded.dtype), (*SHAPE, len(added)))
        return jnp.concatenate([recorded, more], axis=-1)

    return dataclasses.replace(
        evidence,
        topk_ids=joined(evidence.topk_ids, ids),
        topk_logp=joined(evidence.topk_logp, log_pi),
        topk_logp_mu=joined(evidence.topk_logp_mu, log_mu),
    )


def loss_and_gradient(name: str, evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    def value(logp: jax.Array) -> jax.Array:
        out = policy_loss(RECIPES[name](delta=0.05), dataclasses.replace(evidence, logp=logp))
        return normalise(out.loss_sum, out.count)

    loss, gradient = jax.value_and_grad(value)(evidence.logp)
    return np.asarray(loss), np.asarray(gradient)


@pytest.mark.parametrize("name", sorted(DIVERGENCE_RECIPES))
def test_bad_slots_and_padding_change_nothing(name: str) -> None:
    """NaN, infinite and missing slots are ignored, a repeated id counts once, and padding may hold anything."""
    pair = draw(9)
    clean = pair.evidence(advantages(9))
    mask = np.random.default_rng(9).random(SHAPE) < 0.8
    clean = with_faults(dataclasses.replace(clean, mask=jnp.asarray(mask)), [-1] * 5, [0.0] * 5, [0.0] * 5)
    first = int(pair.ids[0, 0, 0])
    bad = with_faults(
        pair.evidence(advantages(9), mask=jnp.asarray(mask)),
        [-1, VOCAB - 1, VOCAB - 2, VOCAB - 3, first],
        [np.nan, np.nan, -1.0, np.inf, -1.0],
        [np.nan, -1.0, np.nan, -1.0, -1.0],
    )
    repeated = jnp.where(jnp.arange(bad.topk_ids.shape[-1]) == 9, bad.topk_ids[..., :1], bad.topk_ids)
    off = ~bad.mask
    bad = dataclasses.replace(
        bad,
        topk_ids=jnp.where(off[..., None], -7, repeated),
        topk_logp=jnp.where(off[..., None], jnp.nan, bad.topk_logp),
        topk_logp_mu=jnp.where(off[..., None], jnp.inf, bad.topk_logp_mu),
        logp=jnp.where(off, jnp.nan, bad.logp),
        logp_mu=jnp.where(off, -jnp.inf, bad.logp_mu),
        advantages=jnp.where(off, jnp.inf, bad.advantages),
        tokens=jnp.where(off, -1, bad.tokens),
    )
    (loss, gradient), (same, same_gradient) = loss_and_gradient(name, clean), loss_and_gradient(name, bad)
    np.testing.assert_array_equal(loss, same)
    np.testing.assert_array_equal(gradient, same_gradient)
    assert np.isfinite(loss) and np.any(gradient != 0) and np.any(gradient[mask] == 0)


def test_words_without_probability() -> None:
    """0 log 0 = 0 on mu's side; a word that pi has given up makes the KL infinite, hence outside, with a finite TV."""
    pair = draw(10)
    evidence = pair.evidence(advantages(10), tokens=jnp.asarray(pair.ids[..., 0]))
    last = jnp.arange(evidence.topk_ids.shape[-1]) == evidence.topk_ids.shape[-1] - 1
    nucleus = dataclasses.replace(evidence, topk_logp_mu=jnp.where(last, -jnp.inf, evidence.topk_logp_mu))
    given_up = dataclasses.replace(evidence, topk_logp=jnp.where(last, -jnp.inf, evidence.topk_logp))
    both = dataclasses.replace(nucleus, topk_logp=given_up.topk_logp)
    for case, infinite in ((nucleus, False), (given_up, True), (both, False)):
        support = reduced_support(case)
        assert np.all(np.isinf(support_kl(support)) == infinite)
        for finite in (support_tv(support), kl_direction(support).total, tv_direction(support, "uniform")):
            assert np.all(np.isfinite(finite))
    with_word = np.exp(np.asarray(nucleus.topk_logp[..., -1]))
    got = reduced_support(nucleus)
    np.testing.assert_array_equal(got.mu[..., -2], 0)
    np.testing.assert_allclose(got.gap[..., -2], with_word, rtol=1e-6)


@pytest.mark.parametrize("sure", [False, True])
def test_a_covered_vocabulary_has_no_tail_and_sums_above_one_no_effect(sure: bool) -> None:
    """K = V: the divergence of the support is that of the whole; float32 sums leave the floor, and no negative tail."""
    pair = draw(11)
    pair = dataclasses.replace(pair, ids=np.argsort(-pair.z_mu, axis=-1))
    if sure:
        pair = dataclasses.replace(pair, z_pi=pair.z_mu)
    evidence = pair.evidence(advantages(11))
    hair = dataclasses.replace(evidence, topk_logp=evidence.topk_logp + 2e-7, topk_logp_mu=evidence.topk_logp_mu + 2e-7)
    for case, known in itertools.product((evidence, hair), (VOCAB, 0)):
        support = reduced_support(dataclasses.replace(case, vocab_size=known))
        assert np.all(np.asarray(support.has_tail) == (known == 0))
        assert np.all(np.asarray(support.mu_tail) > 0) and np.all(np.asarray(support.pi_tail) > 0)
        np.testing.assert_allclose(support_kl(support), kl(pair.mu, pair.pi), atol=2e-5)
        np.testing.assert_allclose(support_tv(support), tv(pair.mu, pair.pi), atol=2e-5)
        assert np.all(np.isfinite(kl_direction(support).total)) and np.all(np.isfinite(tv_direction(support)))


def test_a_mask_drops_where_both_conditions_hold_and_nowhere_else() -> None:
    pair, a = draw(12), advantages(12)
    a[0] = 0
    with jax.enable_x64(True):
        evidence = pair.evidence(a)
        d = evidence.logp - evidence.logp_mu
        for divergence, direction in ((support_kl, PredictiveKl("uniform")), (support_tv, PredictiveTv())):
            mask = DivergenceMask(divergence, direction, delta=0.05, delta_high=0.2)
            size, way = (np.asarray(x) for x in mask.judge(mask.support(evidence), evidence.advantages, d)[:2])
            dropped = (a * way > 0) & (size > np.where(a > 0, 0.2, 0.05))
            np.testing.assert_array_equal(mask(evidence, d), np.where(dropped, 0, 1))
            assert dropped.any() and not dropped[0].any()
            at_edge = dataclasses.replace(mask, delta=float(size.max()), delta_high=None)
            assert np.all(np.asarray(at_edge(evidence, d)) == 1)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_threshold_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(InputError, match=r"delta: .* is not a number of at least 0"):
        DivergenceMask(support_tv, delta=value)
    with pytest.raises(InputError, match=r"delta_high: .* is not a number of at least 0"):
        DivergenceMask(support_tv, delta_high=value)

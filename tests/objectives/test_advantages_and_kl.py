"""Group advantages and KL estimates against their formulas and edges."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import (
    ADVANTAGES,
    Reduce,
    finalise,
    group_normalised,
    kl_estimate,
    kl_regulariser,
    make_evidence,
    normalise,
    overlong_shaping,
    staleness,
    staleness_split,
)
from jaxrl_sat.objectives.recipes import RECIPES
from jaxrl_sat.types import InputError
from tests.objectives.helpers import random_evidence

advantage = {name: jax.jit(function, static_argnums=2) for name, function in ADVANTAGES.items()}

BY_HAND = {
    "group": lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
    "centred": lambda r: r - r.mean(),
    "rloo": lambda r: np.asarray([x - np.delete(r, i).mean() for i, x in enumerate(r)]),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_against_numpy(name: str) -> None:
    """Groups in any order and of any size."""
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=32), np.repeat(np.arange(4), [3, 5, 8, 16])
    want = np.concatenate([BY_HAND[name](rewards[groups == g]) for g in range(4)])
    order = rng.permutation(32)
    got = advantage[name](jnp.asarray(rewards[order], float), jnp.asarray(groups[order]), 4)
    np.testing.assert_allclose(got, want[order], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_and_single_members_are_exactly_zero(name: str) -> None:
    rewards = jnp.asarray([0.1] * 31 + [0.7], float)
    groups = jnp.asarray([0] * 31 + [2])
    assert not np.any(advantage[name](rewards, groups, 4))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_faulty_reward_is_left_out_of_its_group(name: str) -> None:
    """Not finite, or in no group: A = 0, and the others are the group. Sums that overflow: the group's A = 0."""
    rewards = np.asarray([1, 0, np.nan, 4, np.inf, 1, 2, 9] + [3e38, 3e38, 1] + [0] * 21, np.float32)
    groups = np.asarray([0, 0, 0, 0, 1, 1, -1, 4] + [2] * 3 + [3] * 21)
    got = np.asarray(advantage[name](jnp.asarray(rewards), jnp.asarray(groups), 4))
    np.testing.assert_allclose(got[[0, 1, 3]], BY_HAND[name](np.asarray([1.0, 0, 4])), rtol=1e-5)
    assert not np.any(np.delete(got, [0, 1, 3]))


def test_arguments_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(Exception, match="rewards"):
        group_normalised(jnp.zeros((2, 2)), jnp.zeros(4, int), 1)
    with pytest.raises(Exception, match="group_ids"):
        group_normalised(jnp.zeros(4), jnp.zeros(4), 1)


def test_overlong_shaping_in_tokens() -> None:
    """0 up to 80 of 100 tokens, linear to -penalty at 100, -penalty past it; a buffer of 0 is a step."""
    lengths = jnp.asarray([0, 80, 81, 90, 100, 130])
    np.testing.assert_allclose(overlong_shaping(lengths, 100, 20, 2.0), [0, 0, -0.1, -1, -2, -2], rtol=1e-6)
    assert overlong_shaping(lengths, 100, 0).tolist() == [0, 0, 0, 0, 0, -1]
    with pytest.raises(InputError, match="buffer"):
        overlong_shaping(lengths, 100, 101)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_of_a_sequence(kind: str) -> None:
    """The estimate of the mean log-ratio at each active token; its gradient is spread over the response's tokens."""
    evidence = random_evidence(2, rows=3, length=6)
    evidence = dataclasses.replace(
        evidence,
        logp_ref=evidence.logp_ref.at[0, 0].set(jnp.nan),
        segment_ids=jnp.where(jnp.arange(6) < 3, 1, 2) * jnp.ones((3, 1), int),
        num_segments=2,
    )

    @jax.jit
    def gradient(logp):
        def value(logp):
            given = dataclasses.replace(evidence, logp=logp)
            out = kl_regulariser(given, 0.5, kind, Reduce("seq-mean-token-mean"), level="sequence")
            return normalise(out.loss_sum, out.count), out.per_token

        return jax.grad(value, has_aux=True)(logp)

    grad, per_token = gradient(evidence.logp)
    logp, ref = np.asarray(evidence.logp, float), np.asarray(evidence.logp_ref, float)
    want, slope, responses = np.zeros((3, 6)), np.zeros((3, 6)), 0
    for row in range(3):
        for start in (0, 3):
            on = [t for t in range(start, start + 3) if evidence.mask[row, t] and np.isfinite(ref[row, t])]
            if on:
                x = np.mean(ref[row, on] - logp[row, on])
                want[row, on] = 0.5 * (-x if kind == "k1" else np.expm1(x) - x)
                slope[row, on] = 0.5 * (1 if kind == "k1" else 1 - np.exp(x)) / len(on)
                responses += 1
    np.testing.assert_allclose(per_token, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, slope / responses, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="kl_level"):
        kl_regulariser(evidence, 0.5, level="batch")


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_gradients(kind) -> None:
    """d k1 = 1, d k2 = -x, d k3 = 1 - e^x in log pi; low_var_kl has none past 10, nor k3 past x = 20."""
    x = jnp.asarray([[-3.0, -1e-3, 0.0, 1e-3, 1.0, 5.0, 30.0, 300.0]])
    logp = jnp.zeros_like(x)
    grad = jax.grad(lambda lp: jnp.sum(kl_estimate(lp, x, kind)[0]))(logp)
    with np.errstate(over="ignore"):
        full = {"k1": np.ones_like(x), "k2": -x, "k3": 1 - np.exp(x)}.get(kind, 1 - np.exp(x))
    limit = {"k3": 20.0, "low_var_kl": 2.6}.get(kind, np.inf)
    np.testing.assert_allclose(grad, np.where(x > limit, 0, full), rtol=1e-5, atol=1e-6)
    value, keep = kl_estimate(logp, x, kind)
    assert np.all(np.isfinite(value))
    np.testing.assert_array_equal(keep, x <= limit)


def test_split_adds_up() -> None:
    got = finalise(staleness_split(random_evidence(0, rows=8, length=32)))
    whole = got["staleness/var_policy"] + got["staleness/var_impl"] + 2 * got["staleness/cov"]
    np.testing.assert_allclose(whole, got["staleness/var_total"], rtol=1e-5)


def test_no_mismatch_is_zero_staleness() -> None:
    evidence = random_evidence(1, spread=0.0)
    got = finalise(staleness(evidence))
    zero = {"abs_d_mean", "abs_d_max", "var_d", "k3", "is_deviation", "sampled_tv", "nonfinite"}
    assert all(got[f"staleness/{name}"] == 0 for name in zero)


def test_a_response_advantage_is_broadcast() -> None:
    ones = jnp.ones((2, 3))
    assert make_evidence(ones, ones, jnp.asarray([1.0, 2.0]), ones > 0).advantages.tolist() == [[1] * 3, [2] * 3]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("ppo", "eps_low", -0.1),
        ("grpo", "eps_high", float("nan")),
        ("gspo", "grad_mode", "both"),
        ("gspo", "aggregation", "mean"),
        ("ppo", "denominator", "old"),
        ("sat_grpo", "exponent", 0.0),
        ("sat_gspo", "q_floor", -1.0),
        ("sat_gspo", "quantile", 2.0),
    ],
)
def test_impossible_parameters_are_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        RECIPES[name](**{key: value})

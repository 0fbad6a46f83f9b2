"""Group advantages and KL estimates against their formulas and edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import finalise, group_normalised, kl_estimate, make_evidence, staleness, staleness_split
from jaxrl_sat.objectives.recipes import RECIPES
from jaxrl_sat.types import InputError
from tests.objectives.helpers import random_evidence


def test_advantages_against_numpy() -> None:
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=32), np.repeat(np.arange(4), 8)
    want = np.concatenate([(r - r.mean()) / (r.std(ddof=1) + 1e-6) for r in rewards.reshape(4, 8)])
    order = rng.permutation(32)
    got = jax.jit(group_normalised, static_argnums=2)(jnp.asarray(rewards[order], float), jnp.asarray(groups[order]), 4)
    np.testing.assert_allclose(got, want[order], rtol=1e-4, atol=1e-6)


def test_equal_rewards_and_single_members_are_exactly_zero() -> None:
    rewards = jnp.asarray([0.1] * 16 + [0.7], float)
    groups = jnp.asarray([0] * 16 + [2])
    assert not np.any(group_normalised(rewards, groups, 3))


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

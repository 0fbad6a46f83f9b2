"""The order statistic against NumPy's inverted_cdf, its edges, and levels as people write them."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives.policy_loss import terms
from jaxrl_sat.objectives.quantile import lower_quantile, order_index, parse_level, turn_quantiles
from jaxrl_sat.objectives.radii import SatRadii
from jaxrl_sat.objectives.recipes import sat_grpo
from jaxrl_sat.types import InputError
from tests.objectives.helpers import random_evidence


@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_matches_inverted_cdf(precision: type) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(precision is np.float64):
        for n in range(1, 258, 4):
            values = np.zeros(260, precision)
            values[:n] = np.abs(rng.normal(size=n) * 10.0 ** rng.integers(-30, 30, n))
            values[: n // 3] = 0.0
            active = np.arange(260) < n
            values[~active] = np.nan
            got = lower_quantile(jnp.asarray(values), jnp.asarray(active), "0.90")
            assert got == np.quantile(values[:n], 0.9, method="inverted_cdf"), n


def test_edges() -> None:
    def q(values, level):
        values = jnp.asarray(values, float)
        return float(lower_quantile(values, jnp.ones(values.shape, bool), level))

    assert q(np.zeros((0,)), 0.9) == 0
    assert q([3.0], 0.9) == 3
    assert q([0.0] * 9 + [5.0], 0.9) == 0  # nine in ten are zero
    assert q([2.0] * 4, 0.9) == 2
    assert q([1.0, 4.0, 2.0], 1) == 4
    assert q([-0.0, 0.0], 0.5) == 0


def test_order_index_is_exact_for_large_counts() -> None:
    for count in (0, 1, 9, 10, 11, 20, 200_000, 50_000_003, 2_000_000_000):
        for level in (Fraction(9, 10), Fraction(19, 20), Fraction(999, 1000), Fraction(1)):
            exact = -(-level.numerator * count // level.denominator)
            assert int(order_index(jnp.asarray(count, jnp.int32), level)) == exact


@pytest.mark.parametrize("level", [0.9, "0.90", "9/10", Fraction(9, 10)])
def test_levels_are_exact(level) -> None:
    assert parse_level(level) == Fraction(9, 10)


@pytest.mark.parametrize("level", [0, 1.5, -0.1, "high", "1/0", 0.123456789, float("nan"), float("inf")])
def test_impossible_levels_are_refused(level) -> None:
    with pytest.raises(InputError, match="quantile"):
        parse_level(level)


def test_gate_is_strict_and_floor_lifts_q() -> None:
    evidence = random_evidence(1)
    zero = terms(sat_grpo(), random_evidence(1, spread=0.0))
    assert zero.region.q == 0 and not zero.region.gate.any() and np.all(zero.region.c_plus == 1)
    free = terms(sat_grpo(), evidence)
    gated, active = np.asarray(free.region.gate), np.asarray(free.evidence.mask)
    mismatch = np.abs(np.asarray(free.log_ratio))
    np.testing.assert_array_equal(gated, active & (mismatch > float(free.region.q)))
    assert gated.sum() == active.sum() - -(-9 * active.sum() // 10)
    floored = SatRadii(q_floor=1e6)(free.evidence, free.log_ratio)
    assert floored.q == 1e6 and not floored.gate.any()
    assert SatRadii(q_floor=1e-9)(free.evidence, free.log_ratio).q == free.region.q


def test_scaling_all_mismatch_leaves_the_factors() -> None:
    """SPEC 6.7: c depends on d/q alone, which is why turns may want their own q."""
    t = terms(sat_grpo(), random_evidence(2))
    doubled = SatRadii()(t.evidence, 2 * t.log_ratio)
    np.testing.assert_allclose(doubled.c_plus, t.region.c_plus, rtol=1e-6)


def test_turns() -> None:
    values = jnp.asarray([[1.0, 2.0, 3.0, 10.0, 20.0, 7.0]])
    turns = jnp.asarray([[0, 0, 0, 1, 1, 2]])
    on = jnp.ones((1, 6), bool)
    np.testing.assert_array_equal(turn_quantiles(values, on, turns, 4, 0.5), [2, 10, 7, 3])  # no token: pooled
    pooled = lower_quantile(values, on, 0.5)
    np.testing.assert_array_equal(turn_quantiles(values, on, turns, 4, 0.5, min_turn_tokens=2), [2, 10, pooled, pooled])

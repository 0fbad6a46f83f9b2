"""SPEC 6.8 and 19.7 over drawn arrays: SAT narrows its base on exactly the bands it should, or changes nothing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import RECIPES, Evidence, PolicyLoss, make_evidence, terms
from jaxrl_sat.objectives.radii import SatRadii

SHAPE, LOW, HIGH, LEVEL = (6, 8), 0.2, 0.28, "0.75"
BASES = {"token": "ppo", "sequence": "gspo"}

drawn = hypothesis.settings(max_examples=30, deadline=None, derandomize=True, database=None)
cases = {
    "d": hnp.arrays(np.float32, SHAPE, elements=st.floats(-1, 1, width=32), fill=st.nothing()),
    "a": hnp.arrays(np.float32, SHAPE, elements=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]), fill=st.nothing()),
    "mask": hnp.arrays(np.bool_, SHAPE),
    "scale": st.sampled_from([0.03, 0.3, 1.0, 30.0]),
}


@functools.cache
def objectives(level: str) -> dict[str, PolicyLoss]:
    """The base objective of that ratio, the same under SAT, and SAT switched off."""
    base = RECIPES[BASES[level]](eps_low=LOW, eps_high=HIGH)
    sat = SatRadii(LOW, HIGH, quantile=LEVEL)
    off = dataclasses.replace(sat, enabled=False)
    return {"base": base} | {k: dataclasses.replace(base, radii=radii) for k, radii in {"sat": sat, "off": off}.items()}


@functools.partial(jax.jit, static_argnums=0)
def outcome(level: str, evidence: Evidence) -> dict[str, tuple[Any, jax.Array]]:
    """The intermediates of each objective, and the gradient of its summed S in log pi."""

    def of(objective: PolicyLoss) -> tuple[Any, jax.Array]:
        def total(logp: jax.Array) -> tuple[jax.Array, Any]:
            t = terms(objective, dataclasses.replace(evidence, logp=logp))
            return jnp.sum(t.surrogate), t

        grad, t = jax.grad(total, has_aux=True)(evidence.logp)
        return t, grad

    return {name: of(objective) for name, objective in objectives(level).items()}


def run(level: str, d: np.ndarray, a: np.ndarray, mask: np.ndarray) -> dict[str, tuple[Any, np.ndarray]]:
    """`outcome` for log mu = 0, so that d is exact; one advantage a response where the ratio is a response's."""
    advantages = a if level == "token" else np.broadcast_to(a[:, :1], a.shape)
    evidence = make_evidence(*(jnp.asarray(x) for x in (d, np.zeros_like(d), advantages, mask)))
    return jax.tree.map(np.asarray, outcome(level, evidence))


def assert_narrows(level: str, d: np.ndarray, a: np.ndarray, mask: np.ndarray) -> int:
    """SPEC 6.8.1-3; the number of tokens on the newly clipped bands."""
    got = run(level, d, a, mask)
    (sat, sat_grad), (base, base_grad) = got["sat"], got["base"]
    assert np.all(sat.region.low <= base.region.low) and np.all(sat.region.high <= base.region.high)
    assert np.all(sat.surrogate <= base.surrogate)
    r, advantage, one = base.ratio, base.evidence.advantages, np.float32(1)
    up = (advantage > 0) & (one + sat.region.high < r) & (r <= one + base.region.high)
    down = (advantage < 0) & (one - base.region.low <= r) & (r < one - sat.region.low)
    bands = mask & (up | down)
    np.testing.assert_array_equal(sat.newly_clipped, bands)
    if level == "token":  # the gradient of a sequence ratio spreads over its tokens: all of the response or none
        np.testing.assert_array_equal(sat_grad != base_grad, bands)
    else:
        np.testing.assert_array_equal(np.any(sat_grad != base_grad, axis=1), np.any(bands, axis=1))
    step, r = 0.01 * advantage.astype(float), r.astype(float)
    moved_sat, moved_base = r + step * sat.keep, r + step * base.keep
    assert np.all(np.abs(moved_sat - 1)[bands] < np.abs(moved_base - 1)[bands])
    return int(bands.sum())


def assert_same_but_q(one: tuple[Any, np.ndarray], other: tuple[Any, np.ndarray]) -> None:
    """Every intermediate and the gradient bit for bit, but for the scale q that SAT reports."""
    region = dataclasses.replace(one[0].region, q=other[0].region.q)
    same = (dataclasses.replace(one[0], region=region), one[1])
    for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@drawn
@hypothesis.given(**cases)
def test_sat_narrows_token_ratios_on_its_bands_alone(d, a, mask, scale) -> None:
    assert_narrows("token", np.float32(scale) * d, a, mask)


@drawn
@hypothesis.given(**cases)
def test_sat_narrows_sequence_ratios_on_its_bands_alone(d, a, mask, scale) -> None:
    assert_narrows("sequence", np.float32(scale) * d, a, mask)


@drawn
@hypothesis.given(**cases)
def test_sat_off_is_its_base_bitwise_for_any_evidence(d, a, mask, scale) -> None:
    for level in BASES:
        got = run(level, np.float32(scale) * d, a, mask)
        assert_same_but_q(got["off"], got["base"])


@drawn
@hypothesis.given(**cases)
def test_gate_is_strictly_above_the_order_statistic(d, a, mask, scale) -> None:
    """q is the ceil(3 N / 4)-th smallest |d| of the active tokens; no more than N - k of them are gated."""
    d = np.float32(scale) * d
    sat = run("token", d, a, mask)["sat"][0]
    sizes, n = np.sort(np.abs(d)[mask]), int(mask.sum())
    k = -(-3 * n // 4)
    q = sizes[k - 1] if n else 0
    assert sat.region.q == q
    np.testing.assert_array_equal(sat.region.gate, mask & (q > 0) & (np.abs(d) > q))
    assert sat.region.gate.sum() <= n - k


@pytest.mark.parametrize("level", sorted(BASES))
def test_the_bands_are_not_empty(level: str) -> None:
    """The properties above are met by drawn evidence that does land on the bands."""
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(8):
        offset = rng.normal(size=(SHAPE[0], 1)) * 0.12
        d = (offset + rng.normal(size=SHAPE) * 0.05).astype(np.float32)
        a = np.broadcast_to(np.sign(offset), SHAPE).astype(np.float32)
        counts.append(assert_narrows(level, d, a, np.ones(SHAPE, bool)))
    assert sum(counts) > 8


@pytest.mark.parametrize("level", sorted(BASES))
def test_no_reference_scale_no_contraction(level: str) -> None:
    """q = 0 while some |d| > 0: bit for bit the base."""
    d, a = np.zeros(SHAPE, np.float32), np.ones(SHAPE, np.float32)
    mask = np.ones(SHAPE, bool)
    if level == "token":
        d[0, :5] = 0.25
    else:
        d[0], mask[0, 3:] = 0.25, False
    got = run(level, d, a, mask)
    assert got["sat"][0].region.q == 0 and np.any(got["sat"][0].log_ratio)
    assert_same_but_q(got["sat"], got["base"])

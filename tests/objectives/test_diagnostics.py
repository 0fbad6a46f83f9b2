"""Figures by turn, against float64 NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat.objectives import by_turn, combine, finalise
from tests.objectives.helpers import random_evidence

measure = jax.jit(by_turn, static_argnames="low_probability")


def test_figures_by_turn() -> None:
    """Means over each turn's own tokens; a turn past the last counts with it, one without tokens is 0; parts add."""
    rng = np.random.default_rng(0)
    evidence = random_evidence(0, rows=4, length=12)
    turns = rng.choice([0, 1, 3, 7], evidence.logp.shape)
    evidence = dataclasses.replace(
        evidence,
        turn_ids=jnp.asarray(turns),
        num_turns=4,
        entropy=evidence.entropy.at[0, 0].set(jnp.nan),
        logp_mu=evidence.logp_mu.at[1, 0].set(-jnp.inf),
    )
    metrics = measure(evidence, low_probability=0.2)
    got = finalise(metrics)
    logp, mu, h = (np.asarray(getattr(evidence, name), np.float64) for name in ("logp", "logp_mu", "entropy"))
    turns, mask = np.minimum(turns, 3), np.asarray(evidence.mask)
    for turn in range(4):
        on, with_h = mask & (turns == turn) & np.isfinite(mu), mask & (turns == turn) & np.isfinite(h)
        want = {"abs_d_mean": np.abs(logp - mu)[on], "low_probability": np.exp(logp)[on] < 0.2, "entropy": h[with_h]}
        for name, values in want.items():
            mean = np.mean(values) if len(values) else 0
            np.testing.assert_allclose(got[f"staleness/turn_{turn}/{name}"], mean, rtol=1e-5, atol=1e-7)
    assert len(got) == 12 and got["staleness/turn_2/entropy"] == 0
    twice = finalise(combine(metrics, metrics))
    for name, value in got.items():
        np.testing.assert_allclose(twice[name], value, rtol=1e-6)

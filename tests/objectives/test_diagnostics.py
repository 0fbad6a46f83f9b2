"""Figures by turn and divergences of the records, against float64 NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat.objectives import by_turn, combine, divergences, finalise, make_evidence
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


def test_divergences_of_the_records() -> None:
    """Two recorded words of five, y outside them in one token; a word that pi has lost makes that KL infinite."""
    rng = np.random.default_rng(1)
    mu, pi = (rng.dirichlet(np.ones(5), (2, 3)) for _ in range(2))
    ids = np.argsort(-mu, axis=-1)[..., :2]
    tokens = ids[..., 0].copy()
    tokens[0, 1] = np.argmin(mu[0, 1])

    def at(p: np.ndarray, where: np.ndarray) -> np.ndarray:
        return np.take_along_axis(p, where, axis=-1)

    topk_logp = np.log(at(pi, ids))
    topk_logp[0, 2, 1] = -np.inf
    mask = np.asarray([[1, 1, 1], [1, 0, 0]], bool)
    topk_logp[1, 1] = np.nan
    logp, logp_mu = (jnp.asarray(np.log(at(p, tokens[..., None])[..., 0]), float) for p in (pi, mu))
    evidence = make_evidence(
        logp,
        logp_mu,
        jnp.ones(2),
        jnp.asarray(mask),
        tokens=jnp.asarray(tokens),
        topk_ids=jnp.asarray(ids),
        topk_logp=jnp.asarray(topk_logp, float),
        topk_logp_mu=jnp.asarray(np.log(at(mu, ids)), float),
        vocab_size=5,
    )
    got = finalise(jax.jit(divergences)(evidence))

    def reduced(p: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return np.append(p[slots], 1 - p[slots].sum())

    binary, kl, tv = [], [], []
    for n, t in zip(*np.nonzero(mask), strict=True):
        y = tokens[n, t]
        own, other = (reduced(p[n, t], np.asarray([y])) for p in (mu, pi))
        binary.append(np.sum(own * np.log(own / other)))
        slots = np.unique([*ids[n, t], y])
        lost = pi[n, t].copy()
        if (n, t) == (0, 2):
            lost[ids[0, 2, 1]] = 0
        own, other = reduced(mu[n, t], slots), reduced(lost, slots)
        tv.append(np.abs(own - other).sum() / 2)
        if np.all(other > 0):
            kl.append(np.sum(own * np.log(own / other)))
    want = {"binary_kl": binary, "topk_kl": kl, "topk_tv": tv, "topk_kl_infinite": [1, 0, 0, 0]}
    assert len(kl) == 3 and set(got) == {f"staleness/{name}" for name in want}
    for name, values in want.items():
        np.testing.assert_allclose(got[f"staleness/{name}"], np.mean(values), rtol=1e-4, err_msg=name)

"""Packed rows equal unpacked ones, and sums of shards and microbatches equal the whole."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import (
    RECIPES,
    Evidence,
    Reduce,
    combine,
    finalise,
    normalise,
    staleness,
    terms,
    total_loss,
)
from jaxrl_sat.objectives.evidence import sanitise
from tests.objectives.helpers import random_evidence

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")


def pack(evidence: Evidence) -> Evidence:
    """Two responses a row, the second first, with padding between."""
    rows = evidence.logp.shape[0] // 2

    def side_by_side(x: jax.Array, gap: float) -> jax.Array:
        return jnp.concatenate([x[rows:], jnp.full((rows, 3, *x.shape[2:]), gap, x.dtype), x[:rows]], axis=1)

    packed = jax.tree.map(lambda x: side_by_side(x, 0 if x.dtype == bool else 9), evidence)
    first = jnp.where(side_by_side(evidence.mask, 0), 1, 0).at[:, : evidence.logp.shape[1]].set(2)
    first = first.at[:, -evidence.logp.shape[1] :].set(1)
    return dataclasses.replace(packed, segment_ids=first, num_segments=3)


@pytest.mark.parametrize("name", ["sat_grpo", "sat_gspo"])
def test_packed_rows_equal_unpacked_rows(name: str) -> None:
    """Losses and gradients, in every mode, with an empty response among them."""
    evidence = random_evidence(0, rows=4, length=6)
    evidence = dataclasses.replace(evidence, mask=evidence.mask.at[1].set(False))

    @jax.jit
    def outcome(e: Evidence):
        def losses(logp: jax.Array) -> jax.Array:
            t = terms(RECIPES[name](), dataclasses.replace(e, logp=logp))
            reduced = [Reduce(mode, norm=7.0, count_empty=True)(-t.surrogate, t.evidence) for mode in MODES]
            return jnp.stack([normalise(*r) for r in reduced])

        return losses(e.logp), jax.jacrev(losses)(e.logp)

    (loss, grad), (packed_loss, packed_grad) = outcome(evidence), outcome(pack(evidence))
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(packed_grad[..., :6], grad[:, 2:], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(packed_grad[..., -6:], grad[:, :2], rtol=1e-5, atol=1e-7)
    assert not np.any(packed_grad[..., 6:-6])


def test_microbatches_add_up() -> None:
    """Losses of two halves, added, are those of the whole in every mode; so are the metrics (PPO: no quantile)."""
    whole = random_evidence(1, rows=6, length=7)
    halves = [jax.tree.map(lambda x: x[:3], whole), jax.tree.map(lambda x: x[3:], whole)]

    @jax.jit
    def outcome(e: Evidence):
        out = total_loss(RECIPES["ppo"](), e, entropy_coef=0.1)
        clean, _ = sanitise(e, ("logp",))
        return [Reduce(mode, norm=5.0)(out.per_token, clean) for mode in MODES], combine(out.metrics, staleness(e))

    (sums_1, metrics_1), (sums_2, metrics_2) = map(outcome, halves)
    sums, metrics = outcome(whole)
    for (s1, n1), (s2, n2), (s, n) in zip(sums_1, sums_2, sums, strict=True):
        np.testing.assert_allclose(normalise(s1 + s2, n1 + n2), normalise(s, n), rtol=1e-5)
    got, want = finalise(combine(metrics_1, metrics_2)), finalise(metrics)
    assert set(got) == set(want)
    for name in set(want) - {"sat/q"}:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)
    from_zeros = finalise(combine(jax.tree.map(jnp.zeros_like, metrics), metrics))
    for name in want:
        np.testing.assert_array_equal(from_zeros[name], want[name])

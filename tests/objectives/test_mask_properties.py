"""SPEC 19 over drawn arrays: the sign of the direction is that of the change, and padding has no say, bit for bit."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import RECIPES, Evidence, total_loss
from jaxrl_sat.objectives.direction import PredictiveKl
from jaxrl_sat.objectives.evidence import sanitise
from jaxrl_sat.objectives.masks import DivergenceMask, support_kl
from tests.objectives.distributions import LENGTH, ROWS, VOCAB, Pair, draw, kl, logit_step

SHAPE = (ROWS, LENGTH)
drawn = hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
FEW = (1, 3)
logits = hnp.arrays(np.float64, (*FEW, VOCAB), elements=st.floats(-3, 3, width=32), fill=st.nothing())
words = hnp.arrays(np.int64, FEW, elements=st.integers(0, VOCAB - 1), fill=st.nothing())
advantages = hnp.arrays(np.float32, FEW, elements=st.sampled_from([-2.0, -0.5, 0.5, 2.0]), fill=st.nothing())


@drawn
@hypothesis.given(z_mu=logits, shift=logits, sampled=words, a=advantages)
def test_the_predicted_sign_is_that_of_the_change(
    z_mu: np.ndarray, shift: np.ndarray, sampled: np.ndarray, a: np.ndarray
):
    """Logits moved by eta A r v: sign(A Ddot) = sign(dD), wherever Ddot is not so small that eta^2 decides (19.4)."""
    every = np.broadcast_to(np.arange(VOCAB), (*FEW, VOCAB))
    pair = Pair(z_mu, z_mu + 0.3 * shift, sampled, every)
    with jax.enable_x64(True):
        evidence, _ = sanitise(pair.evidence(a), ("logp", "logp_mu"))
        mask = DivergenceMask(support_kl, PredictiveKl())
        log_ratio = evidence.logp - evidence.logp_mu
        verdict = mask.judge(mask.support(evidence), evidence.advantages, log_ratio)
    eta, mu, pi = 1e-3, pair.mu, pair.pi
    for n, t in np.ndindex(FEW):
        k, r = int(sampled[n, t]), np.exp(log_ratio[n, t])
        moved = logit_step(pi[n, t], k, float(eta * a[n, t] * r))
        before, after = kl(mu[n, t], pi[n, t]), kl(mu[n, t], moved)
        np.testing.assert_allclose(verdict.divergence[n, t], before, atol=1e-9)
        slope = a[n, t] * float(verdict.direction[n, t])
        if abs(slope) > 20 * eta:
            assert np.sign(after - before) == np.sign(slope)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(name: str, evidence: Evidence) -> tuple[jax.Array, jax.Array]:
    def value(logp: jax.Array) -> jax.Array:
        out = total_loss(RECIPES[name](), dataclasses.replace(evidence, logp=logp), kl_coef=0.1, entropy_coef=0.01)
        return out.loss_sum / jnp.maximum(out.count, 1)

    return jax.value_and_grad(value)(evidence.logp)


garbage = st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0.0, 7.5])


@pytest.mark.parametrize("name", ["sat_grpo", "sat_gspo", "icepop", "predictive_kl_uni", "predictive_tv_agg"])
@drawn
@hypothesis.given(
    mask=hnp.arrays(np.bool_, SHAPE),
    noise=hnp.arrays(np.float32, SHAPE, elements=garbage, fill=st.nothing()),
    slots=hnp.arrays(np.float32, (*SHAPE, 5), elements=garbage, fill=st.nothing()),
    ids=hnp.arrays(np.int32, (*SHAPE, 5), elements=st.sampled_from([-1, 0, 3, 23, 2**31 - 1]), fill=st.nothing()),
)
def test_padding_has_no_say(name: str, mask: np.ndarray, noise: np.ndarray, slots: np.ndarray, ids: np.ndarray) -> None:
    """Loss and gradient, bitwise, whatever stands in masked positions of any field, top-K slots included."""
    clean = dataclasses.replace(draw(3).evidence(np.linspace(-2, 2, ROWS)), mask=jnp.asarray(mask))

    def littered(values: jax.Array, litter: np.ndarray) -> jax.Array:
        where = mask if values.ndim == 2 else mask[..., None]
        return jnp.asarray(np.where(where, np.asarray(values), litter.astype(values.dtype)))

    fields = ("logp", "logp_mu", "logp_old", "logp_ref", "advantages", "entropy")
    dirty = {field: littered(getattr(clean, field), noise) for field in fields}
    dirty |= {field: littered(getattr(clean, field), slots) for field in ("topk_logp", "topk_logp_mu")}
    dirty |= {"topk_ids": littered(clean.topk_ids, ids), "tokens": littered(clean.tokens, ids[..., 0])}
    got, want = (loss_and_gradient(name, e) for e in (dataclasses.replace(clean, **dirty), clean))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    assert np.all(np.asarray(got[1])[~mask] == 0) and np.isfinite(got[0])

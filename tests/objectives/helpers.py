"""Random evidence for the objective tests: ragged responses, some ratios far outside the radii."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat.objectives import Evidence, PolicyLoss, make_evidence, normalise, policy_loss


def random_evidence(seed: int, rows: int = 4, length: int = 12, spread: float = 0.3) -> Evidence:
    """[rows, length] evidence with response lengths from 1 to `length`."""
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    logp_mu = -rng.exponential(1.0, shape)
    return make_evidence(
        jnp.asarray(logp_mu + spread * rng.standard_t(3, shape), float),
        jnp.asarray(logp_mu, float),
        jnp.asarray(rng.normal(size=rows), float),
        jnp.asarray(np.arange(length)[None] < rng.integers(1, length + 1, (rows, 1))),
        logp_old=jnp.asarray(logp_mu + 0.05 * rng.normal(size=shape), float),
        logp_ref=jnp.asarray(logp_mu + 0.1 * rng.normal(size=shape), float),
        entropy=jnp.asarray(rng.exponential(1.0, shape), float),
        vocab_size=50,
    )


def value_and_grad(objective: PolicyLoss, evidence: Evidence) -> tuple[jax.Array, jax.Array]:
    """The normalised loss and its gradient in `logp`."""

    def value(logp: jax.Array) -> jax.Array:
        out = policy_loss(objective, dataclasses.replace(evidence, logp=logp))
        return normalise(out.loss_sum, out.count)

    return jax.value_and_grad(value)(evidence.logp)  # not compiled: recipes differ more than shapes

"""Divergences between the behaviour policy mu and the current policy pi: of one word, and of two whole softmaxes."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

FLOOR = 1e-12
"""No probability of "everything else" is taken for smaller than this, so that its logarithm stays finite."""


def log1mexp(log_p: Float[Array, "*shape"], floor: float = FLOOR) -> Float[Array, "*shape"]:
    """log(1 - p) from log p, with 1 - p floored: SPEC 8.4. Accurate at both ends; a log p above 0 is a floored 1 - p.

    Close to p = 1 through expm1, close to p = 0 through log1p; p = 0 (log p = -inf) gives 0.
    """
    far = log_p <= -math.log(2)
    near = jnp.log(jnp.maximum(-jnp.expm1(jnp.where(far, -1, log_p)), floor))
    return jnp.where(far, jnp.log1p(-jnp.exp(jnp.where(far, log_p, -1))), near)


def bernoulli_kl(
    log_p: Float[Array, "*shape"], log_q: Float[Array, "*shape"], floor: float = FLOOR
) -> Float[Array, "*shape"]:
    """KL(Bern(p) || Bern(q)) = p log(p/q) + (1-p) log((1-p)/(1-q)): seed 001 Eq. 29, seed 000 Part 4 KPop, SPEC 8.4.

    1 - p and 1 - q are floored; p = 0 contributes 0 (0 log 0 = 0); q = 0 with p > 0 gives inf.
    """
    some = log_p > -jnp.inf
    hit = jnp.where(some, jnp.exp(log_p) * (jnp.where(some, log_p, 0) - jnp.where(some, log_q, 0)), 0)
    miss = jnp.maximum(-jnp.expm1(log_p), floor)
    return hit + miss * (log1mexp(log_p, floor) - log1mexp(log_q, floor))


def probability_gap(logp: Float[Array, "*shape"], logp_mu: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """pi - mu from their logarithms, to the last digits also where both are close: neither is formed and subtracted.

    The larger of the two, times -expm1(-|d|), with the sign of d = log pi - log mu. A probability of 0 is log -inf.
    """
    larger = jnp.maximum(logp, logp_mu)
    d = jnp.where(larger > -jnp.inf, logp - logp_mu, 0)
    return jnp.sign(d) * jnp.exp(larger) * -jnp.expm1(-jnp.abs(d))


def sampled_tv(logp: Float[Array, "*shape"], logp_mu: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """|pi(y) - mu(y)| = mu(y) |r - 1|: seed 000 3.3, SPEC 11. A lower bound of the full TV (partition y / not y)."""
    return jnp.abs(probability_gap(logp, logp_mu))

"""Divergences of two whole softmaxes and their direction: what the top-K estimates of `direction` are estimates of."""

from __future__ import annotations

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl_sat.objectives.divergence import probability_gap


@no_type_check
@struct.dataclass
class FullDivergence:
    """KL(mu || pi), TV(mu, pi), and their derivatives along the unit logit step of the sampled word k."""

    kl: Float[Array, "*b"]
    tv: Float[Array, "*b"]
    kl_direction: Float[Array, "*b"]
    local: Float[Array, "*b"]
    global_: Float[Array, "*b"]
    tv_direction: Float[Array, "*b"]


def full_divergence(
    logits_mu: Float[Array, "*b V"], logits: Float[Array, "*b V"], sampled: Int[Array, "*b"]
) -> FullDivergence:
    """On the whole vocabulary: seed 001 Eq. 7-8 and 33-34. A logit of -inf is a word without probability.

    KL:  (pi_k - mu_k) + sum_i pi_i (mu_i - pi_i),  local + global
    TV:  -1/2 sum_i s_i pi_i (v_i - sum_j pi_j v_j),  v_i = 1[i = k] - pi_i,  s = sign(mu - pi)
    """
    log_mu, log_pi = jax.nn.log_softmax(logits_mu), jax.nn.log_softmax(logits)
    mu, pi, gap = jnp.exp(log_mu), jnp.exp(log_pi), probability_gap(log_pi, log_mu)
    some = mu > 0
    terms = jnp.where(some, mu * (jnp.where(some, log_mu, 0) - jnp.where(some, log_pi, 0)), 0)
    is_sampled = jnp.arange(pi.shape[-1]) == sampled[..., None]
    local = jnp.sum(jnp.where(is_sampled, gap, 0), axis=-1)
    global_ = -jnp.sum(pi * gap, axis=-1)
    v = is_sampled - pi
    centred = v - jnp.sum(pi * v, axis=-1, keepdims=True)
    return FullDivergence(
        kl=jnp.sum(terms, axis=-1),
        tv=jnp.sum(jnp.abs(gap), axis=-1) / 2,
        kl_direction=local + global_,
        local=local,
        global_=global_,
        tv_direction=jnp.sum(jnp.sign(gap) * pi * centred, axis=-1) / 2,
    )

"""What a rollout shows of a distribution: its top-K words, the sampled one, and one tail. Seed 001 Sec. 2, SPEC 12.

Everything here feeds masks alone and is detached.
"""

from __future__ import annotations

import functools
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrl_sat.objectives.divergence import FLOOR, probability_gap
from jaxrl_sat.objectives.evidence import Evidence

LOG_PROBABILITY_MAX = 0.01
"""A record above this is no log-probability but a fault; what rounding leaves above 0, in bfloat16 too, is below it."""


@no_type_check
@struct.dataclass
class Support:
    """The reduced support TopK(mu, K) with y, as S = K + 1 slots of which the last is y where the K have it not.

    `pi`, `mu` and `gap` = pi - mu are 0 in a slot that is not `used`; `is_sampled` marks that of y, whose probability
    stands there as recorded among the top K. `logp` and `logp_mu` are those of the sampled token itself, pi_k and mu_k
    of the equations. `size` is m. `pi_tail`, `mu_tail` (floored) and `gap_tail`, their difference, are what the used
    slots leave over; they count for nothing where `has_tail` is False: there the slots cover the vocabulary, whose size
    n is `vocab_size` (0: unknown, and never covered).
    """

    logp: Float[Array, "N T"]
    logp_mu: Float[Array, "N T"]
    pi: Float[Array, "N T S"]
    mu: Float[Array, "N T S"]
    gap: Float[Array, "N T S"]
    log_mu_over_pi: Float[Array, "N T S"]
    is_sampled: Bool[Array, "N T S"]
    size: Int[Array, "N T"]
    pi_tail: Float[Array, "N T"]
    mu_tail: Float[Array, "N T"]
    gap_tail: Float[Array, "N T"]
    has_tail: Bool[Array, "N T"]
    vocab_size: int = struct.field(pytree_node=False, default=0)


@functools.partial(jax.jit, static_argnames=("top_k", "include_sampled", "tail_floor"))
def reduced_support(
    evidence: Evidence, top_k: bool = True, include_sampled: bool = True, tail_floor: float = FLOOR
) -> Support:
    """The support of each token of clean evidence: seed 001 Sec. 2, around Eq. 5.

    `top_k` False leaves the records out: y against everything else, the binary case of Eq. 28 (K = 0).
    `include_sampled` False leaves y out where the top K have it not, as Stable-RL does; its mass is then in the tail.

    A slot whose id is negative, whose id a used slot before it has, or one of whose log-probabilities is NaN or above 0
    is ignored; -inf (a word outside the sampler's nucleus) is a probability of 0. Tails are floored at `tail_floor`,
    since rounded sums may exceed 1. 1 - pi(y) comes from expm1: a y close to certain leaves its tail in float32 too.
    """
    used, is_sampled, log_pi, log_mu = _slots(evidence, top_k, include_sampled)
    pi, mu, gap = jnp.exp(log_pi), jnp.exp(log_mu), probability_gap(log_pi, log_mu)
    pi_tail = jnp.maximum(_left_over(pi, log_pi, is_sampled), tail_floor)
    mu_tail = jnp.maximum(_left_over(mu, log_mu, is_sampled), tail_floor)
    floored = (pi_tail <= tail_floor) | (mu_tail <= tail_floor)
    size = jnp.sum(used, axis=-1)
    n = evidence.vocab_size
    return Support(
        logp=jax.lax.stop_gradient(evidence.logp),
        logp_mu=jax.lax.stop_gradient(evidence.logp_mu),
        pi=pi,
        mu=mu,
        gap=gap,
        log_mu_over_pi=jnp.where(mu > 0, log_mu, 0) - jnp.where(mu > 0, log_pi, 0),
        is_sampled=is_sampled,
        size=size,
        pi_tail=pi_tail,
        mu_tail=mu_tail,
        gap_tail=jnp.where(floored, pi_tail - mu_tail, -jnp.sum(gap, axis=-1)),
        has_tail=(size < n) if n else jnp.ones(size.shape, bool),
        vocab_size=n,
    )


def _slots(
    evidence: Evidence, top_k: bool, include_sampled: bool
) -> tuple[Bool[Array, "N T S"], Bool[Array, "N T S"], Float[Array, "N T S"], Float[Array, "N T S"]]:
    """Which slots are used, which is y's, and detached log pi and log mu, -inf in the others."""
    k = evidence.topk_ids.shape[-1] if top_k else 0
    ids, log_pi, log_mu = (x[..., :k] for x in (evidence.topk_ids, evidence.topk_logp, evidence.topk_logp_mu))
    valid = (ids >= 0) & (log_pi <= LOG_PROBABILITY_MAX) & (log_mu <= LOG_PROBABILITY_MAX)
    used = valid & ~_repeats(jnp.where(valid, ids, -1))
    is_sampled = used & (ids == evidence.tokens[..., None])
    extra = ~jnp.any(is_sampled, axis=-1, keepdims=True) & include_sampled
    used, is_sampled = (jnp.concatenate([x, extra], axis=-1) for x in (used, is_sampled))

    def with_sampled(recorded: Float[Array, "N T K"], sampled: Float[Array, "N T"]) -> Float[Array, "N T S"]:
        joined = jnp.concatenate([recorded.astype(sampled.dtype), sampled[..., None]], axis=-1)
        return jax.lax.stop_gradient(jnp.where(used, joined, -jnp.inf))

    return used, is_sampled, with_sampled(log_pi, evidence.logp), with_sampled(log_mu, evidence.logp_mu)


def _repeats(ids: Int[Array, "N T K"]) -> Bool[Array, "N T K"]:
    """Where an id of at least 0 stands in a slot before as well.

    A record has each word once, so whether any repeats is asked first, by a sort: K log K, where finding the slots
    compares each with each.
    """
    ascending = jnp.sort(ids, axis=-1)
    some = jnp.any((ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0))
    return jax.lax.cond(some, _compared, lambda ids: jnp.zeros(ids.shape, bool), ids)


def _compared(ids: Int[Array, "N T K"]) -> Bool[Array, "N T K"]:
    k = ids.shape[-1]
    before = jnp.arange(k)[None, :] < jnp.arange(k)[:, None]
    return jnp.any((ids[..., :, None] == ids[..., None, :]) & before, axis=-1)


def _left_over(
    p: Float[Array, "N T S"], log_p: Float[Array, "N T S"], is_sampled: Bool[Array, "N T S"]
) -> Float[Array, "N T"]:
    """1 - sum of p, as (1 - p(y)) - the others; not floored."""
    y = jnp.max(jnp.where(is_sampled, log_p, -jnp.inf), axis=-1)
    return -jnp.expm1(y) - jnp.sum(jnp.where(is_sampled, 0, p), axis=-1)

"""Will the next step move pi away from mu? The divergence's derivative along a logit step. Seed 001 Sec. 3, App. D.

The step is v_i = 1[i = k] - pi_i, the unit logit direction of log pi(y), k the sampled word y. A slot of a mask is a
small frozen dataclass here; the functions beneath are the equations.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_sat.objectives.divergence import probability_gap
from jaxrl_sat.objectives.ratio import check_choice
from jaxrl_sat.objectives.support import Support
from jaxrl_sat.types import InputError

Tail = Literal["aggregated", "uniform"]


class KlDirection(NamedTuple):
    """The derivative of KL(mu || pi), `total` = `local` + `global_`: seed 001 Eq. 7-8."""

    total: Float[Array, "N T"]
    local: Float[Array, "N T"]
    global_: Float[Array, "N T"]


@runtime_checkable
class Direction(Protocol):
    """Support and detached log r [N, T] -> a number [N, T] whose sign, times that of A, says outward where positive."""

    def __call__(self, support: Support, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]: ...


@dataclasses.dataclass(frozen=True)
class RatioDirection:
    """sign(r - 1) = sign(log r): PPO's direction, the local term alone. Seed 001 Eq. 3-4 and 9."""

    def __call__(self, support: Support, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        return log_ratio


@dataclasses.dataclass(frozen=True)
class PredictiveKl:
    """The derivative of the KL, its unseen tail as one word (aggregated) or as n - m alike: seed 001 Eq. 10, 11."""

    tail: str = "aggregated"

    def __post_init__(self) -> None:
        check_choice("tail", self.tail, Tail)

    def __call__(self, support: Support, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        return kl_direction(support, self.tail).total


@dataclasses.dataclass(frozen=True)
class PredictiveTv:
    """The derivative of the TV, its unseen tail as one word (aggregated) or as n - m alike: seed 001 Eq. 37-42."""

    tail: str = "aggregated"

    def __post_init__(self) -> None:
        check_choice("tail", self.tail, Tail)

    def __call__(self, support: Support, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        return tv_direction(support, self.tail)


def kl_direction(support: Support, tail: str = "aggregated") -> KlDirection:
    """(pi_k - mu_k) + sum_i pi_i (mu_i - pi_i) over the support: seed 001 Eq. 7-11, SPEC 13.

        aggregated   ... + pi_tail (mu_tail - pi_tail)             Eq. 10
        uniform      ... + pi_tail (mu_tail - pi_tail) / (n - m)   Eq. 11

    pi_k and mu_k are the sampled token's own. `total` is not the sum of the two but

        (1 - pi_k) (pi_k - mu_k) + sum_{i != k} pi_i (mu_i - pi_i) + tail

    with 1 - pi_k from expm1: nothing cancels where pi_k is close to 1, and K = 0 gives 2 (1 - pi_k) (pi_k - mu_k)
    of Eq. 30 to the last digits. Should a top-K record of y differ from the sampled value, their difference is added.
    """
    local = probability_gap(support.logp, support.logp_mu)
    pulls = -support.pi * support.gap
    others = jnp.sum(jnp.where(support.is_sampled, 0, pulls), axis=-1)
    sampled = jnp.sum(jnp.where(support.is_sampled, pulls, 0), axis=-1)
    rest = others - _tail_share(support, tail) * support.pi_tail * support.gap_tail
    own = -jnp.expm1(support.logp) * local + (jnp.exp(support.logp) * local + sampled)
    return KlDirection(total=own + rest, local=local, global_=sampled + rest)


def direction_flips(kl: KlDirection) -> Bool[Array, "N T"]:
    """Eq. 15: 0 < gap_k < avg or 0 > gap_k > avg, with gap_k = pi_k - mu_k and avg = E_pi[pi - mu] = -global.

    There the ratio's direction and the divergence's are opposite. An exact 0 of either is no disagreement.
    """
    return jnp.sign(kl.local) * jnp.sign(kl.total) < 0


def tail_model_gap(support: Support) -> Float[Array, "N T"]:
    """Aggregated minus uniform global term, (1 - 1/(n-m)) pi_tail (mu_tail - pi_tail): seed 001 Eq. 12."""
    share = _tail_share(support, "aggregated") - _tail_share(support, "uniform")
    return -share * support.pi_tail * support.gap_tail


def tv_direction(support: Support, tail: str = "aggregated") -> Float[Array, "N T"]:
    """-1/2 [sum_i s_i pi_i (1[i = k] - pi_i - c) + tail], s = sign(mu - pi), sign(0) = 0: seed 001 Eq. 37-42, SPEC 14.

    aggregated   c = pi_k - sum pi_i^2 - pi_tail^2           tail = s_tail pi_tail (-pi_tail - c)
    uniform      c = pi_k - sum pi_i^2 - pi_tail^2 / (n-m)   tail = s_tail (-pi_tail^2 / (n-m) - c pi_tail)
    """
    pi, s, s_tail = support.pi, -jnp.sign(support.gap), -jnp.sign(support.gap_tail)
    squared = _tail_share(support, tail) * support.pi_tail**2
    c = jnp.exp(support.logp) - jnp.sum(pi**2, axis=-1) - squared
    step = support.is_sampled - pi - c[..., None]
    unseen = jnp.where(support.has_tail, s_tail * (-squared - c * support.pi_tail), 0)
    return -(jnp.sum(s * pi * step, axis=-1) + unseen) / 2


def _tail_share(support: Support, tail: str) -> Float[Array, "N T"]:
    """What part of (tail mass)^2 the sum of squares over the unseen words is: 1, 1/(n-m), and 0 where none is left."""
    if tail == "uniform" and not support.vocab_size:
        raise InputError("tail: 'uniform' spreads over the rest of the vocabulary; evidence.vocab_size must be given")
    words = jnp.maximum(support.vocab_size - support.size, 1) if tail == "uniform" else jnp.ones_like(support.size)
    return jnp.where(support.has_tail, 1 / words.astype(support.pi.dtype), 0)

"""Slot 4, gates that weigh by a ratio of policies: truncated, masked and raw importance corrections. Seed 000 Part 4.

k = mu~(y) / mu(y), the trainer's recomputation over the sampler's record, is the part of pi / mu that the
implementations differ by. On a PPO term whose ratio is pi / mu~ ("recomputed") the product k r is pi / mu again.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_sat.objectives.divergence import bernoulli_kl
from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.radii import check_radius
from jaxrl_sat.objectives.ratio import BASE, LOG_RATIO_MAX, Denominator, check_choice, importance, mean_log_ratio
from jaxrl_sat.objectives.segments import spread
from jaxrl_sat.types import InputError

Trainer = Literal["recomputed", "current"]

TRAINER = {"recomputed": "logp_old", "current": "logp"}
MISMATCH = frozenset({"logp_mu", "logp_old"})


def mismatch(evidence: Evidence, log_ratio_max: float = LOG_RATIO_MAX) -> Float[Array, "N T"]:
    """k = mu~(y) / mu(y), with the ceiling of `importance`; 0 off the active set (clean evidence)."""
    return jnp.where(evidence.mask, _positive(evidence.logp_old - evidence.logp_mu, log_ratio_max), 0)


@dataclasses.dataclass(frozen=True)
class PolicyTis:
    """w = min(r, C): truncated importance sampling as seed 000 Part 4, S_TIS, has it, beside `Reinforce`. SPEC 8.1.

    r is the ratio of the objective, pi / mu with the behaviour denominator. One-sided: no token is dropped.
    """

    cap: float = 2.0
    log_ratio_max: float = LOG_RATIO_MAX

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    @property
    def name(self) -> str:
        return "tis"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        return jnp.minimum(_positive(log_ratio, self.log_ratio_max), self.cap)


@dataclasses.dataclass(frozen=True)
class MismatchTis:
    """w = clip(k, c_low, C) on the PPO or GSPO term: what "w/ TIS" runs in seed 000's stack. SPEC 8.2.

    C = `cap`, c_low = `cap_low`. No token is dropped.
    """

    cap: float = 2.0
    cap_low: float = 0.0
    log_ratio_max: float = LOG_RATIO_MAX

    def __post_init__(self) -> None:
        _check_cap(self.cap)
        _check_window("cap_low", self.cap_low, "cap", self.cap)

    @property
    def name(self) -> str:
        return "tis"

    @property
    def reads(self) -> frozenset[str]:
        return MISMATCH

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        return jnp.clip(mismatch(evidence, self.log_ratio_max), self.cap_low, self.cap)


@dataclasses.dataclass(frozen=True)
class RawMismatch:
    """w = k, not truncated: decoupled PPO. Seed 000 4.a, SPEC 8.5. k is held at e^`log_ratio_max` alone."""

    log_ratio_max: float = LOG_RATIO_MAX

    @property
    def name(self) -> str:
        return "decoupled"

    @property
    def reads(self) -> frozenset[str]:
        return MISMATCH

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        return mismatch(evidence, self.log_ratio_max)


@dataclasses.dataclass(frozen=True)
class IcePop:
    """w = k where alpha <= k <= beta, else 0 (`zero_one`: 1 in the window). Seed 000 Part 4, S_IcePop; SPEC 8.3.

    Both ends are kept. It does not look at A: a token outside loses its pull back too.
    """

    alpha: float = 0.5
    beta: float = 5.0
    zero_one: bool = False
    log_ratio_max: float = LOG_RATIO_MAX

    def __post_init__(self) -> None:
        _check_window("alpha", self.alpha, "beta", self.beta)

    @property
    def name(self) -> str:
        return "icepop"

    @property
    def reads(self) -> frozenset[str]:
        return MISMATCH

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        k = mismatch(evidence, self.log_ratio_max)
        return jnp.where((self.alpha <= k) & (k <= self.beta), jnp.ones_like(k) if self.zero_one else k, 0)


@dataclasses.dataclass(frozen=True)
class KPop:
    """w = 1[D(p_pi || p_mu) <= phi] 1[D(p_mu || p_pi) <= phi]. Seed 000 Part 4, M^KPop; SPEC 8.4.

    D is the KL divergence of Bernoulli distributions, p_mu = mu(y), and p_pi the trainer's probability of y: mu~(y), or
    with `trainer` "current" pi(y). D = phi is kept.
    """

    phi: float = 2.0
    trainer: str = "recomputed"

    def __post_init__(self) -> None:
        check_radius("phi", self.phi)
        check_choice("trainer", self.trainer, Trainer)

    @property
    def name(self) -> str:
        return "kpop"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"logp_mu", TRAINER[self.trainer]})

    def divergences(self, evidence: Evidence) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
        """D(p_pi || p_mu) and D(p_mu || p_pi), both 0 off the active set (clean evidence)."""
        trainer = getattr(evidence, TRAINER[self.trainer])
        return bernoulli_kl(trainer, evidence.logp_mu), bernoulli_kl(evidence.logp_mu, trainer)

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        forward, backward = self.divergences(evidence)
        return ((forward <= self.phi) & (backward <= self.phi)).astype(log_ratio.dtype)


@dataclasses.dataclass(frozen=True)
class SeqClip:
    """w = 1[alpha <= rho_b <= beta] on every token of response b. Seed 000 Part 4, S_SeqClip; SPEC 7.2.

    rho_b is the length-normalised sequence ratio, on `denominator`; both ends are kept. A response outside is left out
    of the loss and stays in its denominator.
    """

    alpha: float = 0.995
    beta: float = 1.005
    denominator: str = "behaviour"
    log_ratio_max: float = LOG_RATIO_MAX

    def __post_init__(self) -> None:
        _check_window("alpha", self.alpha, "beta", self.beta)
        check_choice("denominator", self.denominator, Denominator)

    @property
    def name(self) -> str:
        return "seqclip"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"logp", BASE[self.denominator]})

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        rho = importance(mean_log_ratio(evidence, self.denominator), self.log_ratio_max)
        return spread(((self.alpha <= rho) & (rho <= self.beta)).astype(rho.dtype), evidence)


def _positive(log_ratio: Float[Array, "N T"], maximum: float) -> Float[Array, "N T"]:
    """exp with the ceiling of `importance`, and above 0 where it underflows: a gate's 0 says that it drops a token."""
    return jnp.maximum(importance(log_ratio, maximum), jnp.finfo(log_ratio.dtype).tiny)


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise InputError(f"cap: {cap!r} is not a number above 0")


def _check_window(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raise InputError unless 0 <= low <= high."""
    if not 0 <= low <= high:
        raise InputError(f"{low_name}: {low!r} is not a number from 0 to {high_name} ({high!r})")

"""Slot 1, the ratio: evidence -> log r. How far the current policy has moved from the one that sampled."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.segments import segment_mean, spread
from jaxrl_sat.types import InputError

# Signatures take these as `str`: a wrong name from a config is refused with an InputError that lists the right ones.
Denominator = Literal["behaviour", "recomputed"]
GradMode = Literal["mean", "token"]
CeilingGradient = Literal["saturate", "hard"]

LOG_RATIO_MAX = 20.0
BASE = {"behaviour": "logp_mu", "recomputed": "logp_old"}


def check_choice(name: str, value: str, kind: object) -> None:
    """Raise InputError unless `value` is one of the literals of `kind`."""
    allowed = get_args(kind)
    if value not in allowed:
        raise InputError(f"{name}: {value!r} is not one of {', '.join(map(repr, allowed))}")


@runtime_checkable
class Ratio(Protocol):
    """Clean evidence -> log r [N, T], 0 off the active set. `reads` names the fields that must be finite."""

    @property
    def reads(self) -> frozenset[str]: ...

    def __call__(self, evidence: Evidence) -> Float[Array, "N T"]: ...


@dataclasses.dataclass(frozen=True)
class TokenRatio:
    """d = log pi(y) - log mu(y): seed 000 (3.1). The denominator is mu as recorded, or as recomputed (mu~)."""

    denominator: str = "behaviour"

    def __post_init__(self) -> None:
        check_choice("denominator", self.denominator, Denominator)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"logp", BASE[self.denominator]})

    def __call__(self, evidence: Evidence) -> Float[Array, "N T"]:
        return evidence.logp - getattr(evidence, BASE[self.denominator])


@dataclasses.dataclass(frozen=True)
class SequenceRatio:
    """log rho = (1/T_b) sum over the response of d, at each of its tokens: seed 000 Part 4, S_GSPO.

    `grad_mode` "mean" differentiates through all tokens of the response; "token" through the token's own d alone,
    log s_t = sg[log rho] + log pi_t - sg[log pi_t]. Both have the same value, and the same gradient whenever A and
    the weights are constant inside a response.
    """

    denominator: str = "behaviour"
    grad_mode: str = "mean"

    def __post_init__(self) -> None:
        check_choice("denominator", self.denominator, Denominator)
        check_choice("grad_mode", self.grad_mode, GradMode)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"logp", BASE[self.denominator]})

    def __call__(self, evidence: Evidence) -> Float[Array, "N T"]:
        log_rho = spread(mean_log_ratio(evidence, self.denominator), evidence)
        if self.grad_mode == "token":
            log_rho = jax.lax.stop_gradient(log_rho) + (evidence.logp - jax.lax.stop_gradient(evidence.logp))
        return jnp.where(evidence.mask, log_rho, 0)


def mean_log_ratio(evidence: Evidence, denominator: str = "behaviour") -> Float[Array, "N S"]:
    """(1/T_b) sum_t d_{b,t} of each response (clean evidence); 0, so rho = 1, where a response has no active token."""
    return segment_mean(TokenRatio(denominator)(evidence), evidence)


def importance(
    log_ratio: Float[Array, "*shape"], maximum: float = LOG_RATIO_MAX, gradient: str = "saturate"
) -> Float[Array, "*shape"]:
    """r = exp(min(log r, maximum)): finite for every finite log r (SPEC 1, overflow rule).

    "saturate": past the ceiling dr/dlog r = r still (straight-through), so that a token far outside keeps the pull
    back. "hard": 0 there. Only the upper side is limited; exp of a large negative number underflows harmlessly.
    """
    passed = log_ratio - jax.lax.stop_gradient(log_ratio) if gradient == "saturate" else 0.0
    return jnp.exp(jnp.where(log_ratio > maximum, maximum + passed, log_ratio))

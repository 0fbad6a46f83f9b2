"""Slot 3 without PPO's clip on every token: linear, policy gradient, one-sided, and soft penalties in its place."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.ratio import LOG_RATIO_MAX, CeilingGradient, check_choice, importance
from jaxrl_sat.objectives.surrogate import Clip, Radius, Surrogate, on_active
from jaxrl_sat.types import InputError

RADIUS_MIN = 1e-6  # a radius that SAT contracts to 0 still divides SPO's penalty, and r^2 / this fits float32


@dataclasses.dataclass(frozen=True)
class Linear:
    """S = r A, dS/dlog r = r A: seed 000 4.d.iii and seed 001 Eq. 3-4, 14, where a gate alone is the trust region.

    Every token is kept; the radii are not looked at. A = 0 gives 0.
    """

    log_ratio_max: float = LOG_RATIO_MAX
    ceiling_gradient: str = "saturate"

    def __post_init__(self) -> None:
        check_choice("ceiling_gradient", self.ceiling_gradient, CeilingGradient)

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"], low: Radius, high: Radius) -> Surrogate:
        r = importance(log_ratio, self.log_ratio_max, self.ceiling_gradient)
        return on_active(evidence, r * evidence.advantages, evidence.mask, r, jnp.ones_like(r))


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """S = A log pi(y), dS/dlog pi = A: the policy gradient that seed 000 Part 4, S_TIS, multiplies by sg[min(r, C)].

    Every token is kept; the radii are not looked at, and r is only reported. The value is not on the scale of r A.
    """

    log_ratio_max: float = LOG_RATIO_MAX

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"], low: Radius, high: Radius) -> Surrogate:
        r = importance(jax.lax.stop_gradient(log_ratio), self.log_ratio_max)
        return on_active(evidence, evidence.advantages * evidence.logp, evidence.mask, r, jnp.ones_like(r))


@dataclasses.dataclass(frozen=True)
class Cispo:
    """S = sg[clip(r, 1 - low, 1 + high)] A log pi(y), dS/dlog pi = clip(r) A: CISPO, seed 001 App. A, SPEC 15.

    The clip truncates the weight and drops no token. low >= 1: no lower bound. The value is not on the scale of r A.
    """

    log_ratio_max: float = LOG_RATIO_MAX

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"], low: Radius, high: Radius) -> Surrogate:
        r = importance(jax.lax.stop_gradient(log_ratio), self.log_ratio_max)
        weight = jnp.clip(r, 1 - low, 1 + high)
        return on_active(evidence, weight * evidence.advantages * evidence.logp, evidence.mask, r, weight)


@dataclasses.dataclass(frozen=True)
class Up(Clip):
    """A > 0: S = (pi / sg[pi]) A, whose gradient is A whatever r; else `Clip`. Seed 000 4.d.iv, SPEC 15.

    A positive token is never dropped and has value A; a negative one has PPO's lower cut-off and its pull back.
    """

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"], low: Radius, high: Radius) -> Surrogate:
        clipped = super().__call__(evidence, log_ratio, low, high)
        free = evidence.advantages > 0
        on_policy = jnp.exp(evidence.logp - jax.lax.stop_gradient(evidence.logp))
        value = jnp.where(free, on_policy * evidence.advantages, clipped.value)
        return on_active(evidence, value, free | clipped.keep, clipped.ratio, clipped.weight)


@dataclasses.dataclass(frozen=True)
class Spo:
    """S = r A - |A| / (2 eps) (r - 1)^2, dS/dlog r = r A (1 - sign(A) (r - 1) / eps): seed 000 4.d.v S_SPO, SPEC 15.

    eps is the radius on the side to which A pushes (high where A > 0, low where A < 0), so that r* = 1 + sign(A) eps is
    the maximum; equal radii are the paper's. Radii under 1e-6 count as 1e-6. No token is dropped; A = 0 gives 0.
    """

    log_ratio_max: float = LOG_RATIO_MAX
    ceiling_gradient: str = "saturate"

    def __post_init__(self) -> None:
        check_choice("ceiling_gradient", self.ceiling_gradient, CeilingGradient)

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"], low: Radius, high: Radius) -> Surrogate:
        radius = jnp.maximum(jnp.where(evidence.advantages > 0, high, low), RADIUS_MIN)
        r = importance(log_ratio, self.log_ratio_max, self.ceiling_gradient)
        return _penalised(evidence, log_ratio, r, 1 / radius)


@dataclasses.dataclass(frozen=True)
class Drpo:
    """S = r A - |A| / (2 delta) mu(y) (r - 1)^2: seed 000 4.d.v S_DRPO, SPEC 15.

    dS/dlog r = r A w with w = 1 - sign(A (r - 1)) |pi(y) - mu(y)| / delta, in [1 - 1/delta, 1 + 1/delta]; the optimum
    is pi* = mu + sign(A) delta. mu is the denominator of r, pi / r. No token is dropped; the radii are not looked at.
    """

    delta: float = 0.15
    log_ratio_max: float = LOG_RATIO_MAX
    ceiling_gradient: str = "saturate"

    def __post_init__(self) -> None:
        check_choice("ceiling_gradient", self.ceiling_gradient, CeilingGradient)
        if not (math.isfinite(self.delta) and self.delta > 0):
            raise InputError(f"delta: {self.delta!r} is not a number above 0")

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"], low: Radius, high: Radius) -> Surrogate:
        mu = jnp.exp(jax.lax.stop_gradient(evidence.logp - log_ratio))
        r = importance(log_ratio, self.log_ratio_max, self.ceiling_gradient)
        return _penalised(evidence, log_ratio, r, mu / self.delta)


def _penalised(
    evidence: Evidence, log_ratio: Float[Array, "N T"], r: Float[Array, "N T"], curvature: Float[Array, "N T"]
) -> Surrogate:
    """S = r A - |A| c / 2 (r - 1)^2, weight 1 - sign(A) c (r - 1), for a curvature c >= 0 without gradient."""
    a = evidence.advantages
    near = jnp.abs(log_ratio) < 0.5
    excess = jnp.where(near, jnp.expm1(jnp.where(near, log_ratio, 0)), r - 1)  # r - 1 cancels in float32
    value = r * a - jnp.abs(a) * curvature / 2 * excess * excess
    return on_active(evidence, value, evidence.mask, r, 1 - jnp.sign(a) * curvature * excess)

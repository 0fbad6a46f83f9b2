"""Slot 2, the radii: evidence, log r -> (low, high), how far a token's ratio may move before it is clipped."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.kernel import hill
from jaxrl_sat.objectives.quantile import Level, lower_quantile, parse_level
from jaxrl_sat.types import InputError


@no_type_check
@struct.dataclass
class TrustRegion:
    """Per-token clip radii and where they come from: low = base_low * c_minus, high = base_high * c_plus.

    `gate` marks the tokens that contract; `q` is the reference scale, one number or one a token. All detached.
    Without contraction the factors are 1, the gate is off everywhere and q is 0.
    """

    low: Float[Array, "N T"]
    high: Float[Array, "N T"]
    base_low: Float[Array, ""]
    base_high: Float[Array, ""]
    c_minus: Float[Array, "N T"]
    c_plus: Float[Array, "N T"]
    gate: Bool[Array, "N T"]
    q: Float[Array, ""] | Float[Array, "N T"]


@runtime_checkable
class Radii(Protocol):
    """Clean evidence and log r [N, T] -> TrustRegion."""

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> TrustRegion: ...


@dataclasses.dataclass(frozen=True)
class ConstantRadii:
    """The fixed interval [1 - eps_low, 1 + eps_high] of PPO: seed 000 S^PPO, 3.2."""

    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self) -> None:
        check_radius("eps_low", self.eps_low)
        check_radius("eps_high", self.eps_high)

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> TrustRegion:
        none = jnp.zeros(log_ratio.shape, bool)
        return _region(self.eps_low, self.eps_high, evidence, log_ratio, none, jnp.zeros((), log_ratio.dtype), 1.0)


@dataclasses.dataclass(frozen=True)
class SatRadii:
    """The staleness-adaptive interval: seed 000 (3.2)-(3.5), (3.4) as reconstructed in SPEC 6.3.

        q = lower quantile of |d| over the active tokens                     (3.3)
        g = q > 0 and |d| > q                                               (strict)
        c_plus  = psi(max( d, 0); q) if g else 1,   eps~_high = eps_high c_plus
        c_minus = psi(max(-d, 0); q) if g else 1,   eps~_low  = eps_low  c_minus

    d is the log-ratio handed in: a token's for GRPO, the response's at each active token for GSPO (so that a long
    response weighs more). q = 0, no active token, and `enabled` False: no contraction; then the result is bit for
    bit that of `ConstantRadii`. `q_floor` lifts q against gating on rounding noise (0: the paper's rule).
    `reference` is a q from outside, a number or one a token [N, T], in place of (3.3): a global batch, or turns.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    quantile: Level = "0.90"
    exponent: float = 2.0
    q_floor: float = 0.0
    enabled: bool = True
    reference: float | Array | None = None

    def __post_init__(self) -> None:
        check_radius("eps_low", self.eps_low)
        check_radius("eps_high", self.eps_high)
        parse_level(self.quantile)
        if not (math.isfinite(self.exponent) and self.exponent > 0):
            raise InputError(f"exponent: {self.exponent!r} is not a number above 0")
        check_radius("q_floor", self.q_floor)

    def scale(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, ""] | Float[Array, "N T"]:
        """q of (3.3), or the one given from outside, not below `q_floor`."""
        if self.reference is None:
            q = lower_quantile(jnp.abs(log_ratio), evidence.mask, self.quantile)
        else:
            q = jnp.asarray(self.reference, log_ratio.dtype)
        return jax.lax.stop_gradient(jnp.maximum(q, self.q_floor))

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> TrustRegion:
        q = self.scale(evidence, log_ratio)
        gate = evidence.mask & (q > 0) & (jnp.abs(log_ratio) > q) & self.enabled
        return _region(self.eps_low, self.eps_high, evidence, log_ratio, gate, q, self.exponent)


def _region(
    eps_low: float,
    eps_high: float,
    evidence: Evidence,
    log_ratio: Float[Array, "N T"],
    gate: Bool[Array, "N T"],
    q: Float[Array, ""] | Float[Array, "N T"],
    exponent: float,
) -> TrustRegion:
    """Contract the gated tokens on the side that the sign of d selects. Radii are 0 off the active set."""
    d = jax.lax.stop_gradient(log_ratio)
    safe_q = jnp.where(q > 0, q, 1)
    c_plus = jnp.where(gate, hill(jnp.maximum(d, 0), safe_q, exponent), 1)
    c_minus = jnp.where(gate, hill(jnp.maximum(-d, 0), safe_q, exponent), 1)
    base_low, base_high = jnp.asarray(eps_low, d.dtype), jnp.asarray(eps_high, d.dtype)
    return TrustRegion(
        low=jnp.where(evidence.mask, base_low * c_minus, 0),
        high=jnp.where(evidence.mask, base_high * c_plus, 0),
        base_low=base_low,
        base_high=base_high,
        c_minus=c_minus,
        c_plus=c_plus,
        gate=gate,
        q=q,
    )


def check_radius(name: str, value: float) -> None:
    """Raise InputError unless `value` is finite and not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name}: {value!r} is not a number of at least 0")

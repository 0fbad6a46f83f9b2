"""Slot 2, the radii: evidence, log r -> (low, high), how far a token's ratio may move before it is clipped."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.kernel import hill
from jaxrl_sat.objectives.quantile import Level, lower_quantile, parse_level, turn_quantiles
from jaxrl_sat.objectives.ratio import check_choice
from jaxrl_sat.types import InputError

Scope = Literal["microbatch", "update"]


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
    """Clean evidence and detached log r [N, T] -> TrustRegion.

    `scope` "update": `reference` is to be measured over a whole update before its gradient (see `UpdateScale`).
    """

    @property
    def scope(self) -> str: ...

    def reference(
        self,
        log_ratio: Float[Array, "*shape"],
        active: Bool[Array, "*shape"],
        turn_ids: Int[Array, "*shape"],
        num_turns: int,
    ) -> Float[Array, ""] | Float[Array, " num_turns"]: ...

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> TrustRegion: ...


@dataclasses.dataclass(frozen=True)
class ConstantRadii:
    """The fixed interval [1 - eps_low, 1 + eps_high] of PPO: seed 000 S^PPO, 3.2."""

    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self) -> None:
        check_radius("eps_low", self.eps_low)
        check_radius("eps_high", self.eps_high)

    @property
    def scope(self) -> str:
        return "microbatch"

    def reference(
        self,
        log_ratio: Float[Array, "*shape"],
        active: Bool[Array, "*shape"],
        turn_ids: Int[Array, "*shape"],
        num_turns: int,
    ) -> Float[Array, ""]:
        """0: a constant interval looks at nothing."""
        return jnp.zeros((), log_ratio.dtype)

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

    `scope` "microbatch" takes the quantile over the arrays of the call, as the paper does; "update" over the whole
    update, whose values and q then stand in `evidence.update_scale` (without it the call is the whole update).
    `by_turn` takes one q a turn (SPEC 6.7), the pooled one where a turn has fewer than `min_turn_tokens` active tokens.
    `q` replaces (3.3) by a given number.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    quantile: Level = "0.90"
    exponent: float = 2.0
    q_floor: float = 0.0
    scope: str = "microbatch"
    by_turn: bool = False
    min_turn_tokens: int = 1
    enabled: bool = True
    q: float | None = None

    def __post_init__(self) -> None:
        check_radius("eps_low", self.eps_low)
        check_radius("eps_high", self.eps_high)
        parse_level(self.quantile)
        if not (math.isfinite(self.exponent) and self.exponent > 0):
            raise InputError(f"exponent: {self.exponent!r} is not a number above 0")
        check_radius("q_floor", self.q_floor)
        check_choice("scope", self.scope, Scope)
        if self.q is not None:
            check_radius("q", self.q)

    def reference(
        self,
        log_ratio: Float[Array, "*shape"],
        active: Bool[Array, "*shape"],
        turn_ids: Int[Array, "*shape"],
        num_turns: int,
    ) -> Float[Array, ""] | Float[Array, " num_turns"]:
        """q of (3.3) over these arrays, or the number given, not below `q_floor`; with `by_turn` one a turn."""
        sizes = jnp.abs(jax.lax.stop_gradient(log_ratio))
        if self.q is not None:
            q = jnp.asarray(self.q, sizes.dtype)
        elif self.by_turn:
            q = turn_quantiles(sizes, active, turn_ids, num_turns, self.quantile, self.min_turn_tokens)
        else:
            q = lower_quantile(sizes, active, self.quantile)
        return jnp.maximum(q, self.q_floor)

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> TrustRegion:
        if self.scope == "update" and evidence.update_scale is not None:
            d, q = evidence.update_scale.log_ratio, evidence.update_scale.q
        else:
            d, q = log_ratio, self.reference(log_ratio, evidence.mask, evidence.turn_ids, evidence.num_turns)
        if q.ndim:
            q = jnp.where(evidence.mask, q[jnp.clip(evidence.turn_ids, 0, evidence.num_turns - 1)], 0)
        d = jnp.where(evidence.mask, jax.lax.stop_gradient(d), 0)
        gate = evidence.mask & (q > 0) & (jnp.abs(d) > q) & self.enabled
        return _region(self.eps_low, self.eps_high, evidence, d, gate, q, self.exponent)


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

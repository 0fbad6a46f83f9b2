"""Slot 3, the surrogate: log r, A, radii -> S, the per-token quantity to maximise."""

from __future__ import annotations

import dataclasses
from typing import Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.ratio import LOG_RATIO_MAX, CeilingGradient, check_choice, importance
from jaxrl_sat.types import InputError

Radius = Float[Array, ""] | Float[Array, "N T"]


@no_type_check
@struct.dataclass
class Surrogate:
    """S, where gradient flows, the ratio used, and the factor w of a soft variant. 0 (False) off the active set.

    `weight` is what multiplies the plain gradient r A (SPO, DRPO) or A (CISPO), detached; 1 where S has no such factor.
    """

    value: Float[Array, "N T"]
    keep: Bool[Array, "N T"]
    ratio: Float[Array, "N T"]
    weight: Float[Array, "N T"]


@runtime_checkable
class SurrogateSlot(Protocol):
    """Clean evidence, log r [N, T] and radii (a number or [N, T] each) -> Surrogate."""

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"], low: Radius, high: Radius) -> Surrogate: ...


@dataclasses.dataclass(frozen=True)
class Clip:
    """S = min(r A, clip(r, 1 - low, 1 + high) A): seed 000 S^PPO (3.2) and (3.5)-(3.6), seed 001 Eq. 2-3.

    Written by cases, S = clip(r) A where dropped and r A elsewhere, with

        drop = (A > 0 and r > 1 + high) or (A < 0 and r < 1 - low)

    so a token exactly at an endpoint is kept (`minimum` would halve its gradient), a converging token keeps its pull
    back however far out it is, and A = 0 is never dropped. dS/dlog r = r A where kept, 0 where dropped.
    `dual_clip` c (off by default; it also drops converging tokens) bounds S below by c A where A < 0.
    """

    log_ratio_max: float = LOG_RATIO_MAX
    ceiling_gradient: str = "saturate"
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_choice("ceiling_gradient", self.ceiling_gradient, CeilingGradient)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise InputError(f"dual_clip: {self.dual_clip!r} is not a number above 1")

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"], low: Radius, high: Radius) -> Surrogate:
        r = importance(log_ratio, self.log_ratio_max, self.ceiling_gradient)
        a = evidence.advantages
        lower, upper = 1 - low, 1 + high
        drop = ((a > 0) & (r > upper)) | ((a < 0) & (r < lower))
        bound = jnp.clip(r, lower, upper)
        if self.dual_clip is not None:
            beyond = (a < 0) & (r > self.dual_clip)
            drop, bound = drop | beyond, jnp.where(beyond, self.dual_clip, bound)
        value = jnp.where(drop, jax.lax.stop_gradient(bound) * a, r * a)
        return on_active(evidence, value, ~drop, r, jnp.ones_like(r))


def on_active(
    evidence: Evidence,
    value: Float[Array, "N T"],
    keep: Bool[Array, "N T"],
    ratio: Float[Array, "N T"],
    weight: Float[Array, "N T"],
) -> Surrogate:
    """A surrogate on the active set, its ratio and weight detached."""
    constant = jax.lax.stop_gradient
    return Surrogate(
        value=jnp.where(evidence.mask, value, 0),
        keep=evidence.mask & keep,
        ratio=jnp.where(evidence.mask, constant(ratio), 0),
        weight=jnp.where(evidence.mask, constant(weight), 0),
    )

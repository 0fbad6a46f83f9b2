"""Slot 3 without a clip on every token: linear, policy gradient, and the soft penalties that take the clip's place."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.ratio import LOG_RATIO_MAX, CeilingGradient, check_choice, importance
from jaxrl_sat.objectives.surrogate import Radius, Surrogate, on_active


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

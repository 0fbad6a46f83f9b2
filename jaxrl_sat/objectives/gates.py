"""Slot 4, the gates: evidence, log r -> weight >= 0. They multiply, are detached, and never change a denominator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_sat.objectives.evidence import Evidence


@runtime_checkable
class Gate(Protocol):
    """Clean evidence and log r [N, T] -> weight [N, T]. `reads` names further fields that must be finite."""

    @property
    def reads(self) -> frozenset[str]: ...

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]: ...


def gate_weight(gates: Sequence[Gate], evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
    """The product of all gates, detached; 1 where there is none."""
    weight = jnp.ones_like(log_ratio)
    for gate in gates:
        weight = weight * gate(evidence, log_ratio)
    return jax.lax.stop_gradient(weight)

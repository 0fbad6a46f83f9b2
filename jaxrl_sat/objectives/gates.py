"""Slot 4, the gates: evidence, log r -> weight >= 0. They multiply, are detached, and never change a denominator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_sat.objectives.evidence import Evidence


@runtime_checkable
class Gate(Protocol):
    """Clean evidence and detached log r [N, T] -> weight [N, T] (only its values on the active set matter).

    `reads` names further evidence fields: per-token ones must be finite for a token to be active; "topk_ids" asks the
    learner for the top-K records. `name` labels the gate's metrics.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> frozenset[str]: ...

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]: ...


def gate_weights(
    gates: Sequence[Gate], evidence: Evidence, log_ratio: Float[Array, "N T"]
) -> dict[str, Float[Array, "N T"]]:
    """Each gate's weight by name (a name met again gets its place beside it), detached, 0 off the active set."""
    constant = jax.lax.stop_gradient
    weights: dict[str, Float[Array, "N T"]] = {}
    for place, gate in enumerate(gates):
        name = f"{gate.name}_{place}" if gate.name in weights else gate.name
        weights[name] = jnp.where(evidence.mask, constant(gate(evidence, constant(log_ratio))), 0)
    return weights


def product(weights: dict[str, Float[Array, "N T"]], active: Bool[Array, "N T"], dtype) -> Float[Array, "N T"]:
    """The product of all gates; 1 on the active set where there is none."""
    total = active.astype(dtype)
    for weight in weights.values():
        total = total * weight
    return total

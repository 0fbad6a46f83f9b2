"""Dropless expert computation by sorted dispatch and grouped matmuls."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.ops import einsum


def experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
    """y[n] = sum_j weights[n, j] * down_e(silu(gate_e(x[n])) * up_e(x[n])), e = expert_ids[n, j]."""
    hidden = jax.nn.silu(einsum("nd,edf->nef", x, gate)) * einsum("nd,edf->nef", x, up)
    chosen = jax.nn.one_hot(expert_ids, gate.shape[0], dtype=x.dtype)
    return einsum("nef,efd,nke,nk->nd", hidden, down, chosen, weights)

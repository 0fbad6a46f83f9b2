"""Experts whose weights lie output first, for decoding on a CPU: dispatch for many tokens, everything for a few."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_sat.model import blocks, dispatch
from jaxrl_sat.model.ops import einsum
from jaxrl_sat.model.output_first import OutputFirst

FEW_TOKENS = 32
"""Tokens up to which all experts are computed for each, where they choose about as many rows as there are experts."""


def experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: OutputFirst,
    up: OutputFirst,
    down: OutputFirst,
) -> Float[Array, "N D"]:
    """`dispatch.experts` of such weights, without a gradient."""
    operands = (x, expert_ids, weights, gate.value, up.value, down.value)
    few = len(x) <= FEW_TOKENS and expert_ids.size >= gate.value.shape[0]
    return _all_of_them(*operands) if few else _dispatched(*operands)


def _all_of_them(x: Array, expert_ids: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
    """Every expert on every token, those not chosen with weight 0: weights are read once, and nothing is sorted."""
    number, width, inputs = gate.shape
    chosen = expert_ids[..., None] == jnp.arange(number)
    by_expert = jnp.sum(jnp.where(chosen, weights[..., None], 0), axis=1, dtype=jnp.float32).T
    # side by side, the experts are one wide block
    gated, lifted = (
        _rounded(einsum("od,nd->on", w.reshape(number * width, inputs), x, out=jnp.float32), x) for w in (gate, up)
    )
    inner = _rounded((jax.nn.silu(gated) * lifted).reshape(number, width, -1) * by_expert[:, None], x)
    out = _rounded(einsum("edf,efn->edn", down, inner.astype(x.dtype), out=jnp.float32), x)
    return jnp.sum(out, axis=0).T.astype(x.dtype)


def _rounded(wide: Array, like: Array) -> Array:
    """float32 no more precise than the dtype of `like`. A cast there and back would be left out inside a fused loop."""
    number = jnp.finfo(like.dtype)
    return wide if number.bits >= 32 else jax.lax.reduce_precision(wide, number.nexp, number.nmant)


def _dispatched(x: Array, expert_ids: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
    order, inverse, sizes = dispatch.by_expert(expert_ids, gate.shape[0])
    chosen = expert_ids.shape[1]
    row_weights = dispatch.permute(weights.reshape(-1), order)
    operands = (x, order // chosen, row_weights, sizes, gate, up, down)
    rows = blocks.forward(*operands, output_first=True)[0]
    return dispatch.collect(rows, order, inverse, chosen)

"""The input embedding of a device's tokens, from its piece of the words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_sat.layout import Layout


def embed(
    table: Float[Array, "V width"], tokens: Int[Array, "B T"], spec: PartitionSpec, layout: Layout
) -> Float[Array, "B T D"]:
    """Rows of the table, whose piece this device has, as `spec` says. A token outside the vocabulary gives zeros."""
    table = layout.gather(table, spec[1], 1)
    return layout.total(_lookup(table, tokens - layout.index(spec[0]) * table.shape[0]), spec[0])


@jax.custom_vjp
def _lookup(table: Array, rows: Array) -> Array:
    inside = (rows >= 0) & (rows < table.shape[0])
    return jnp.where(inside[..., None], table.at[rows].get(mode="clip"), 0)


def _forward(table: Array, rows: Array) -> tuple[Array, tuple[Array, Array]]:
    # Of the table only shape and dtype are needed: an empty slice has both.
    return _lookup(table, rows), (rows, jnp.zeros((table.shape[0], 0), table.dtype))


def _backward(kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    rows, like = kept
    # In float32: a frequent word adds up thousands of small terms, which bfloat16 would lose.
    total = jnp.zeros((like.shape[0], cotangent.shape[-1]), jnp.float32)
    rows = jnp.where(rows < 0, like.shape[0], rows)
    return total.at[rows].add(cotangent.astype(jnp.float32), mode="drop").astype(like.dtype), None


_lookup.defvjp(_forward, _backward)

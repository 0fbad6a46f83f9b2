"""The small operations every block uses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float


def precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 products stay float32 on every backend (TPU and GPU would otherwise shorten them)."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def einsum(spec: str, *operands: Array, out: Any = None) -> Array:
    """`jnp.einsum` in the precision of its first operand; `out` is the dtype of the result and accumulation."""
    return jnp.einsum(spec, *operands, precision=precision(operands[0].dtype), preferred_element_type=out)


# What the backward pass of a layer may keep. Routing it always keeps: computed again, a near tie could fall otherwise.
ROUTING, PRODUCT, INPUT = "routing", "product", "input"


def saved(x: Array, kind: str = PRODUCT) -> Array:
    """Marks what is worth keeping for the backward pass; what is not marked is cheap to compute again."""
    return checkpoint_name(x, kind)


def rms_norm(x: Float[Array, "*b D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*b D"]:
    """x / rms(x) * scale over the last axis, the quotient in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    # The product in float32 has the same bits, but the gradient of the scale is then a sum over tokens in float32.
    return (normed.astype(x.dtype).astype(jnp.float32) * scale.astype(jnp.float32)).astype(x.dtype)

"""The small operations every block uses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def einsum(spec: str, *operands: Array, out: Any = None) -> Array:
    """`jnp.einsum` that keeps float32 products in float32 on every backend; `out` is the dtype accumulated in."""
    precision = jax.lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=out)


def rms_norm(x: Float[Array, "*b D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*b D"]:
    """x / rms(x) * scale over the last axis, the quotient in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale

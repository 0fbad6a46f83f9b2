"""The Hill kernel that turns mismatch into a contraction factor: seed 000 (3.2)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def hill(
    u: Float[Array, "*shape"], q: Float[Array, ""] | Float[Array, "*shape"], exponent: float = 2.0
) -> Float[Array, "*shape"]:
    """psi_p(u; q) = 1 / (1 + (u/q)^p), in (0, 1]: seed 000 (3.2), where p = 2.

    `u` >= 0 is a mismatch, `q` > 0 the reference scale, p > 0. psi(0) = 1, psi(q) = 1/2. Where (u/q)^p overflows
    psi is 0. q = 0 is not in the domain: the caller decides what no reference means (SAT: no contraction).
    """
    return 1 / (1 + jnp.power(u / q, exponent))

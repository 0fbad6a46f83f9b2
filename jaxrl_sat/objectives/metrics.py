"""Metrics that add: what a microbatch contributes, how two contributions combine, and the numbers at the end.

`combine` with a Metrics of zeros changes nothing (maxima are of non-negative quantities), so an accumulator may start
from zeros.
"""

from __future__ import annotations

from typing import no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

Scalar = Float[Array, ""]


@no_type_check
@struct.dataclass
class Metrics:
    """`means` {name: (sum, count)}, `covariances` {name: (sum x, sum y, sum x y, count)}, `maxima` {name: max >= 0}."""

    means: dict[str, tuple[Scalar, Scalar]] = struct.field(default_factory=dict)
    covariances: dict[str, tuple[Scalar, Scalar, Scalar, Scalar]] = struct.field(default_factory=dict)
    maxima: dict[str, Scalar] = struct.field(default_factory=dict)


def mean_over(values: Float[Array, "N T"] | Bool[Array, "N T"], active: Bool[Array, "N T"], dtype) -> tuple:
    """(sum, count) of a per-token quantity over the active tokens."""
    return jnp.sum(jnp.where(active, values, 0), dtype=dtype), jnp.sum(active).astype(dtype)


def covariance_over(x: Float[Array, "N T"], y: Float[Array, "N T"], active: Bool[Array, "N T"]) -> tuple:
    """(sum x, sum y, sum x y, count) over the active tokens."""
    x, y = jnp.where(active, x, 0), jnp.where(active, y, 0)
    return jnp.sum(x), jnp.sum(y), jnp.sum(x * y), jnp.sum(active).astype(x.dtype)


def combine(a: Metrics, b: Metrics) -> Metrics:
    """Both contributions as one: sums and counts add, maxima are maximised, a name that only one has is kept."""

    def merge(x: dict, y: dict, both) -> dict:
        shared = {name: both(x[name], y[name]) for name in x if name in y}
        return {**x, **y, **shared}

    def add(x: tuple, y: tuple) -> tuple:
        return tuple(p + q for p, q in zip(x, y, strict=True))

    return Metrics(
        means=merge(a.means, b.means, add),
        covariances=merge(a.covariances, b.covariances, add),
        maxima=merge(a.maxima, b.maxima, jnp.maximum),
    )


def finalise(metrics: Metrics) -> dict[str, Scalar]:
    """{name: scalar}: means, population covariances and maxima; 0 where nothing was counted."""
    out = {name: total / jnp.maximum(count, 1) for name, (total, count) in metrics.means.items()}
    for name, (x, y, xy, count) in metrics.covariances.items():
        n = jnp.maximum(count, 1)
        out[name] = xy / n - (x / n) * (y / n)
    return {**out, **metrics.maxima}

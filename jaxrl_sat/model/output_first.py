"""Weights of decoding as a CPU reads them once: output first, [..., out, in] where the model has [..., in, out].

A decode step multiplies a few rows with every weight, and takes as long as it takes to read them. XLA's products on a
CPU lay out the right operand anew before they multiply; a weight that is the left one, a row of it for each output, is
read as it lies. For 16 rows that halves the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxrl_sat.model.ops import einsum
from jaxrl_sat.types import AnyArray

FEW_ROWS = 64
"""Rows up to which a product is taken with the weight on the left."""


@struct.dataclass
class OutputFirst:
    """A weight, or what is to be said of each of its axes, with those that a product keeps before those it sums."""

    value: AnyArray
    kept: int = struct.field(pytree_node=False)  # how many axes the product keeps


def reordered(weight: Any, kept: Sequence[int]) -> OutputFirst:
    """A weight, its spec or the names of its axes with the axes `kept` first."""
    axes = range(len(weight) if isinstance(weight, tuple | PartitionSpec) else weight.ndim)
    order = [*kept, *(axis for axis in axes if axis not in kept)]
    if isinstance(weight, PartitionSpec):
        return OutputFirst(PartitionSpec(*(weight[axis] for axis in order)), len(kept))
    if isinstance(weight, tuple):
        return OutputFirst(tuple(weight[axis] for axis in order), len(kept))
    return OutputFirst(jnp.transpose(weight, order), len(kept))


def product(x: Float[Array, "*rows_and_summed"], weight: OutputFirst) -> Float[Array, "*rows_and_kept"]:
    """Summed over the last axes of x, as many as the weight has beside those that it keeps; in the dtype of x."""
    kept, summed = weight.value.shape[: weight.kept], weight.value.shape[weight.kept :]
    rows = x.shape[: x.ndim - len(summed)]
    flat = weight.value.reshape(math.prod(kept), math.prod(summed))
    return times_transposed(x.reshape(math.prod(rows), -1), flat).reshape(*rows, *kept)


def times_transposed(x: Float[Array, "N d"], weight: Float[Array, "o d"], out: Any = None) -> Float[Array, "N o"]:
    """x @ weight.T, with the weight on the left where rows are few. `out` is the dtype of the result."""
    if x.shape[0] > FEW_ROWS:
        return einsum("nd,od->no", x, weight, out=out)
    # Behind a barrier, or XLA takes the product whose result needs no transposing, with the weight on the right.
    return jax.lax.optimization_barrier(einsum("od,nd->on", weight, x, out=out)).T

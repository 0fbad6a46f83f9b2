"""Products with weights in 8-bit floating point (FP8), on qwix's quantised arrays.

A product takes e4m3 values of both sides, a row of activations scaled by its largest, a weight by the largest of each
output channel. No scale lies along what is summed over, so the sum itself is one FP8 product with float32 accumulation,
and scales multiply its result. What is not a product of a decoder layer's weights stays as it is: embedding, norms,
router, attention scores, head (the choice of verl, with which the papers ran FP8; its scales are of blocks of 128).

    FP8 rollout     weights are quantised once, when the sampler gets them (`quantise_layer`), activations as they come
    FP8 end to end  also in training, both quantised as they come (`numerics` "fp8"), and in the backward pass the
                    cotangents, as e5m2; a row whose sum tensor parallelism cuts is scaled by its piece's largest
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from jax.sharding import PartitionSpec
from jaxtyping import Array
from qwix import QArray

from jaxrl_sat.model import output_first
from jaxrl_sat.model.ops import einsum
from jaxrl_sat.model.output_first import OutputFirst
from jaxrl_sat.types import Numerics, Params

Weight = Array | QArray
"""A weight as it is or, at the sampler, quantised before."""

FORWARD = jnp.float8_e4m3fn
COTANGENT = jnp.float8_e5m2
"""Cotangents differ more in size than in anything else: two exponent bits more are worth a bit of the fraction."""

_KEPT = {"q": (1, 2), "k": (1, 2), "v": (1, 2), "o": (2,)}
"""Axes of attention's weights that the product keeps."""


def quantise(x: Array, kept: Sequence[int], dtype: Any = FORWARD) -> QArray:
    """`x` as values of `dtype` times a float32 scale, which its largest gives for each place along the axes `kept`."""
    return qwix.quantize(x.astype(jnp.float32), dtype, channelwise_axes=kept)


def of_products(layer: Params, function: Callable[[Any, tuple[int, ...]], Any]) -> Params:
    """A decoder layer's tree with function(leaf, axes that the product keeps) for the weight of each product."""
    attention, mlp = layer["attention"], layer["mlp"]
    kept = (0, 2) if "router" in mlp else (1,)
    return {
        **layer,
        "attention": {**attention, **{name: function(attention[name], axes) for name, axes in _KEPT.items()}},
        "mlp": {**mlp, **{name: function(mlp[name], kept) for name in ("gate", "up", "down")}},
    }


def quantise_layer(layer: Params) -> Params:
    """The parameters of one (unstacked) layer with the weights of its products quantised."""
    return of_products(layer, quantise)


def quantised_like(names: Any, kept: tuple[int, ...]) -> QArray:
    """What says something of each axis of a weight (a spec, logical axes) for a quantised one: its scale has `kept`."""
    masked = [name if axis in kept else None for axis, name in enumerate(names)]
    scale = PartitionSpec(*masked) if isinstance(names, PartitionSpec) else tuple(masked)
    return QArray(names, scale, None, FORWARD)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ einsum


def project(spec: str, x: Array, weight: Weight | OutputFirst, numerics: Numerics = "none") -> Array:
    """`einsum(spec, x, weight)` in the numbers that `weight` is quantised to, else in those of `numerics`.

    `weight` has the dtype of `x`, as has the result. A quantised weight takes no gradient. Of a weight that lies output
    first, `spec` says what it was before.
    """
    if isinstance(weight, OutputFirst):
        return output_first.product(x, weight)
    if isinstance(weight, QArray):
        (kept, _), _ = _kept(spec)
        return qwix.einsum(spec, quantise(x, kept), weight).astype(x.dtype)
    return einsum(spec, x, weight) if numerics == "none" else _product(spec, x, weight)


def _kept(spec: str) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[str, str, str]]:
    """Axes of either operand that the result of an einsum has, and the subscripts of operands and result."""
    operands, out = spec.split("->")
    left, right = operands.split(",")
    axes = [tuple(axis for axis, letter in enumerate(subscripts) if letter in out) for subscripts in (left, right)]
    return (axes[0], axes[1]), (left, right, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, x: Array, weight: Array) -> Array:
    return _forward(spec, x, weight)[0]


def _forward(spec: str, x: Array, weight: Array) -> tuple[Array, tuple[QArray, QArray]]:
    kept = _kept(spec)[0]
    values = quantise(x, kept[0]), quantise(weight, kept[1])
    return qwix.einsum(spec, *values).astype(x.dtype), values


def _backward(spec: str, values: tuple[QArray, QArray], cotangent: Array) -> tuple[Array, Array]:
    """Either operand's gradient from the other's values; the cotangent takes their scale before it is quantised."""
    left, right, out = _kept(spec)[1]

    def gradient(own: str, other: str, values: QArray) -> Array:
        scale = dict(zip(other, values.scale.shape, strict=True))
        scaled = cotangent.astype(jnp.float32) * values.scale.reshape([scale.get(letter, 1) for letter in out])
        kept = [axis for axis, letter in enumerate(out) if letter in own]
        product = qwix.einsum(f"{out},{other}->{own}", quantise(scaled, kept, COTANGENT), values.qvalue)
        return product.astype(cotangent.dtype)

    return gradient(left, right, values[1]), gradient(right, left, values[0])


_product.defvjp(_forward, _backward)

"""FP8 products and their gradients against NumPy with ml_dtypes' 8-bit floats."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from qwix import QArray

from jaxrl_sat.model import quantised
from jaxrl_sat.model.quantised import project, quantise, quantise_layer

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

# The einsum, its shapes, and the axes it sums over in either operand.
PRODUCTS = {
    "btd,dhk->bthk": ((2, 3, 16), (16, 4, 8), (2,), (0,)),
    "bthk,hkd->btd": ((2, 3, 4, 8), (4, 8, 16), (2, 3), (0, 1)),
    "btf,fd->btd": ((2, 3, 24), (24, 16), (2,), (0,)),
}


def rounded(x: np.ndarray, summed: tuple[int, ...], dtype=E4M3) -> tuple[np.ndarray, np.ndarray]:
    """8-bit values in float64, and the scale that the largest along the axes `summed` gives."""
    scale = np.max(np.abs(x), axis=summed, keepdims=True) / np.float32(ml_dtypes.finfo(dtype).max)
    return (x / scale).astype(dtype).astype(np.float64), scale.astype(np.float64)


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 1, shape)).astype(np.float32) for shape in shapes]


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(spec: str, x: jax.Array, weight: jax.Array, cotangent: jax.Array):
    value, pull = jax.vjp(lambda x, weight: project(spec, x, weight, "fp8"), x, weight)
    return value, *pull(cotangent)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_are_the_nearest_of_eight_bits(dtype) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    ties = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, -np.float32(np.inf))])
    x = np.stack([x, x / 4])  # a scale of 1 and one of a quarter, so that ties stay ties
    values = jax.jit(lambda x: quantise(x, (0,), jnp.dtype(dtype)))(x)
    wanted, scale = rounded(x, (1,), dtype)
    np.testing.assert_array_equal(np.asarray(values.qvalue, np.float64), wanted)
    np.testing.assert_array_equal(np.asarray(values.scale), scale)


@pytest.mark.parametrize("spec", PRODUCTS)
def test_product_and_gradients(spec: str) -> None:
    x_shape, w_shape, x_summed, w_summed = PRODUCTS[spec]
    left, right, out = spec.replace("->", ",").split(",")
    x, weight = drawn(x_shape, w_shape)
    (x_values, x_scale), (w_values, w_scale) = rounded(x, x_summed), rounded(weight, w_summed)
    wanted = np.einsum(spec, x_values * x_scale, w_values * w_scale)
    (cotangent,) = drawn(wanted.shape)
    value, d_x, d_weight = value_and_gradients(spec, x, weight, cotangent)
    assert_close(value, wanted)

    # d_x sums over what only the weight has: the cotangent takes the weight's scale, and one of its own a token.
    own = tuple(range(len(left) - len(x_summed), len(out)))
    values, scale = rounded(cotangent * np.squeeze(w_scale, w_summed).astype(np.float32), own, E5M2)
    assert_close(d_x, np.einsum(f"{out},{right}->{left}", values * scale, w_values))
    # d_weight sums over tokens: the cotangent takes their scales, and one of its own for each output channel.
    tokens = tuple(range(len(left) - len(x_summed)))
    laid = x_scale.reshape(*x_shape[: len(tokens)], *(1,) * (len(out) - len(tokens)))
    values, scale = rounded(cotangent * laid.astype(np.float32), tokens, E5M2)
    assert_close(d_weight, np.einsum(f"{left},{out}->{right}", x_values, values * scale))


def assert_close(found: jax.Array, wanted: np.ndarray) -> None:
    """To float32 accumulation: one 8-bit value rounded otherwise would be 1e-3 of the whole, and more."""
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


def test_weights_quantised_before_give_the_same_bits() -> None:
    for spec, (x_shape, w_shape, _, _) in PRODUCTS.items():
        x, weight = drawn(x_shape, w_shape)
        kept = tuple(i for i, letter in enumerate(spec.split(",")[1].split("->")[0]) if letter in spec.split("->")[1])
        before = jax.jit(lambda x, w, spec=spec: project(spec, x, w))(x, quantise(jnp.asarray(weight), kept))
        np.testing.assert_array_equal(before, value_and_gradients(spec, x, weight, np.zeros(before.shape, "f4"))[0])


def test_bfloat16_in_and_out_but_no_bfloat16_between() -> None:
    x, weight = (array.astype(jnp.bfloat16) for array in drawn((2, 3, 24), (24, 16)))
    found = project("btf,fd->btd", jnp.asarray(x), jnp.asarray(weight), "fp8")
    assert found.dtype == jnp.bfloat16
    wide = project("btf,fd->btd", jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), "fp8")
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


def test_zeros_stay_and_bad_numbers_show() -> None:
    x, weight = np.ones((1, 3, 24), np.float32), np.ones((24, 16), np.float32)
    x[0, 0] = 0
    x[0, 1, 0] = np.nan
    found = np.asarray(project("btf,fd->btd", jnp.asarray(x), jnp.asarray(weight), "fp8"))
    assert np.all(found[0, 0] == 0) and np.all(np.isnan(found[0, 1])) and np.allclose(found[0, 2], 24)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_layer_keeps_all_but_its_products(sparse: bool) -> None:
    experts = (4,) if sparse else ()
    attention = {"q": (16, 4, 8), "k": (16, 2, 8), "v": (16, 2, 8), "o": (4, 8, 16), "q_norm": (8,), "k_norm": (8,)}
    mlp = {"gate": (*experts, 16, 24), "up": (*experts, 16, 24), "down": (*experts, 24, 16)}
    mlp |= {"router": (16, 4)} if sparse else {}
    shapes = {"attention": attention, "mlp": mlp, "attention_norm": (16,), "mlp_norm": (16,)}
    layer = jax.tree.map(jnp.ones, shapes, is_leaf=lambda node: isinstance(node, tuple))
    found = quantise_layer(layer)
    scales = {"q": (1, 4, 8), "k": (1, 2, 8), "v": (1, 2, 8), "o": (1, 1, 16)}
    scales |= {"gate": (*experts, 1, 24), "up": (*experts, 1, 24), "down": (*experts, 1, 16)}
    for block in ("attention", "mlp"):
        for name, leaf in found[block].items():
            if name in scales:
                assert isinstance(leaf, QArray) and leaf.qvalue.dtype == quantised.FORWARD
                assert leaf.qvalue.shape == shapes[block][name] and leaf.scale.shape == scales[name]
            else:
                assert leaf is layer[block][name]
    assert found["mlp_norm"] is layer["mlp_norm"]

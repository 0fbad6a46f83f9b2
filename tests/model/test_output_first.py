"""Products and experts with weights that lie output first, against those with weights as the model has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl_sat.model import decode_experts
from jaxrl_sat.model.output_first import FEW_ROWS, OutputFirst, product, reordered, times_transposed


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("rows", [3, FEW_ROWS])  # two of each: once few, once many
@pytest.mark.parametrize(
    ("spec", "axes", "kept"), [("btd,dhk->bthk", (6, 2, 5), (1, 2)), ("bthk,hkd->btd", (2, 5, 6), (2,))]
)
def test_a_product_is_the_einsum_it_stands_for(rows: int, spec: str, axes: tuple[int, ...], kept: tuple) -> None:
    summed = [size for axis, size in enumerate(axes) if axis not in kept]
    x, weight = normal(2, rows, *summed), normal(*axes)
    expected = np.einsum(spec, x.astype(np.float64), weight)
    np.testing.assert_allclose(product(jnp.asarray(x), reordered(weight, kept)), expected, atol=1e-5)


def test_what_is_said_of_axes_moves_with_them() -> None:
    assert reordered(PartitionSpec("e", None, "f"), (0, 2)) == OutputFirst(PartitionSpec("e", "f", None), 2)
    assert reordered(("experts", "embed", "mlp"), (0, 2)) == OutputFirst(("experts", "mlp", "embed"), 2)
    assert reordered(normal(3, 4, 5), (0, 2)).value.shape == (3, 5, 4)


def test_the_result_has_the_dtype_asked_for() -> None:
    x, weight = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    assert times_transposed(x, weight).dtype == jnp.bfloat16
    assert times_transposed(x, weight, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize(("tokens", "chosen"), [(5, 2), (decode_experts.FEW_TOKENS + 8, 2), (2, 1)])
def test_experts_are_a_loop_over_tokens(tokens: int, chosen: int) -> None:
    """All of them computed, many tokens dispatched, few dispatched; an id past the last expert is no expert."""
    number, width, inner = 4, 6, 3
    rng = np.random.default_rng(tokens)
    x, weights = normal(tokens, width), normal(tokens, chosen)
    ids = np.stack([rng.permutation(number + 1)[:chosen] for _ in range(tokens)])
    weights = np.where(ids < number, weights, 0)
    gate, up, down = normal(number, width, inner), 0.5 * normal(number, width, inner), normal(number, inner, width)
    expected = np.zeros(x.shape)
    for token, pairs in enumerate(zip(ids, weights, strict=True)):
        for expert, weight in zip(*pairs, strict=True):
            if expert < number:
                gated, lifted = (x[token].astype(np.float64) @ w[expert] for w in (gate, up))
                expected[token] += weight * (gated / (1 + np.exp(-gated)) * lifted) @ down[expert]
    found = jax.jit(decode_experts.experts)(x, ids, weights, *(reordered(w, (0, 2)) for w in (gate, up, down)))
    np.testing.assert_allclose(found, expected, atol=1e-5)

"""Operations of traced programs against counts made by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl_sat.aot import flops
from jaxrl_sat.layout import Layout
from jaxrl_sat.model import attention_kernels, dispatch


def operations(function: Any, *shapes: tuple[int, ...], devices: int = 1, platform: str = "tpu") -> float:
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return flops.operations(jax.jit(function).trace(*given).jaxpr, devices, platform)


def test_a_product_is_two_operations_a_term() -> None:
    assert operations(jnp.matmul, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert operations(jnp.matmul, (4, 3, 5), (4, 5, 7)) == 2 * 4 * 3 * 5 * 7


def test_loops_are_multiplied_out() -> None:
    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 6, lambda _, x: jax.checkpoint(lambda x: jnp.sin(x @ w))(x), x)

    assert operations(loop, (3, 5), (5, 5)) == 6 * 2 * 3 * 5 * 5
    # forward, forward again for its own backward pass, and that, which has two products
    gradient = jax.grad(lambda x, w: loop(x, w).sum(), (0, 1))
    assert operations(gradient, (3, 5), (5, 5)) == 6 * 4 * 2 * 3 * 5 * 5


def test_of_branches_the_dearest() -> None:
    def branches(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)

    assert operations(branches, (3, 5), (5, 5)) == 2 * 3 * 5 * 5


def test_of_platforms_the_one_asked_for() -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, w, cpu=lambda x, w: x, tpu=jnp.matmul, default=lambda x, w: x @ w @ w)

    assert operations(product, (3, 5), (5, 5)) == 2 * 3 * 5 * 5
    assert operations(product, (3, 5), (5, 5), platform="cpu") == 0
    assert operations(product, (3, 5), (5, 5), platform="cuda") == 4 * 3 * 5 * 5


def test_experts_cost_what_their_rows_cost() -> None:
    def squares(rows: jax.Array, weights: jax.Array) -> jax.Array:
        sizes = jnp.full(4, 8, jnp.int32)
        return jnp.square(jax.lax.ragged_dot(rows, weights, sizes)).sum()

    once = 2 * 32 * 16 * 8
    assert operations(squares, (32, 16), (4, 16, 8)) == once
    assert operations(jax.grad(squares, (0, 1)), (32, 16), (4, 16, 8)) == 3 * once


def test_every_device_of_a_manual_region_counts() -> None:
    layout = Layout.of(Mesh(np.array(jax.devices()[:4]), ("data",)), {"rows": "data"})
    spec = layout.spec(("rows", None), (8, 5))
    whole = layout.manual(lambda x, w: x @ w, (spec, PartitionSpec()), spec)
    assert operations(whole, (8, 5), (5, 7), devices=4) == 2 * 2 * 5 * 7


def test_causal_attention_computes_half_its_grid() -> None:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        segments = jnp.ones((1, 256), jnp.int32)
        return attention_kernels.attend(q, k, v, segments, segments, jnp.int32(0), 1, "splash", 0)

    given = [jax.ShapeDtypeStruct((1, 256, heads, 128), jnp.bfloat16) for heads in (2, 1, 1)]
    found = flops.operations(jax.jit(attend).trace(*given).jaxpr, 1)
    assert found == 4 * 256 * 256 / 2 * 2 * 128


def test_a_kernel_whose_grid_follows_from_the_data_counts_its_rows() -> None:
    """megablox's product of rows by group: 1024 rows of 128 and 256 numbers, in 3 groups."""
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 128), (1024, 256))]
    traced = jax.jit(dispatch.tpu_outer).trace(*given, jax.ShapeDtypeStruct((3,), jnp.int32))
    assert flops.operations(traced.jaxpr, 1) == 2 * 1024 * 128 * 256

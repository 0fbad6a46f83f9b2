"""Where arrays lie, and what the collectives of a layout do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxrl_sat.layout import Layout

RULES = {"rows": ("data", "fsdp"), "embed": ("fsdp", "tensor"), "heads": "tensor", "none": None, "elsewhere": "pod"}


def layout(*sizes: int) -> Layout:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Layout.of(Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3), RULES)


def test_a_mesh_axis_cuts_the_first_dimension_that_asks() -> None:
    spec = layout(2, 2, 2).spec
    assert spec(("rows", "none", None), (4, 3, 5)) == PartitionSpec(("data", "fsdp"), None, None)
    assert spec(("heads", "embed"), (4, 8)) == PartitionSpec("tensor", "fsdp")
    assert spec(("embed", "heads"), (8, 4)) == PartitionSpec(("fsdp", "tensor"), None)
    assert spec((), ()) == PartitionSpec()


def test_what_does_not_divide_stays_whole() -> None:
    spec = layout(2, 2, 2).spec
    assert spec(("rows", "heads"), (6, 3)) == PartitionSpec("data", None)
    assert spec(("rows", "elsewhere"), (3, 4)) == PartitionSpec(None, None)
    assert layout(1, 1, 1).spec(("rows", "heads"), (4, 4)) == PartitionSpec(None, None)


def test_without_a_mesh_nothing_is_cut() -> None:
    alone = Layout()
    assert alone.spec(("rows", "heads"), (4, 4)) == PartitionSpec(None, None)
    x = jnp.arange(3.0)
    assert alone.gather(x, None, 0) is x and alone.total(x, None) is x
    assert alone.constrain(x, "rows") is x and alone.ways(None) == 1
    assert alone.manual(jnp.sin, None, None) is jnp.sin


def test_a_layout_is_a_static_argument() -> None:
    assert hash(layout(2, 1, 1)) == hash(layout(2, 1, 1)) and layout(2, 1, 1) == layout(2, 1, 1)
    assert layout(2, 1, 1) != layout(1, 2, 1)


def test_gradients_through_manual_are_those_of_the_whole() -> None:
    """A product whose weight is gathered, over rows that are cut, with its width summed over devices."""
    cut = layout(2, 2, 2)
    x, w = (
        jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32) for i, shape in ((0, (4, 6)), (1, (6, 8)))
    )
    x_spec, w_spec = cut.spec(("rows", None), x.shape), PartitionSpec("fsdp", "tensor")

    def piece(x: jax.Array, w: jax.Array) -> jax.Array:
        w = cut.gather(w, w_spec[0], 0)
        y = jnp.sin(x @ w)
        biggest = cut.largest(jnp.max(y, axis=1), w_spec[1])
        return cut.total(jnp.sum(y * y, axis=1), w_spec[1]) + biggest

    def whole(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.sin(x @ w)
        return jnp.sum(y * y, axis=1) + jax.lax.stop_gradient(jnp.max(y, axis=1))

    manual = cut.manual(piece, (x_spec, w_spec), PartitionSpec(x_spec[0]))
    both = [
        jax.jit(jax.value_and_grad(lambda x, w, f=f: jnp.sum(jnp.cos(f(x, w))), (0, 1)))(x, w) for f in (manual, whole)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *both)

"""Every formulation of the grouped matmul, on every platform, against a loop over rows in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.model import dispatch
from tests.model.helpers import gap

SIZES = {
    "uneven": [5, 0, 17, 140, 0, 2, 36, 0],
    "one expert takes all": [0, 0, 0, 200, 0, 0, 0, 0],
    "a row each": [1] * 8,
    "fewer rows than a block": [0, 1, 0, 0, 2, 0, 0, 0],
    "the last expert": [0, 0, 0, 0, 0, 0, 0, 64],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("formulation", ["row_blocks", "padded_blocks", "ragged"])
def test_products_are_those_of_a_loop_over_rows(formulation: str, sizes: list[int]) -> None:
    grouped = getattr(dispatch, formulation)
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(8), sizes)
    rows, weights = rng.normal(size=(len(owner), 6)), rng.normal(size=(8, 6, 5))
    right = rng.normal(size=(len(owner), 5))
    product, outer = np.zeros((len(owner), 5)), np.zeros((8, 6, 5))
    for row, expert in enumerate(owner):
        product[row] = rows[row] @ weights[expert]
        outer[expert] += np.outer(rows[row], right[row])
    args = [jnp.asarray(x, jnp.float32) for x in (rows, weights, right)]
    counts = jnp.asarray(sizes, jnp.int32)
    assert gap(jax.jit(grouped.matmul)(args[0], args[1], counts), product) < 1e-5
    assert gap(jax.jit(grouped.outer)(args[0], args[2], counts), outer) < 1e-5


@pytest.mark.parametrize("formulation", ["row_blocks", "padded_blocks", "ragged"])
def test_rows_beyond_the_groups_give_and_take_nothing(formulation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """37 rows of three experts among 60, against a loop over experts of exactly their rows."""
    chosen = getattr(dispatch, formulation)
    monkeypatch.setattr(dispatch, "_by_platform", lambda product, *args: getattr(chosen, product)(*args))
    rng = np.random.default_rng(0)
    sizes, shapes = [20, 0, 17], [(60, 6), (60,), (3, 6, 7), (3, 6, 7), (3, 7, 6)]
    args = [jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32) for shape in shapes]

    def ours(rows, row_weights, gate, up, down):
        return dispatch.grouped_ffn(rows, row_weights, jnp.asarray(sizes), gate, up, down)

    def theirs(rows, row_weights, gate, up, down):
        out, stops = [], np.cumsum(sizes)
        for expert, (start, stop) in enumerate(zip(stops - sizes, stops, strict=True)):
            own = rows[start:stop]
            hidden = jax.nn.silu(own @ gate[expert]) * (own @ up[expert])
            out.append((hidden @ down[expert]) * row_weights[start:stop, None])
        return jnp.concatenate([*out, jnp.zeros((60 - sum(sizes), 6))])

    def loss(function):
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.cos(function(*args))), argnums=range(5))

    for a, b in zip(*(jax.tree.leaves(jax.jit(loss(f))(*args)) for f in (ours, theirs)), strict=True):
        assert gap(a, b) < 2e-5


def dense_experts(x, ids, weights, gate, up, down):
    """Every expert on every token, then the chosen ones picked: no sort, no groups."""
    hidden = jax.nn.silu(jnp.einsum("nd,edf->nef", x, gate)) * jnp.einsum("nd,edf->nef", x, up)
    picked = jnp.take_along_axis(jnp.einsum("nef,efd->ned", hidden, down), ids[..., None], axis=1)
    return jnp.sum(picked * weights[..., None], axis=1)


@pytest.mark.parametrize("formulation", ["row_blocks", "padded_blocks", "ragged"])
def test_experts_and_their_gradients_are_the_dense_ones(formulation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = getattr(dispatch, formulation)
    monkeypatch.setattr(dispatch, "_by_platform", lambda product, *args: getattr(chosen, product)(*args))
    key = jax.random.split(jax.random.key(0), 6)
    shapes = {"x": (40, 6), "weights": (40, 2), "gate": (5, 6, 7), "up": (5, 6, 7), "down": (5, 7, 6)}
    args = [0.5 * jax.random.normal(k, shape) for k, shape in zip(key, shapes.values(), strict=False)]
    # Expert 4 gets nobody; a token may not have one expert twice.
    ids = jnp.argsort(jax.random.uniform(key[5], (40, 4)), axis=-1)[:, :2].astype(jnp.int32)

    def loss(function):
        return jax.value_and_grad(
            lambda x, w, *params: jnp.sum(jnp.sin(function(x, ids, w, *params))), argnums=(0, 1, 2, 3, 4)
        )

    ours, theirs = (jax.jit(loss(function))(*args) for function in (dispatch.experts, dense_experts))
    for name, a, b in zip(["loss", *shapes], jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert gap(a, b) < 2e-5, name
    assert float(jnp.abs(ours[1][2][4]).max()) == 0.0


@pytest.mark.parametrize("groups", [7, 2**30])
def test_order_is_a_stable_argsort(groups: int) -> None:
    """With 2^30 groups (id, place) does not fit in one integer."""
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 7, 50), jnp.int32)
    expected = np.argsort(np.asarray(ids), kind="stable")
    np.testing.assert_array_equal(dispatch._stable_order(ids, groups), expected)


def lowered(platform: str) -> str:
    def loss(rows, weights, sizes):
        return jnp.sum(dispatch.grouped_matmul(rows, weights, sizes))

    args = jnp.ones((64, 4)), jnp.ones((3, 4, 5)), jnp.asarray([10, 20, 34], jnp.int32)
    return jax.jit(jax.grad(loss, (0, 1))).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_the_formulation_is_chosen_when_lowered() -> None:
    """A program lowered for another platform (ahead of time, without the device) takes that platform's products."""
    cpu, tpu, cuda = map(lowered, ("cpu", "tpu", "cuda"))
    assert "ragged_dot" in tpu
    assert "ragged_dot" not in cpu + cuda
    # One dense product over all blocks at once: 1 + 64 // 32 + 3 blocks of 32 rows at most.
    assert "tensor<5x32x4xf32>" in cuda
    assert "tensor<5x32x4xf32>" not in cpu + tpu

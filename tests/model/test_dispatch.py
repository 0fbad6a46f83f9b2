"""Every formulation of the experts, values and gradients, against one expert after the other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.model import blocks, dispatch
from jaxrl_sat.model.ops import PRODUCT
from tests.model.helpers import gap

SIZES = {
    "uneven": [5, 0, 17, 140, 0, 2, 36, 0],
    "one expert takes all": [0, 0, 0, 200, 0, 0, 0, 0],
    "a row each": [1] * 8,
    "fewer rows than a block": [0, 1, 0, 0, 2, 0, 0, 0],
    "the last expert": [0, 0, 0, 0, 0, 0, 0, 64],
}


FORMULATIONS = ["row_blocks", "padded_blocks", "ragged"]


def by_expert(sizes, rows, row_weights, gate, up, down):
    """Each expert on exactly its rows, and 0 for the rows beyond."""
    out, stops = [], np.cumsum(sizes)
    for expert, (start, stop) in enumerate(zip(stops - sizes, stops, strict=True)):
        own = rows[start:stop]
        hidden = jax.nn.silu(own @ gate[expert]) * (own @ up[expert])
        out.append((hidden @ down[expert]) * row_weights[start:stop, None])
    return jnp.concatenate([*out, jnp.zeros((len(rows) - sum(sizes), down.shape[2]))])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_rows_take_their_own_expert_and_those_beyond_none(
    formulation: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, with 7 rows that belong to nobody."""
    chosen = getattr(dispatch, formulation)
    monkeypatch.setattr(dispatch, "_by_platform", lambda direction, *args: getattr(chosen, direction)(*args))
    monkeypatch.setattr(blocks, "MAX_BLOCK", 32)
    rng = np.random.default_rng(0)
    count = sum(sizes) + 7
    shapes = [(count, 6), (count,), (8, 6, 7), (8, 6, 7), (8, 7, 6)]
    args = [jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32) for shape in shapes]

    def loss(function):
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.cos(function(*args))), argnums=range(5))

    def ours(rows, row_weights, *weights):
        return dispatch.grouped_ffn(rows, row_weights, jnp.asarray(sizes, jnp.int32), *weights)

    expected = loss(lambda *args: by_expert(sizes, *args))(*args)
    for a, b in zip(jax.tree.leaves(jax.jit(loss(ours))(*args)), jax.tree.leaves(expected), strict=True):
        assert gap(a, b) < 2e-5


def test_tpu_kernel_of_the_weights_gradient() -> None:
    """Interpreted: rows that fill no tile, an expert without rows, and 7 rows of nobody that hold large numbers."""
    sizes = [20, 0, 130, 1]
    rng = np.random.default_rng(0)
    left, right = (rng.normal(size=(sum(sizes) + 7, width)).astype(np.float32) for width in (6, 5))
    left[sum(sizes) :] = 1e9
    out = dispatch.tpu_outer(jnp.asarray(left), jnp.asarray(right), jnp.asarray(sizes), interpret=True)
    stops = np.cumsum(sizes)
    for expert, (start, stop) in enumerate(zip(stops - sizes, stops, strict=True)):
        assert gap(out[expert], left[start:stop].T.astype(np.float64) @ right[start:stop]) < 1e-5


def test_blocks_are_computed_at_the_length_of_their_rows() -> None:
    assert blocks._lengths(8192, 32) == [32, 64, 96, 128, 160, 192, 224, 256, 288, 320]
    assert blocks._lengths(200, 8) == [16, 32]
    assert blocks._lengths(20, 1) == [16, 20]
    assert blocks._lengths(3, 8) == [3]


def test_the_backward_pass_computes_no_product_again() -> None:
    """Three products forward and three backward under the policy of training; the other three are a Pallas kernel."""
    policy = jax.checkpoint_policies.save_only_these_names(PRODUCT)
    shapes = [(24, 4), (24,), (3, 4, 5), (3, 4, 5), (3, 5, 4)]
    args = [jnp.ones(shape) for shape in shapes]

    @functools.partial(jax.checkpoint, policy=policy)
    def ffn(rows, row_weights, *weights):
        return dispatch.grouped_ffn(rows, row_weights, jnp.full(3, 8, jnp.int32), *weights)

    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(ffn(*args))), argnums=range(5)))
    text = gradient.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count('chlo.ragged_dot"') == 6 and "tpu_custom_call" in text


def dense_experts(x, ids, weights, gate, up, down):
    """Every expert on every token, then the chosen ones picked: no sort, no groups."""
    hidden = jax.nn.silu(jnp.einsum("nd,edf->nef", x, gate)) * jnp.einsum("nd,edf->nef", x, up)
    picked = jnp.take_along_axis(jnp.einsum("nef,efd->ned", hidden, down), ids[..., None], axis=1)
    return jnp.sum(picked * weights[..., None], axis=1)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_experts_and_their_gradients_are_the_dense_ones(formulation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = getattr(dispatch, formulation)
    monkeypatch.setattr(dispatch, "_by_platform", lambda direction, *args: getattr(chosen, direction)(*args))
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
    np.testing.assert_array_equal(dispatch.stable_order(ids, groups), expected)


def lowered(platform: str) -> str:
    def loss(rows, weights, sizes):
        down = jnp.ones((3, 5, 4))
        return jnp.sum(dispatch.grouped_ffn(rows, rows[:, 0], sizes, weights, weights, down))

    args = jnp.ones((64, 4)), jnp.ones((3, 4, 5)), jnp.asarray([10, 20, 34], jnp.int32)
    return jax.jit(jax.grad(loss, (0, 1))).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_the_formulation_is_chosen_when_lowered() -> None:
    """A program lowered for another platform (ahead of time, without the device) takes that platform's products."""
    cpu, tpu, cuda = map(lowered, ("cpu", "tpu", "cuda"))
    assert "ragged_dot" in tpu and "tpu_custom_call" in tpu
    assert "ragged_dot" not in cpu + cuda and "tpu_custom_call" not in cpu + cuda
    # One dense product over all blocks at once: 1 + 64 // 32 + 3 blocks of 32 rows at most.
    assert "tensor<5x32x4xf32>" in cuda
    assert "tensor<5x32x4xf32>" not in cpu + tpu

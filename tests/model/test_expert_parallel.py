"""Experts over devices give one device's result, however unevenly the tokens choose."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxrl_sat.layout import Layout
from jaxrl_sat.model import dispatch, expert_parallel
from jaxrl_sat.model.piece import Piece
from tests.model.helpers import tree_gap

TOKENS, CHOSEN, EXPERTS, WIDTH, HIDDEN = 32, 2, 8, 12, 8
LAYOUT = Layout.of(
    Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2),
    {"rows": ("data", "expert"), "experts": "expert"},
)


def inputs(ids: np.ndarray) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)  # noqa: E731
    matrices = draw(EXPERTS, WIDTH, HIDDEN), draw(EXPERTS, WIDTH, HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)
    return draw(TOKENS, WIDTH), jnp.asarray(ids, jnp.int32), draw(TOKENS, CHOSEN), *matrices


def routing(kind: str) -> np.ndarray:
    """Even; all on the experts of one device, so that it takes several exchanges; all on one pair; random."""
    token, rng = np.arange(TOKENS), np.random.default_rng(1)
    return {
        "even": np.stack([token % EXPERTS, (token + 3) % EXPERTS], 1),
        "one device": np.stack([4 + token % 2, 5 - token % 2], 1),
        "one pair": np.tile([7, 0], (TOKENS, 1)),
        "random": np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in token]),
    }[kind]


def spread(rows: str | tuple[str, ...]) -> Any:
    tokens, matrix = PartitionSpec(rows, None), PartitionSpec("expert", None, None)
    piece = Piece(LAYOUT, rows=rows, sequence=None, heads=None, mlp=None, expert_mlp=None, experts="expert")
    return LAYOUT.manual(
        functools.partial(expert_parallel.experts, piece=piece),
        (tokens, tokens, tokens, matrix, matrix, matrix),
        tokens,
    )


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(experts: Any, x: Any, ids: Any, weights: Any, *matrices: Any) -> Any:
    def loss(x: Any, weights: Any, matrices: Any) -> Any:
        out = experts(x, ids, weights, *matrices)
        return jnp.sum(jnp.sin(out)), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, matrices)


EXCHANGED, SHARED = spread(("data", "expert")), spread("data")


@pytest.mark.parametrize("kind", ["even", "one device", "one pair", "random"])
def test_no_token_is_dropped(kind: str) -> None:
    given = inputs(routing(kind))
    (_, out), gradient = value_and_gradient(dispatch.experts, *given)
    for experts in (EXCHANGED, SHARED):
        (_, found), found_gradient = value_and_gradient(experts, *given)
        assert tree_gap((found, found_gradient), (out, gradient)) < 1e-5


@pytest.mark.parametrize(("kind", "rounds"), [("even", 1), ("one device", 3), ("one pair", 2)])
def test_exchanges_follow_from_the_fullest_pair(kind: str, rounds: int) -> None:
    """8 rows a device: room for 3 of them in each of 4 parcels, ceil(1.25 * 8 / 4); an even load asks for 2."""
    ids = jnp.asarray(routing(kind), jnp.int32)
    plan = LAYOUT.manual(
        lambda ids: expert_parallel._plan(ids, 2, LAYOUT, "expert").rounds[None],
        (PartitionSpec(("data", "expert"), None),),
        PartitionSpec(("data", "expert")),
    )
    np.testing.assert_array_equal(jax.jit(plan)(ids), [rounds] * 8)

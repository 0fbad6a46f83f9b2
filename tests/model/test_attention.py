"""Chunked attention against a loop over queries in float64, over lengths that exercise every path."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.model import attention
from tests.model.helpers import gap, tree_gap


def plain(q, k, v, segments):
    batch, length, heads, head_dim = q.shape
    out = np.zeros_like(q)
    for b in range(batch):
        for t in range(length):
            seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
            for h in range(heads):
                g = h // (heads // k.shape[2])
                scores = k[b, seen, g] @ q[b, t, h] / np.sqrt(head_dim)
                probs = np.exp(scores - scores.max())
                out[b, t, h] = probs / probs.sum() @ v[b, seen, g]
    return out


def inputs(length: int):
    rng = np.random.default_rng(length)
    q, k, v = (rng.normal(size=(2, length, heads, 4)) for heads in (4, 2, 2))
    segments = np.sort(rng.integers(0, 4, (2, length)), axis=1)[:, ::-1].copy()
    return (q, k, v), segments


@pytest.mark.parametrize("length", [3, 4, 5, 12, 34])
def test_chunks_are_plain_attention(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 in at most 3 prefixes: one chunk, a ragged end, several chunks a prefix with and without an end."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", 4)
    monkeypatch.setattr(attention, "MAX_PREFIXES", 3)
    arrays, segments = inputs(length)
    args = [jnp.asarray(x, jnp.float32) for x in arrays]
    out = jax.jit(attention.attend_segments)(*args, jnp.asarray(segments))
    assert gap(out, plain(*arrays, segments)) < 1e-5


def test_gradient_of_chunks_is_that_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, segments = inputs(22)
    args = tuple(jnp.asarray(x, jnp.float32) for x in arrays)

    def gradient():
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attention.attend_segments(q, k, v, jnp.asarray(segments))))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)

    whole = gradient()
    monkeypatch.setattr(attention, "QUERY_CHUNK", 4)
    monkeypatch.setattr(attention, "MAX_PREFIXES", 3)
    assert tree_gap(gradient(), whole) < 1e-5


def test_long_rows_never_hold_all_pairs() -> None:
    """At 4096 positions, forward and backward, no array has more than a chunk of queries against all keys."""
    shapes = [(1, 4096, 2, 8), (1, 4096, 1, 8), (1, 4096, 1, 8)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    segments = jnp.ones((1, 4096), jnp.int32)
    loss = jax.grad(lambda q, k, v: jnp.sum(attention.attend_segments(q, k, v, segments)), argnums=(0, 1, 2))
    largest = 0
    stack = [jax.make_jaxpr(loss)(*args).jaxpr]
    while stack:
        for equation in stack.pop().eqns:
            largest = max([largest, *(variable.aval.size for variable in equation.outvars)])
            for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    stack.append(inner)
    assert largest <= 2 * attention.QUERY_CHUNK * 4096

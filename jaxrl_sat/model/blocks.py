"""Experts on a CPU: a loop over blocks of rows, each of one expert, that takes a block through all its products.

What a block needs stays in the cache from the first product to the last. A block is computed at the smallest of a few
static lengths that holds its rows, since groups seldom fill whole blocks. The functions are those of
`jaxrl_sat.model.dispatch.Formulation`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_sat.model.ops import einsum

MAX_BLOCK = 320
MAX_LENGTHS = 10
MIN_LENGTH = 16


def hidden(gated: Array, lifted: Array, row_weights: Array) -> Array:
    """row_weights * silu(gated) * lifted in float32, as the dtype of `gated`."""
    gated_wide, lifted_wide, weights = (x.astype(jnp.float32) for x in (gated, lifted, row_weights))
    return (jax.nn.silu(gated_wide) * lifted_wide * weights[:, None]).astype(gated.dtype)


def _lengths(rows: int, groups: int) -> list[int]:
    """The lengths that a block is computed at, ascending; the last is the block's own.

    A quarter above the average group: most groups are then one block, and load their expert's weights once.
    """
    block = min(MAX_BLOCK, -(-5 * rows // (4 * groups * MIN_LENGTH)) * MIN_LENGTH)
    parts = min(MAX_LENGTHS, block // MIN_LENGTH)
    return sorted({min(rows, block * (part + 1) // parts) for part in range(parts)})


class _Block(NamedTuple):
    expert: Int[Array, ""]
    first: Int[Array, ""]  # its first row; a block at the end is moved back to end with the rows
    own: Array  # bool [block]: rows of this expert that no earlier block had

    def take(self, x: Array, length: int, source: Array | None = None) -> Array:
        """The first rows of the block in `x`, or in x[source]."""
        if source is not None:
            # Behind barriers, or every product that reads the rows would gather them again, index by index.
            places = jax.lax.optimization_barrier(self.take(source, length))
            return jax.lax.optimization_barrier(x.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False))
        return jax.lax.dynamic_slice_in_dim(x, self.first, length)

    def put(self, x: Array, new: Array) -> Array:
        """`x` with `new` in the block's own rows."""
        own = self.own.reshape(-1, *(1,) * (new.ndim - 1))
        return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(own, new, self.take(x, new.shape[0])), self.first, 0)


def _over_blocks(
    rows: int, sizes: Array, compute: Callable[[_Block, int], Any], store: Callable[[_Block, Any, Any], Any], carry: Any
) -> Any:
    """carry = store(block, compute(block, length), carry) for each block.

    `compute` returns (arrays of `length` rows, others); of the former `store` gets whole blocks. It only reads: a
    conditional would copy what it hands on.
    """
    lengths = _lengths(rows, sizes.shape[0])
    size = lengths[-1]
    starts, number = jnp.cumsum(sizes) - sizes, -(-sizes // size)
    ends = jnp.cumsum(number)

    def step(index: Array, carry: Any) -> Any:
        expert = jnp.sum(ends <= index)
        begin = starts[expert] + (index - ends[expert] + number[expert]) * size
        stop = starts[expert] + sizes[expert]
        first = jnp.minimum(begin, rows - size)
        row = first + jnp.arange(size)
        block = _Block(expert, first, (row >= begin) & (row < stop))

        def at(length: int) -> Any:
            by_row, others = compute(block, length)
            return jax.tree.map(lambda x: jnp.pad(x, ((0, size - length), *((0, 0),) * (x.ndim - 1))), by_row), others

        which = jnp.sum(jnp.asarray(lengths) < jnp.minimum(stop - first, size))
        found = jax.lax.switch(which, [functools.partial(at, length) for length in lengths])
        return store(block, found, carry)

    return jax.lax.fori_loop(0, ends[-1], step, carry)


def _zeros(sizes: Array, after: Array, *arrays: tuple[tuple[int, ...], Any]) -> list[Array]:
    """Zeros of each (shape, dtype) for a loop to write into, made when the matrix `after` is there.

    XLA merges equal constants, copies them for each loop that writes into them, and makes them long before. That these
    are constant it cannot know: no size is negative.
    """
    never = after[0, 0] > 0
    return [jnp.full(shape, (sizes[0] < -n) & never, dtype) for n, (shape, dtype) in enumerate(arrays, start=1)]


def _put_all(block: _Block, found: Any, carry: Any) -> Any:
    return tuple(block.put(x, new) for x, new in zip(carry, found[0], strict=True))


def matmul(rows: Array, weights: Array, sizes: Array) -> Array:
    """rows[r] @ weights[e(r)]; 8-bit weights are multiplied in the dtype of the rows."""

    def compute(block: _Block, length: int) -> Any:
        weight = weights[block.expert].astype(rows.dtype)
        return (einsum("ra,ab->rb", block.take(rows, length), weight),), ()

    empty = jnp.zeros((rows.shape[0], weights.shape[2]), rows.dtype)
    return _over_blocks(rows.shape[0], sizes, compute, _put_all, (empty,))[0]


def outer(left: Array, right: Array, sizes: Array) -> Array:
    """The sum of outer products over each expert's rows."""

    def compute(block: _Block, length: int) -> Any:
        ours = jnp.where(block.own[:length, None], block.take(right, length), 0)
        return (), einsum("ra,rb->ab", block.take(left, length), ours, out=jnp.float32)

    def store(block: _Block, found: Any, out: Array) -> Array:
        return out.at[block.expert].add(found[1])

    empty = jnp.zeros((sizes.shape[0], left.shape[1], right.shape[1]), jnp.float32)
    return _over_blocks(left.shape[0], sizes, compute, store, empty).astype(left.dtype)


def forward(
    x: Array,
    source: Array | None,
    row_weights: Array,
    sizes: Array,
    gate: Array,
    up: Array,
    down: Array,
    output_first: bool = False,
) -> tuple[Array, Array, Array]:
    """(The result of `grouped_ffn`, rows @ gate, rows @ up), rows = x[source].

    With `output_first` weights are [E, out, in], and the result has no gradient.
    """
    product, last = ("ra,ba->rb", 1) if output_first else ("ra,ab->rb", 2)

    def compute(block: _Block, length: int) -> Any:
        mine = block.take(x, length, source)
        gated, lifted = (einsum(product, mine, weight[block.expert]) for weight in (gate, up))
        inner = hidden(gated, lifted, block.take(row_weights, length))
        return (einsum(product, inner, down[block.expert]), gated, lifted), ()

    count = row_weights.shape[0]
    empty = _zeros(sizes, x, *(((count, weight.shape[last]), x.dtype) for weight in (down, gate, gate)))
    return _over_blocks(count, sizes, compute, _put_all, tuple(empty))


def backward(
    x: Array,
    source: Array | None,
    row_weights: Array,
    sizes: Array,
    gate: Array,
    up: Array,
    down: Array,
    gated: Array,
    lifted: Array,
    d_out: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    """The gradient of `grouped_ffn` in rows, row weights, gate, up and down, given the products of `forward`.

    Rows are x[source] and have the cotangents d_out[source].
    """

    def compute(block: _Block, length: int) -> Any:
        d_mine = jnp.where(block.own[:length, None], block.take(d_out, length, source), 0)
        weighted, pull = jax.vjp(hidden, *(block.take(kept, length) for kept in (gated, lifted, row_weights)))
        d_gated, d_lifted, d_weights = pull(einsum("rb,ab->ra", d_mine, down[block.expert]))
        d_rows = einsum("rb,ab->ra", d_gated, gate[block.expert]) + einsum("rb,ab->ra", d_lifted, up[block.expert])
        # With the narrow side first, a product here takes two thirds of the time that it takes the other way round.
        mine = block.take(x, length, source)
        pairs = ((d_gated, mine), (d_lifted, mine), (weighted, d_mine))
        d_gate, d_up, d_down = (einsum("ra,rb->ab", *pair, out=jnp.float32) for pair in pairs)
        return (d_rows, d_weights), (d_gate.T, d_up.T, d_down)

    def store(block: _Block, found: Any, carry: Any) -> Any:
        by_row, by_expert = carry
        return (
            _put_all(block, found, by_row),
            tuple(x.at[block.expert].add(new) for x, new in zip(by_expert, found[1], strict=True)),
        )

    by_row = ((row_weights.shape[0], x.shape[1]), x.dtype), (row_weights.shape, row_weights.dtype)
    by_expert = ((weight.shape, jnp.float32) for weight in (gate, up, down))
    d_rows, d_weights, *d_experts = _zeros(sizes, gated, *by_row, *by_expert)
    carry = ((d_rows, d_weights), tuple(d_experts))
    (d_rows, d_weights), d_experts = _over_blocks(row_weights.shape[0], sizes, compute, store, carry)
    return d_rows, d_weights, *(d.astype(x.dtype) for d in d_experts)

"""Dropless expert computation: sort rows by expert, then one grouped matmul a weight, chosen by platform.

The three formulations compute the same two products, and each runs on every platform:

    row_blocks     CPU: a loop over blocks of rows, each of one expert
    padded_blocks  GPU: groups padded to whole blocks, one batched matmul with the weights of each block
    ragged         TPU: `jax.lax.ragged_dot` (elsewhere XLA lowers it to a dense product with every expert)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.ops import ROUTING, einsum, precision, saved
from jaxrl_sat.model.quantised import COTANGENT, QArray, Weight, quantise
from jaxrl_sat.types import Numerics


def experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Weight, "E D F"],
    up: Float[Weight, "E D F"],
    down: Float[Weight, "E F D"],
    numerics: Numerics = "none",
) -> Float[Array, "N D"]:
    """y[n] = sum_j weights[n, j] * down_e(silu(gate_e(x[n])) * up_e(x[n])), e = expert_ids[n, j]."""
    tokens, chosen = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = saved(_stable_order(flat, gate.shape[0]), ROUTING)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(gate.shape[0]), axis=0, dtype=jnp.int32)

    rows = _permute(jnp.repeat(x, chosen, axis=0), order)
    out = grouped_ffn(rows, _permute(weights.reshape(-1), order), sizes, gate, up, down, numerics)
    return jnp.sum(_permute(out, inverse).reshape(tokens, chosen, -1), axis=1)


def grouped_ffn(
    rows: Float[Array, "R D"],
    row_weights: Float[Array, " R"],
    sizes: Int[Array, " E"],
    gate: Float[Weight, "E D F"],
    up: Float[Weight, "E D F"],
    down: Float[Weight, "E F D"],
    numerics: Numerics = "none",
) -> Float[Array, "R D"]:
    """down_e(w_r * silu(gate_e(rows[r])) * up_e(rows[r])), where the first sizes[0] rows belong to expert 0, and so on.

    Rows beyond the sum of `sizes` belong to no expert: 0, and no gradient, whatever (finite) numbers they hold. With
    the weight ahead of `down`, no gradient needs that product's result: it is neither kept nor computed again.
    """
    gated, lifted = (saved(grouped_product(rows, weight, sizes, numerics)) for weight in (gate, up))
    return grouped_product(jax.nn.silu(gated) * lifted * row_weights[:, None], down, sizes, numerics)


def _stable_order(ids: Array, groups: int) -> Array:
    """`argsort(ids)`, as a sort of one integer key, several times faster, where (id, place) fits in one."""
    if ids.size * groups >= 2**31:
        return jnp.argsort(ids)
    return jnp.sort(ids * ids.size + jnp.arange(ids.size, dtype=jnp.int32)) % ids.size


def _permute(rows: Array, order: Array) -> Array:
    # Unique indices make the gradient a plain permutation: no atomics, the same bits every time.
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


# ------------------------------------------------------------------------------------------- grouped matmul


@jax.custom_vjp
def grouped_matmul(
    rows: Float[Array, "R A"], weights: Float[Array, "E A B"], sizes: Int[Array, " E"]
) -> Float[Array, "R B"]:
    """rows[r] @ weights[e(r)], where the first sizes[0] rows belong to expert 0, the next sizes[1] to expert 1, ...

    0 for rows beyond the sum of `sizes`.
    """
    return _by_platform("matmul", rows, weights, sizes)


def _forward(rows: Array, weights: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(rows, weights, sizes), (rows, weights, sizes)


def _backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = saved
    d_rows = grouped_matmul(cotangent, jnp.swapaxes(weights, 1, 2), sizes)
    return d_rows, _by_platform("outer", rows, cotangent, sizes), None


grouped_matmul.defvjp(_forward, _backward)


def grouped_product(
    rows: Float[Array, "R A"], weights: Float[Weight, "E A B"], sizes: Int[Array, " E"], numerics: Numerics
) -> Float[Array, "R B"]:
    """`grouped_matmul` in the numbers that `weights` are quantised to, else in those of `numerics`.

    8-bit values are multiplied in the dtype of `rows`, which holds them exactly: no backend but the newest TPU has an
    8-bit grouped product.
    """
    if isinstance(weights, QArray):
        return _of_values(quantise(rows, (0,)), weights, sizes, rows.dtype)
    return grouped_matmul(rows, weights, sizes) if numerics == "none" else _quantised_matmul(rows, weights, sizes)


def _of_values(rows: QArray, weights: QArray, sizes: Array, dtype: Any) -> Array:
    product = _by_platform("matmul", rows.qvalue.astype(dtype), weights.qvalue, sizes)
    return (product * rows.scale * _by_row(weights.scale, rows.shape[0], sizes)).astype(dtype)


def _by_row(scale: Array, count: int, sizes: Array) -> Array:
    """The scale [E, 1, B] of each row's expert, [count, B]."""
    owner = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(count), side="right")
    return scale[jnp.minimum(owner, scale.shape[0] - 1), 0]


@jax.custom_vjp
def _quantised_matmul(rows: Array, weights: Array, sizes: Array) -> Array:
    return _quantised_forward(rows, weights, sizes)[0]


def _quantised_forward(rows: Array, weights: Array, sizes: Array) -> tuple[Array, tuple[QArray, QArray, Array]]:
    values = quantise(rows, (0,)), quantise(weights, (0, 2))
    return _of_values(*values, sizes, rows.dtype), (*values, sizes)


def _quantised_backward(kept: tuple[QArray, QArray, Array], cotangent: Array) -> tuple[Array, Array, None]:
    """As in `quantised.project`: the cotangent takes the scale of the other operand before it is quantised."""
    rows, weights, sizes = kept
    dtype = cotangent.dtype
    cotangent = _owned(cotangent.astype(jnp.float32), sizes)
    by_row = quantise(cotangent * _by_row(weights.scale, cotangent.shape[0], sizes), (0,), COTANGENT)
    d_rows = _by_platform("matmul", by_row.qvalue.astype(dtype), jnp.swapaxes(weights.qvalue, 1, 2), sizes)
    by_column = quantise(cotangent * rows.scale, (1,), COTANGENT)
    d_weights = _by_platform("outer", rows.qvalue.astype(dtype), by_column.qvalue.astype(dtype), sizes)
    return (d_rows * by_row.scale).astype(dtype), (d_weights * by_column.scale).astype(dtype), None


_quantised_matmul.defvjp(_quantised_forward, _quantised_backward)


def _by_platform(product: str, *args: Array) -> Array:
    """Chosen when lowered, so that a program compiled here for another platform takes that one's formulation."""
    cpu, gpu, tpu = (getattr(grouped, product) for grouped in (row_blocks, padded_blocks, ragged))
    return jax.lax.platform_dependent(*args, cpu=cpu, tpu=tpu, default=gpu)


class Grouped(NamedTuple):
    """One formulation: `matmul` as above, and its gradient in the weights.

    `outer`: (rows [R, A], rows [R, B], sizes [E]) -> [E, A, B], the sum of outer products over each expert's rows.
    """

    matmul: Callable[[Array, Array, Array], Array]
    outer: Callable[[Array, Array, Array], Array]


def _owned(rows: Array, sizes: Array) -> Array:
    """The rows that belong to an expert, and 0 for those beyond."""
    return jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None], rows, 0)


# ------------------------------------------------------------------------------------------------ row blocks


def _block_rows(rows: int, groups: int) -> int:
    """A power of two near the rows an expert gets, so that blocks are mostly full: 16 to 128."""
    return min(128, max(16, 1 << (max(rows // groups, 1) - 1).bit_length()))


class _Block(NamedTuple):
    expert: Int[Array, ""]
    first: Int[Array, ""]  # its first row; the last block of all is moved back to end with the rows
    own: Array  # bool [block, 1]: rows of this expert that no earlier block had


def _blocks(count: int, sizes: Array) -> tuple[int, Array, Callable[[Array], _Block]]:
    """Rows a block, number of blocks, and block by number. Blocks run over the end of their group."""
    size = min(_block_rows(count, sizes.shape[0]), count)
    starts, number = jnp.cumsum(sizes) - sizes, -(-sizes // size)
    ends = jnp.cumsum(number)

    def block(index: Array) -> _Block:
        expert = jnp.sum(ends <= index)
        begin = starts[expert] + (index - ends[expert] + number[expert]) * size
        first = jnp.minimum(begin, count - size)
        row = first + jnp.arange(size)
        return _Block(expert, first, ((row >= begin) & (row < starts[expert] + sizes[expert]))[:, None])

    return size, ends[-1], block


def _row_blocks_matmul(rows: Array, weights: Array, sizes: Array) -> Array:
    size, number, block = _blocks(rows.shape[0], sizes)

    def step(index: Array, out: Array) -> Array:
        expert, first, own = block(index)
        theirs = jax.lax.dynamic_slice_in_dim(rows, first, size)
        product = einsum("ra,ab->rb", theirs, weights[expert].astype(rows.dtype))
        product = jnp.where(own, product, jax.lax.dynamic_slice_in_dim(out, first, size))
        return jax.lax.dynamic_update_slice_in_dim(out, product, first, 0)

    return jax.lax.fori_loop(0, number, step, jnp.zeros((rows.shape[0], weights.shape[2]), rows.dtype))


def _row_blocks_outer(left: Array, right: Array, sizes: Array) -> Array:
    size, number, block = _blocks(left.shape[0], sizes)

    def step(index: Array, out: Array) -> Array:
        expert, first, own = block(index)
        theirs = jax.lax.dynamic_slice_in_dim(left, first, size)
        ours = jnp.where(own, jax.lax.dynamic_slice_in_dim(right, first, size), 0)
        return out.at[expert].add(einsum("ra,rb->ab", theirs, ours, out=jnp.float32))

    shape = (sizes.shape[0], left.shape[1], right.shape[1])
    return jax.lax.fori_loop(0, number, step, jnp.zeros(shape, jnp.float32)).astype(left.dtype)


# --------------------------------------------------------------------------------------------- padded blocks


class _Layout(NamedTuple):
    source: Int[Array, "blocks block"]  # row that stands in each place of the padded layout
    filled: Array  # bool [blocks, block]: whether one does
    expert: Int[Array, " blocks"]
    place: Int[Array, " R"]  # where each row stands, counted over all blocks


def _layout(count: int, sizes: Array) -> _Layout:
    groups = sizes.shape[0]
    block = _block_rows(count, groups)
    blocks = -(-sizes // block)
    limit = count // block + groups
    starts, block_starts = jnp.cumsum(sizes) - sizes, jnp.cumsum(blocks) - blocks
    expert = jnp.clip(jnp.searchsorted(jnp.cumsum(blocks), jnp.arange(limit), side="right"), 0, groups - 1)
    within = (jnp.arange(limit) - block_starts[expert])[:, None] * block + jnp.arange(block)
    filled = within < sizes[expert][:, None]
    owner = jnp.clip(jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(count), side="right"), 0, groups - 1)
    place = block_starts[owner] * block + jnp.arange(count) - starts[owner]
    return _Layout(jnp.where(filled, starts[expert][:, None] + within, 0), filled, expert, place)


def _padded_blocks_matmul(rows: Array, weights: Array, sizes: Array) -> Array:
    layout = _layout(rows.shape[0], sizes)
    out = einsum("nra,nab->nrb", rows[layout.source], weights[layout.expert].astype(rows.dtype))
    return _owned(out.reshape(-1, weights.shape[2])[layout.place], sizes)


def _padded_blocks_outer(left: Array, right: Array, sizes: Array) -> Array:
    layout = _layout(left.shape[0], sizes)
    right = jnp.where(layout.filled[..., None], right[layout.source], 0)
    products = einsum("nra,nrb->nab", left[layout.source], right, out=jnp.float32)
    return jax.ops.segment_sum(products, layout.expert, sizes.shape[0], indices_are_sorted=True).astype(left.dtype)


# ---------------------------------------------------------------------------------------------------- ragged


def _ragged_matmul(rows: Array, weights: Array, sizes: Array) -> Array:
    return _owned(jax.lax.ragged_dot(rows, weights.astype(rows.dtype), sizes, precision=precision(rows.dtype)), sizes)


def _ragged_outer(left: Array, right: Array, sizes: Array) -> Array:
    weights = jax.ShapeDtypeStruct((sizes.shape[0], left.shape[1], right.shape[1]), left.dtype)
    (product,) = jax.linear_transpose(functools.partial(_ragged_matmul, left, sizes=sizes), weights)(right)
    return product


row_blocks = Grouped(_row_blocks_matmul, _row_blocks_outer)
padded_blocks = Grouped(_padded_blocks_matmul, _padded_blocks_outer)
ragged = Grouped(_ragged_matmul, _ragged_outer)

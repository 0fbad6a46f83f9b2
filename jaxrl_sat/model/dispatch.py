"""Dropless expert computation: sort rows by expert, then run each expert's feed-forward block on its rows.

The three formulations compute the same, and each runs on every platform:

    row_blocks     CPU: a loop over blocks of rows, each of one expert, through the whole feed-forward block
    padded_blocks  GPU: groups padded to whole blocks, one batched matmul with the weights of each block
    ragged         TPU: `jax.lax.ragged_dot` (elsewhere XLA lowers it to a dense product with every expert), and a
                   Pallas kernel of megablox for the gradient of the weights
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_sat.model import blocks
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
    order, inverse, sizes = by_expert(expert_ids, gate.shape[0])
    chosen = expert_ids.shape[1]
    row_weights = _spread(weights.reshape(-1), order, inverse, 1)
    if _plain(gate, numerics):
        return _feed_forward(chosen, x, (order, inverse), row_weights, sizes, gate, up, down)
    rows = _spread(x, order, inverse, chosen)
    return collect(grouped_ffn(rows, row_weights, sizes, gate, up, down, numerics), order, inverse, chosen)


def _plain(weight: Weight, numerics: Numerics) -> bool:
    return numerics == "none" and not isinstance(weight, QArray)


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
    if _plain(gate, numerics):
        return _feed_forward(1, rows, None, row_weights, sizes, gate, up, down)
    gated, lifted = (saved(grouped_product(rows, weight, sizes)) for weight in (gate, up))
    return grouped_product(blocks.hidden(gated, lifted, row_weights), down, sizes)


def by_expert(expert_ids: Int[Array, "N k"], number: int) -> tuple[Array, Array, Array]:
    """The order [N * k] of choices by expert, its inverse, and how many each of `number` experts has, int32 [E].

    Choices of no expert have a number past the last, and come last.
    """
    flat = expert_ids.reshape(-1)
    order = saved(stable_order(flat, number + 1), ROUTING)
    return order, inverse_of(order), jnp.sum(flat[:, None] == jnp.arange(number), axis=0, dtype=jnp.int32)


def stable_order(ids: Array, groups: int) -> Array:
    """`argsort(ids)`, as a sort of one integer key, several times faster, where (id, place) fits in one."""
    if ids.size * groups >= 2**31:
        return jnp.argsort(ids)
    return jnp.sort(ids * ids.size + jnp.arange(ids.size, dtype=jnp.int32)) % ids.size


def inverse_of(order: Array) -> Array:
    """The permutation that puts back what `order` has permuted."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)


def permute(rows: Array, order: Array) -> Array:
    """`rows[order]`, where `order` is a permutation, or part of one."""
    # Unique indices make the gradient a plain permutation: no atomics, the same bits every time.
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds", wrap_negative_indices=False)


def _spread_rows(x: Array, order: Array, inverse: Array, copies: int) -> Array:
    """`copies` rows of each of x [N, ...], in the given order of the N * copies rows."""
    return _taken(x, order // copies)


def _collect_rows(rows: Array, order: Array, inverse: Array, copies: int) -> Array:
    """The sum of each one's copies, rounded once."""
    # Copy by copy: XLA fuses the gathers into the sum, where a gather of all rows would be written out and read again.
    places = inverse.reshape(-1, copies)
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    taken = [permute(rows, places[:, copy]).astype(wide) for copy in range(copies)]
    return functools.reduce(jnp.add, taken).astype(rows.dtype)


# Each is the other's transpose; told so, neither needs a scatter.
_spread: Any = jax.custom_vjp(_spread_rows, nondiff_argnums=(3,))
_spread.defvjp(
    lambda x, order, inverse, copies: (_spread_rows(x, order, inverse, copies), (order, inverse)),
    lambda copies, orders, cotangent: (collect(cotangent, *orders, copies), None, None),
)
collect: Any = jax.custom_vjp(_collect_rows, nondiff_argnums=(3,))
collect.defvjp(
    lambda rows, order, inverse, copies: (_collect_rows(rows, order, inverse, copies), (order, inverse)),
    lambda copies, orders, cotangent: (_spread(cotangent, *orders, copies), None, None),
)


# --------------------------------------------------------------------------------- plain feed-forward block


# Spreading tokens to rows and collecting them is part of it, so that a formulation may do without the spread copy.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(copies: int, x: Array, orders: tuple[Array, Array] | None, *args: Array) -> Array:
    """`grouped_ffn` of x in the given order of its copies, and the sum of each one's copies; None: of x as it is."""
    return _forward(copies, x, orders, *args)[0]


def _forward(copies: int, x: Array, orders: tuple[Array, Array] | None, *args: Array) -> tuple[Array, Any]:
    source = None if orders is None else orders[0] // copies
    out, gated, lifted = _by_platform("forward", x, source, *args)
    return _collected(out, orders, copies), (x, orders, *args, saved(gated), saved(lifted))


def _backward(copies: int, kept: Any, d_out: Array) -> tuple[Any, ...]:
    x, orders, *args = kept
    source = None if orders is None else orders[0] // copies
    d_rows, d_weights, *d_experts = _by_platform("backward", x, source, *args, d_out)
    return _collected(d_rows, orders, copies), None, d_weights, None, *d_experts


def _collected(rows: Array, orders: tuple[Array, Array] | None, copies: int) -> Array:
    return rows if orders is None else _collect_rows(rows, *orders, copies)


_feed_forward.defvjp(_forward, _backward)


def _by_platform(part: str, *args: Array | None) -> Any:
    """Chosen when lowered, so that a program compiled here for another platform takes that one's formulation."""
    cpu, gpu, tpu = (getattr(formulation, part) for formulation in (row_blocks, padded_blocks, ragged))
    return jax.lax.platform_dependent(*args, cpu=cpu, tpu=tpu, default=gpu)


class Formulation(NamedTuple):
    """One way to compute; the first sizes[0] rows belong to expert 0, the next sizes[1] to expert 1, ...

    `matmul`: (rows [R, A], weights [E, A, B], sizes [E]) -> rows[r] @ weights[e(r)], 0 beyond the sum of `sizes`.
    `outer`: (rows [R, A], rows [R, B], sizes) -> [E, A, B], the sum of outer products over each expert's rows.
    `forward`: (x, source, the other arguments of `grouped_ffn`) -> (its result for rows x[source], or x where source is
    None, rows @ gate, rows @ up).
    `backward`: the same arguments, these products, the cotangent -> gradient in rows, row weights, gate, up and down.
    """

    matmul: Callable[[Array, Array, Array], Array]
    outer: Callable[[Array, Array, Array], Array]
    forward: Callable[..., tuple[Array, Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array, Array, Array]]


def _taken(x: Array, source: Array | None) -> Array:
    return x if source is None else x.at[source].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _of_products(matmul: Callable[..., Array], outer: Callable[..., Array]) -> Formulation:
    """The formulation that takes all rows through one product after the other."""

    def forward(x: Array, source: Array | None, row_weights: Array, sizes: Array, *weights: Array) -> Any:
        rows, (gate, up, down) = _taken(x, source), weights
        gated, lifted = (matmul(rows, weight, sizes) for weight in (gate, up))
        return matmul(blocks.hidden(gated, lifted, row_weights), down, sizes), gated, lifted

    def backward(x: Array, source: Array | None, row_weights: Array, sizes: Array, *more: Array) -> Any:
        gate, up, down, gated, lifted, d_out = more
        rows, d_out = _taken(x, source), _taken(d_out, source)
        hidden, pull = jax.vjp(blocks.hidden, gated, lifted, row_weights)
        d_gated, d_lifted, d_weights = pull(matmul(d_out, jnp.swapaxes(down, 1, 2), sizes))
        from_gate, from_up = (
            matmul(d, jnp.swapaxes(weight, 1, 2), sizes) for d, weight in ((d_gated, gate), (d_lifted, up))
        )
        d_gate, d_up = (outer(rows, d, sizes) for d in (d_gated, d_lifted))
        return from_gate + from_up, d_weights, d_gate, d_up, outer(hidden, d_out, sizes)

    return Formulation(matmul, outer, forward, backward)


row_blocks = Formulation(blocks.matmul, blocks.outer, blocks.forward, blocks.backward)


# ------------------------------------------------------------------------------------------ quantised products


def grouped_product(
    rows: Float[Array, "R A"], weights: Float[Weight, "E A B"], sizes: Int[Array, " E"]
) -> Float[Array, "R B"]:
    """rows[r] @ weights[e(r)] in the numbers that `weights` are quantised to, else quantised as they come.

    8-bit values are multiplied in the dtype of `rows`, which holds them exactly: no backend but the newest TPU has an
    8-bit grouped product.
    """
    if isinstance(weights, QArray):
        return _of_values(quantise(rows, (0,)), weights, sizes, rows.dtype)
    return _quantised_matmul(rows, weights, sizes)


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


def _owned(rows: Array, sizes: Array) -> Array:
    """The rows that belong to an expert, and 0 for those beyond."""
    return jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None], rows, 0)


# --------------------------------------------------------------------------------------------- padded blocks


class _Layout(NamedTuple):
    source: Int[Array, "blocks block"]  # row that stands in each place of the padded layout
    filled: Array  # bool [blocks, block]: whether one does
    expert: Int[Array, " blocks"]
    place: Int[Array, " R"]  # where each row stands, counted over all blocks


def _layout(count: int, sizes: Array) -> _Layout:
    groups = sizes.shape[0]
    # a power of two at or above the rows that a group has on average
    block = min(128, max(16, 1 << (max(count // groups, 1) - 1).bit_length()))
    number = -(-sizes // block)
    limit = count // block + groups
    starts, block_starts = jnp.cumsum(sizes) - sizes, jnp.cumsum(number) - number
    expert = jnp.clip(jnp.searchsorted(jnp.cumsum(number), jnp.arange(limit), side="right"), 0, groups - 1)
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
    # XLA lowers this product of ragged_dot to a dense one over every expert on TPU too, where a Pallas kernel has it.
    # Every platform's alternative is traced, and the kernel refuses other dtypes when it is.
    if left.dtype not in (jnp.bfloat16, jnp.float32):
        return _ragged_dot_outer(left, right, sizes)
    return jax.lax.platform_dependent(left, right, sizes, tpu=tpu_outer, default=_ragged_dot_outer)


def _ragged_dot_outer(left: Array, right: Array, sizes: Array) -> Array:
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(left, right, sizes, numbers, precision=precision(left.dtype))


TILE = 512, 1024, 1024
"""Rows, and elements of either side, that the kernel takes at once."""


def tpu_outer(left: Array, right: Array, sizes: Array, interpret: bool = False) -> Array:
    """Sum of outer products over each expert's rows, by megablox's kernel; rows are filled up to whole tiles."""
    # Imported when a sparse layer is first traced: loading Pallas takes a second that no other program need spend.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    extent = (*left.shape, right.shape[1])
    rows, *wide = (min(limit, -(-size // 128) * 128) for limit, size in zip(TILE, extent, strict=True))
    left, right = (jnp.pad(x, ((0, -x.shape[0] % rows), (0, 0))) for x in (left, right))
    with jax.default_matmul_precision("highest" if left.dtype == jnp.float32 else "default"):
        return tgmm(left.T, right, sizes, left.dtype, (rows, *wide), interpret=interpret)


padded_blocks = _of_products(_padded_blocks_matmul, _padded_blocks_outer)
ragged = _of_products(_ragged_matmul, _ragged_outer)

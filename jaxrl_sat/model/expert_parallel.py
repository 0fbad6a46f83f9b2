"""Experts spread over devices. No token is ever dropped, and the result is that of one device but for rounding.

Two forms. Devices that share the experts and have the same tokens (the sampler's) each compute the rows of their own
experts, and the shares are summed. Devices with different tokens (the trainer's) send each row to the device of its
expert and get it back, in all-to-all exchanges of a fixed number of rows a pair of devices; how many exchanges it takes
follows from the fullest pair, so that uneven routing costs time and never a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_sat.layout import Cut, Layout
from jaxrl_sat.model import decode_experts, dispatch
from jaxrl_sat.model.output_first import OutputFirst
from jaxrl_sat.model.piece import Piece
from jaxrl_sat.model.quantised import Weight
from jaxrl_sat.types import Numerics

ROOM = 1.25
"""Rows a pair of devices exchanges at once, over those that even routing would give it."""


def experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Weight, "E D F"] | OutputFirst,
    up: Float[Weight, "E D F"] | OutputFirst,
    down: Float[Weight, "E F D"] | OutputFirst,
    piece: Piece,
) -> Float[Array, "N D"]:
    """`dispatch.experts` over all devices; of the experts, this device has the E (and of their width the F) given."""
    layout, cut = piece.layout, piece.experts
    if piece.experts_see_other_tokens:
        out = _exchanged(x, expert_ids, weights, gate, up, down, piece)
        return layout.total(out, piece.expert_mlp)
    if cut is not None:
        expert_ids, weights = _own(expert_ids, weights, jax.tree.leaves(gate)[0].shape[0], layout.index(cut))
    out = _computing(gate, piece.numerics)(x, expert_ids, weights, gate, up, down)
    return layout.total(out, cut, piece.expert_mlp)


def _computing(gate: Weight | OutputFirst, numerics: Numerics) -> Callable[..., Array]:
    """What computes experts whose weights lie as `gate` does."""
    if isinstance(gate, OutputFirst):
        return decode_experts.experts
    return functools.partial(dispatch.experts, numerics=numerics)


def _own(expert_ids: Array, weights: Array, local: int, index: Array) -> tuple[Array, Array]:
    """The choices that fall on experts of device `index`, numbered from 0; the others weigh nothing."""
    own = expert_ids - index * local
    mine = (own >= 0) & (own < local)
    return jnp.where(mine, own, local), jnp.where(mine, weights, 0)


class _Plan(NamedTuple):
    """Rows of this device, one a token and choice, in the order of their experts."""

    row_of: Int[Array, " R"]  # place in [N, k] of the row at each place of the order
    place_of: Int[Array, " R"]  # the inverse
    expert: Int[Array, " R"]  # by place in the order
    starts: Int[Array, " W"]  # first place of the rows for each device
    counts: Int[Array, " W"]
    rounds: Int[Array, ""]  # exchanges needed, the same on all devices
    room: int  # rows a pair of devices exchanges at once


def _plan(expert_ids: Array, local: int, layout: Layout, cut: Cut) -> _Plan:
    ways = layout.ways(cut)
    flat = expert_ids.reshape(-1)
    order = dispatch.stable_order(flat, local * ways)
    counts = jnp.sum(flat[:, None] // local == jnp.arange(ways), axis=0, dtype=jnp.int32)
    room = min(order.size, math.ceil(ROOM * order.size / ways))
    rounds = -(-jnp.max(counts) // room)
    # Every device of the mesh goes as often as the slowest, not only those it exchanges with: one order of collectives.
    rounds = layout.largest(rounds, tuple(layout.mesh.axis_names) if layout.mesh is not None else None)
    return _Plan(order, dispatch.inverse_of(order), flat[order], jnp.cumsum(counts) - counts, counts, rounds, room)


def _swap(x: Any, cut: Cut) -> Any:
    """Row block i to device i of the cut; back comes what each device had for this one. Its own inverse."""
    return jax.tree.map(lambda a: jax.lax.all_to_all(a, cut, split_axis=0, concat_axis=0, tiled=True), x)


class _Parcel(NamedTuple):
    """What one exchange sends, [W * room, ...]: block w goes to device w."""

    place: Int[Array, " S"]  # in the order; past its end where nothing is sent
    expert: Int[Array, " S"]  # of the receiving device, one past its last where nothing is sent


def _parcel(plan: _Plan, index: Array, local: int) -> _Parcel:
    ways = plan.counts.shape[0]
    nth = index * plan.room + jnp.arange(plan.room)[None]
    real = nth < plan.counts[:, None]
    place = jnp.where(real, plan.starts[:, None] + nth, plan.expert.size).reshape(-1)
    first = jnp.repeat(jnp.arange(ways) * local, plan.room)
    expert = jnp.where(real.reshape(-1), _take(plan.expert, place) - first, local)
    return _Parcel(place, expert)


def _serve(
    rows: Array, weights: Array, gate: Array, up: Array, down: Array, expert: Array, numerics: Numerics
) -> Float[Array, "S D"]:
    """The experts of this device on rows that were sent to it, in the order they came."""
    local = gate.shape[0]
    order = dispatch.stable_order(expert, local + 1)
    sizes = jnp.sum(expert[:, None] == jnp.arange(local), axis=0, dtype=jnp.int32)
    rows, weights = dispatch.permute(rows, order), dispatch.permute(weights, order)
    out = dispatch.grouped_ffn(rows, weights, sizes, gate, up, down, numerics)
    return dispatch.permute(out, dispatch.inverse_of(order))


def _take(rows: Array, place: Array) -> Array:
    return rows.at[place].get(mode="fill", fill_value=0)


def _put(rows: Array, place: Array, new: Array) -> Array:
    return rows.at[place].set(new.astype(rows.dtype), mode="drop", unique_indices=True)


def _primal(x: Array, expert_ids: Array, weights: Array, gate: Array, up: Array, down: Array, piece: Piece) -> Array:
    local, chosen, cut = gate.shape[0], expert_ids.shape[1], piece.experts
    plan = _plan(expert_ids, local, piece.layout, cut)
    by_place = weights.reshape(-1)[plan.row_of]

    def once(index: Array, out: Array) -> Array:
        parcel = _parcel(plan, index, local)
        token = _take(plan.row_of, parcel.place) // chosen
        rows, row_weights, expert = _swap((x[token], _take(by_place, parcel.place), parcel.expert), cut)
        answer = _serve(rows, row_weights, gate, up, down, expert, piece.numerics)
        return _put(out, parcel.place, _swap(answer, cut))

    out = jax.lax.fori_loop(0, plan.rounds, once, jnp.zeros((plan.row_of.size, x.shape[1]), x.dtype))
    return dispatch.collect(out, plan.row_of, plan.place_of, chosen)


def _forward(x: Array, expert_ids: Array, weights: Array, gate: Array, up: Array, down: Array, piece: Piece):
    out = _primal(x, expert_ids, weights, gate, up, down, piece)
    return out, (x, expert_ids, weights, gate, up, down)


def _backward(piece: Piece, kept: tuple[Array, ...], cotangent: Array):
    """The same exchanges with the rows' cotangents beside them; answers needed are computed again."""
    x, expert_ids, weights, gate, up, down = kept
    local, chosen, cut = gate.shape[0], expert_ids.shape[1], piece.experts
    plan = _plan(expert_ids, local, piece.layout, cut)
    by_place = weights.reshape(-1)[plan.row_of]

    def once(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_rows, d_weights, *d_experts = carry
        parcel = _parcel(plan, index, local)
        token = _take(plan.row_of, parcel.place) // chosen
        sent = (x[token], _take(by_place, parcel.place), cotangent[token], parcel.expert)
        rows, row_weights, row_cotangents, expert = _swap(sent, cut)
        serve: Callable[..., Array] = functools.partial(_serve, expert=expert, numerics=piece.numerics)
        _, pull = jax.vjp(serve, rows, row_weights, gate, up, down)
        back_rows, back_weights, *more = pull(row_cotangents)
        back_rows, back_weights = _swap((back_rows, back_weights), cut)
        d_experts = [old + new.astype(jnp.float32) for old, new in zip(d_experts, more, strict=True)]
        return _put(d_rows, parcel.place, back_rows), _put(d_weights, parcel.place, back_weights), *d_experts

    zeros = jnp.zeros((plan.row_of.size, x.shape[1]), x.dtype), jnp.zeros(plan.row_of.size, weights.dtype)
    empty = (*zeros, *(jnp.zeros(weight.shape, jnp.float32) for weight in (gate, up, down)))
    d_rows, d_weights, *d_experts = jax.lax.fori_loop(0, plan.rounds, once, empty)
    d_gate, d_up, d_down = (d.astype(gate.dtype) for d in d_experts)
    d_x = dispatch.collect(d_rows, plan.row_of, plan.place_of, chosen)
    return d_x, None, d_weights[plan.place_of].reshape(weights.shape), d_gate, d_up, d_down


_exchanged: Any = jax.custom_vjp(_primal, nondiff_argnums=(6,))
_exchanged.defvjp(_forward, _backward)

"""The decoder as pure functions: one layer function for training, prefill and decoding.

The whole pass runs inside `Layout.manual`: what stands here is what one device does with its piece of the tokens and of
the weights. On one device nothing is cut, and the collectives vanish.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_sat.layout import Layout
from jaxrl_sat.model import attention_kernels
from jaxrl_sat.model.attention import Rope, rope, rotate
from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.embedding import embed
from jaxrl_sat.model.execution import ONE_DEVICE, Execution
from jaxrl_sat.model.head import unembed
from jaxrl_sat.model.moe import Router, moe, router_sums
from jaxrl_sat.model.ops import INPUT, rms_norm, saved
from jaxrl_sat.model.output_first import OutputFirst
from jaxrl_sat.model.params import gathered, layer_cuts, param_specs
from jaxrl_sat.model.piece import TOKENS, Piece
from jaxrl_sat.model.quantised import project
from jaxrl_sat.types import AnyArray, Params, RouterSums, RouterTrace

# (queries, keys, values, this layer's cache) -> (attended values, what the layer hands on as its cache)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


@struct.dataclass
class ForwardOut:
    """What leaves the last layer, and the experts each token took: valid on all but padding."""

    hidden: AnyArray  # [B, T, D], after the final norm
    routing: RouterTrace
    router: RouterSums | None  # where the execution asks for them


@struct.dataclass
class LogitsOut:
    """`logits[b, t]` predicts token t + 1."""

    logits: AnyArray  # float32 [B, T, V]
    routing: RouterTrace


def layer(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    angles: Rope,
    attend: Attend,
    cache: Any,
    replay: tuple[Array, Array] | None,
    piece: Piece,
) -> tuple[Float[Array, "B T D"], Any, Router | None]:
    """One decoder layer: (x, its cache, recorded routing) -> (x, what `attend` hands on, routing; None if dense).

    `params` has this device's heads and experts, and its part of the width of the feed-forward blocks.
    """
    p = _own_key_value_heads(params["attention"], config, piece)
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    q, k, v = (saved(project("btd,dhk->bthk", normed, p[name], piece.numerics)) for name in "qkv")
    if config.qk_norm:
        q = rms_norm(q, p["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, p["k_norm"], config.rms_norm_eps)
    attended, cache = attend(rotate(q, angles), rotate(k, angles), v, cache)
    attended = project("bthk,hkd->btd", attended, p["o"], piece.numerics)
    x = saved(x + piece.layout.total(attended, piece.heads))

    normed = rms_norm(x, params["mlp_norm"], config.rms_norm_eps)
    p = params["mlp"]
    if "router" not in p:
        gate, up = (saved(project("btd,df->btf", normed, p[name], piece.numerics)) for name in ("gate", "up"))
        out = project("btf,fd->btd", jax.nn.silu(gate) * up, p["down"], piece.numerics)
        return x + piece.layout.total(out, piece.mlp), cache, None
    batch, length, width = x.shape
    if replay is not None:
        replay = (replay[0].reshape(batch * length, -1), replay[1].reshape(-1))
    out, router = moe(p, config, normed.reshape(-1, width), replay, piece)
    shaped = jax.tree.map(lambda a: a.reshape(batch, length, -1), router)
    return x + out.reshape(x.shape), cache, shaped


def _own_key_value_heads(p: Params, config: ModelConfig, piece: Piece) -> Params:
    """Where key-value heads are not cut with the attention heads, those that this device's heads attend by."""
    ways, heads = piece.layout.ways(piece.heads), config.num_key_value_heads
    own = max(1, heads // ways)
    axis = 0 if isinstance(p["k"], OutputFirst) else 1
    if jax.tree.leaves(p["k"])[0].shape[axis] == own:
        return p
    first = piece.layout.index(piece.heads) * heads // ways
    take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=own, axis=axis)
    return {**p, **{name: jax.tree.map(take, p[name]) for name in "kv"}}


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    replay: RouterTrace | None = None,
    execution: Execution = ONE_DEVICE,
) -> ForwardOut:
    """Hidden states after the final norm, and routing [M, B, T, k].

    `segment_ids` None is one segment a row; id 0 is padding, which no other segment sees. `positions` None counts from
    0 in each segment. Where `replay` is valid its expert ids are taken; gates always come from the live router.
    """
    if segment_ids is None:
        segment_ids = jnp.ones(tokens.shape, jnp.int32)
    if positions is None:
        positions = segment_positions(segment_ids)
    layout = execution.layout
    spec = layout.spec(TOKENS, tokens.shape)
    specs = _without_head(param_specs(config, layout))
    # Inside, a trace is [M, B, T * k]: with the k ids of a token last it would be padded to whole tiles of a TPU.
    trace_spec = PartitionSpec(None, *spec)
    layers, chosen = config.num_sparse_layers, config.num_experts_per_tok if config.num_sparse_layers else 0
    flat = (layers, tokens.shape[0], tokens.shape[1] * chosen)
    recorded = None if replay is None else (replay.expert_ids.reshape(flat), replay.valid)
    run = functools.partial(_forward, config=config, execution=execution, spec=spec)
    hidden, expert_ids, sums = layout.manual(
        run,
        (specs, spec, spec, spec, None if replay is None else (trace_spec, spec)),
        (PartitionSpec(*spec, None), trace_spec, PartitionSpec()),
    )(_without_head(params), tokens, positions, segment_ids, recorded)
    trace = RouterTrace(expert_ids=expert_ids.reshape(layers, *tokens.shape, chosen), valid=segment_ids != 0)
    return ForwardOut(hidden=hidden, routing=trace, router=sums)


def _without_head(tree: Params) -> Params:
    return {name: node for name, node in tree.items() if name != "head"}


def _forward(
    params: Params,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    recorded: tuple[Array, Array] | None,
    config: ModelConfig,
    execution: Execution,
    spec: PartitionSpec,
) -> tuple[Array, Array, RouterSums | None]:
    """One device's part of `forward`."""
    layout, piece = execution.layout, Piece.of(config, execution, spec)
    row_segments = layout.gather(segment_ids, piece.sequence, 1)

    def attend(q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        k, v = (layout.gather(x, piece.sequence, 1) for x in (k, v))
        place = (layout.index(piece.sequence), layout.ways(piece.sequence))
        kernel = (attention_kernels.kernel_of(layout.device), execution.max_segments)
        return attention_kernels.attend(q, k, v, segment_ids, row_segments, *place, *kernel), cache

    angles = rope(positions, config.head_dim, config.rope_theta)

    def step(cuts: tuple[Params, Params], x: Array, layer_in: tuple[Params, Array | None]) -> tuple[Array, Any]:
        pieces, ids = layer_in
        replay = None if ids is None or recorded is None else (ids.reshape(*tokens.shape, -1), recorded[1])
        weights = gathered(pieces, *cuts, layout)
        x, _, router = layer(weights, config, saved(x, INPUT), angles, attend, None, replay, piece)
        if router is None:
            return x, None
        sums = router_sums(router, segment_ids != 0, piece) if execution.router_sums else None
        return x, (router.expert_ids.reshape(tokens.shape[0], -1), sums)

    x = embed(params["embedding"], tokens, param_specs(config, layout)["embedding"], layout)
    found: list[Any] = []
    start = 0
    for run in config.runs:
        stop = start + len(run) * run.sparse
        ids = jax.lax.slice_in_dim(recorded[0], start, stop) if recorded is not None and run.sparse else None
        block = execution.checkpointed(functools.partial(step, layer_cuts(config, layout, run)), len(run))
        x, routing = jax.lax.scan(block, x, (params[run.name], ids), length=len(run))
        found += [routing] if run.sparse else []
        start = stop
    x = rms_norm(x, whole_norm(params, config, layout), config.rms_norm_eps)
    if not found:
        return x, jnp.zeros((0, tokens.shape[0], 0), jnp.int32), None
    expert_ids, sums = jax.tree.map(lambda *runs: jnp.concatenate(runs), *found)
    return x, expert_ids, None if sums is None else dataclasses.replace(sums, tokens=sums.tokens[0])


def whole_norm(params: Params, config: ModelConfig, layout: Layout) -> Float[Array, " D"]:
    """Inside `Layout.manual`: the scale of the final norm."""
    return layout.gather(params["final_norm"], param_specs(config, layout)["final_norm"][0], 0)


def segment_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How far each entry stands from the start of its segment."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    begins = jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], 1)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def logits(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    replay: RouterTrace | None = None,
    execution: Execution = ONE_DEVICE,
) -> LogitsOut:
    """Next-token logits [B, T, V] in float32, and routing. Arguments as for `forward`."""
    out = forward(params, config, tokens, positions, segment_ids, replay, execution)
    return LogitsOut(logits=unembed(params, config, out.hidden, execution), routing=out.routing)

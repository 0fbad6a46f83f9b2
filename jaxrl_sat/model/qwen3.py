"""The decoder as pure functions: one layer function for training, prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.attention import Rope, attend_segments, rope, rotate
from jaxrl_sat.model.config import ModelConfig, Run
from jaxrl_sat.model.head import unembed
from jaxrl_sat.model.moe import moe
from jaxrl_sat.model.ops import PRODUCT, ROUTING, einsum, rms_norm, saved
from jaxrl_sat.types import AnyArray, Params, RouterTrace

# (queries, keys, values, this layer's cache) -> (attended values, what the layer hands on as its cache)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


@struct.dataclass
class ForwardOut:
    """What leaves the last layer, and the experts each token took: valid on all but padding."""

    hidden: AnyArray  # [B, T, D], after the final norm
    routing: RouterTrace


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
) -> tuple[Float[Array, "B T D"], Any, Int[Array, "B T k"] | None]:
    """One decoder layer: (x, its cache, recorded routing) -> (x, what `attend` hands on, expert ids; None if dense)."""
    p = params["attention"]
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    q, k, v = (saved(einsum("btd,dhk->bthk", normed, p[name])) for name in "qkv")
    if config.qk_norm:
        q = rms_norm(q, p["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, p["k_norm"], config.rms_norm_eps)
    attended, cache = attend(rotate(q, angles), rotate(k, angles), v, cache)
    x = saved(x + einsum("bthk,hkd->btd", saved(attended), p["o"]))

    normed = rms_norm(x, params["mlp_norm"], config.rms_norm_eps)
    p = params["mlp"]
    if "router" not in p:
        gate, up = (saved(einsum("btd,df->btf", normed, p[name])) for name in ("gate", "up"))
        hidden = jax.nn.silu(gate) * up
        return x + einsum("btf,fd->btd", hidden, p["down"]), cache, None
    batch, length, width = x.shape
    if replay is not None:
        replay = (replay[0].reshape(batch * length, -1), replay[1].reshape(-1))
    out, ids = moe(p, config, normed.reshape(-1, width), replay)
    return x + out.reshape(x.shape), cache, ids.reshape(batch, length, -1)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    replay: RouterTrace | None = None,
    remat: bool = False,
) -> ForwardOut:
    """Hidden states after the final norm, and routing [M, B, T, k].

    `segment_ids` None is one segment a row; id 0 is padding, which no other segment sees. `positions` None counts from
    0 in each segment. Where `replay` is valid its expert ids are taken; gates always come from the live router. With
    `remat` the backward pass keeps only a layer's input and routing; without, its matrix products too.
    """
    if segment_ids is None:
        segment_ids = jnp.ones(tokens.shape, jnp.int32)
    if positions is None:
        positions = segment_positions(segment_ids)
    attend: Attend = lambda q, k, v, cache: (attend_segments(q, k, v, segment_ids), cache)  # noqa: E731
    angles = rope(positions, config.head_dim, config.rope_theta)
    x = jnp.take(params["embedding"], tokens, axis=0)
    routing, start = [], 0
    for run in config.runs:
        stop = start + len(run) * run.sparse
        recorded = None
        if replay is not None and run.sparse:
            recorded = jax.lax.slice_in_dim(replay.expert_ids, start, stop)
        x, ids = _scan_run(params[run.name], config, run, x, angles, attend, recorded, replay, remat)
        if run.sparse:
            routing.append(ids)
        start = stop
    expert_ids = jnp.concatenate(routing) if routing else jnp.zeros((0, *tokens.shape, 0), jnp.int32)
    hidden = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    return ForwardOut(hidden=hidden, routing=RouterTrace(expert_ids=expert_ids, valid=segment_ids != 0))


def _scan_run(
    params: Params,
    config: ModelConfig,
    run: Run,
    x: Array,
    angles: Rope,
    attend: Attend,
    recorded: Array | None,
    replay: RouterTrace | None,
    remat: bool,
) -> tuple[Array, Array | None]:
    def step(x: Array, layer_in: tuple[Params, Array | None]) -> tuple[Array, Array | None]:
        layer_params, layer_ids = layer_in
        layer_replay = None if layer_ids is None or replay is None else (layer_ids, replay.valid)
        x, _, ids = layer(layer_params, config, x, angles, attend, None, layer_replay)
        return x, ids

    policy = jax.checkpoint_policies.save_only_these_names(*([ROUTING] if remat else [ROUTING, PRODUCT]))
    # The two directions of a scan are compiled apart, so recomputation needs no guard against being merged away.
    return jax.lax.scan(jax.checkpoint(step, policy=policy, prevent_cse=False), x, (params, recorded), length=len(run))


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
) -> LogitsOut:
    """Next-token logits [B, T, V] in float32, and routing. Arguments as for `forward`."""
    out = forward(params, config, tokens, positions, segment_ids, replay)
    return LogitsOut(logits=unembed(params, config, out.hidden), routing=out.routing)

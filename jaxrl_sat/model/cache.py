"""Prefill and decoding over a cache of keys and values.

Layers are unstacked once, when weights are handed to the sampler: a scan over stacked weights would copy each layer's
weights at every decode step, while a step is bounded by reading them. The layer function is the one of training.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.attention import attend_cache, attend_segments, rope
from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.head import unembed
from jaxrl_sat.model.ops import rms_norm
from jaxrl_sat.model.qwen3 import Attend, layer
from jaxrl_sat.types import AnyArray, Params

DecodeParams = Any
"""The parameters with `layers`, a tuple of one dict a layer, in place of the stacked runs."""


@struct.dataclass
class Cache:
    """Keys (after RoPE) and values of each layer: tuples of arrays [slots, length, kv_heads, head_dim]."""

    k: tuple[AnyArray, ...]
    v: tuple[AnyArray, ...]


def unstack(params: Params) -> DecodeParams:
    """One dict a layer from the stacked runs. Jit it, so that the slices are made in one dispatch."""
    runs = sorted((name for name in params if name.startswith("run")), key=lambda name: int(name[3:]))
    layers = []
    for name in runs:
        count = len(jax.tree.leaves(params[name])[0])
        layers += [jax.tree.map(lambda leaf, i=i: leaf[i], params[name]) for i in range(count)]
    return {**{name: leaf for name, leaf in params.items() if name not in runs}, "layers": tuple(layers)}


def init_cache(config: ModelConfig, slots: int, length: int, dtype: Any = "float32") -> Cache:
    """An empty cache: every position is masked until `decode` or an inserted prefill has written it."""
    shape = (slots, length, config.num_key_value_heads, config.head_dim)
    zeros = [jnp.zeros(shape, dtype) for _ in range(2 * config.num_hidden_layers)]
    return Cache(k=tuple(zeros[::2]), v=tuple(zeros[1::2]))


def prefill(
    params: DecodeParams, config: ModelConfig, tokens: Int[Array, "B P"], lengths: Int[Array, " B"]
) -> tuple[Cache, Int[Array, "M B P k"]]:
    """Keys and values of prompts from position 0, in a cache of length P, and their routing.

    Entries at and beyond a prompt's length are padding: their keys, values and expert ids mean nothing.
    """
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    attend: Attend = lambda q, k, v, _: (attend_segments(q, k, v, segment_ids), (k, v))  # noqa: E731
    _, cache, expert_ids = _layers(params, config, tokens, positions, attend, None)
    return cache, expert_ids


def decode(
    params: DecodeParams,
    config: ModelConfig,
    cache: Cache,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
) -> tuple[Float[Array, "S V"], Cache, Int[Array, "M S k"]]:
    """Feeds one token a slot at its position: next-token logits in float32, the cache with it, its routing.

    Attends to cached positions 0..position of the slot. Donate the cache: it is rewritten in place.
    """

    def attend(q: Array, k: Array, v: Array, layer_cache: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        keys, values = (_write(old, new[:, 0], positions) for old, new in zip(layer_cache, (k, v), strict=True))
        return attend_cache(q[:, 0], keys, values, positions)[:, None], (keys, values)

    x, cache, expert_ids = _layers(params, config, tokens[:, None], positions[:, None], attend, cache)
    return unembed(params, config, x[:, 0]), cache, expert_ids[:, :, 0]


def _write(cache: Array, new: Array, positions: Array) -> Array:
    return cache.at[jnp.arange(cache.shape[0]), positions].set(new.astype(cache.dtype))


def _layers(
    params: DecodeParams, config: ModelConfig, tokens: Array, positions: Array, attend: Attend, cache: Cache | None
) -> tuple[Array, Cache, Array]:
    angles = rope(positions, config.head_dim, config.rope_theta)
    x = jnp.take(params["embedding"], tokens, axis=0)
    keys, values, routing = [], [], []
    for index, layer_params in enumerate(params["layers"]):
        layer_cache = None if cache is None else (cache.k[index], cache.v[index])
        x, (k, v), ids = layer(layer_params, config, x, angles, attend, layer_cache, None)
        keys.append(k)
        values.append(v)
        if ids is not None:
            routing.append(ids)
    expert_ids = jnp.stack(routing) if routing else jnp.zeros((0, *tokens.shape, 0), jnp.int32)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps), Cache(k=tuple(keys), v=tuple(values)), expert_ids

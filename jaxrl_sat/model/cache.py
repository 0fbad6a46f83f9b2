"""Prefill and decoding over a cache of keys and values.

Layers are unstacked once, when weights are handed to the sampler: a scan over stacked weights would copy each layer's
weights at every decode step, while a step is bounded by reading them. The layer function is the one of training, and
like there each device works on its piece.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_sat.layout import Layout
from jaxrl_sat.model import attention_kernels
from jaxrl_sat.model.attention import rope
from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.embedding import embed
from jaxrl_sat.model.execution import ONE_DEVICE, Execution
from jaxrl_sat.model.head import local_logits
from jaxrl_sat.model.ops import rms_norm
from jaxrl_sat.model.output_first import reordered
from jaxrl_sat.model.params import gathered, layer_cuts, param_specs
from jaxrl_sat.model.piece import TOKENS, Piece
from jaxrl_sat.model.quantised import QArray, of_products, quantise_layer, quantised_like
from jaxrl_sat.model.qwen3 import Attend, layer, whole_norm
from jaxrl_sat.model.stored import Int8, Stored, attend_cache, attend_chunk, dtype_of, empty, stored, write
from jaxrl_sat.types import Numerics, Params

DecodeParams = Any
"""The parameters with `layers`, a tuple of one dict a layer, in place of the stacked runs."""


@struct.dataclass
class Cache:
    """Keys (after RoPE) and values of each layer: tuples of arrays [slots, heads, length, head_dim], or `Int8`.

    `heads` is `cache_heads`: where attention heads are cut finer than key-value heads, one for each piece.
    """

    k: tuple[Stored, ...]
    v: tuple[Stored, ...]

    @property
    def dtype(self) -> Any:
        """What it is stored in."""
        return dtype_of(self.k[0])


def unstack(params: Params) -> DecodeParams:
    """One dict a layer from the stacked runs. Jit it, so that the slices are made in one dispatch."""
    runs = sorted((name for name in params if name.startswith("run")), key=lambda name: int(name[3:]))
    layers = []
    for name in runs:
        count = len(jax.tree.leaves(params[name])[0])
        layers += [jax.tree.map(lambda leaf, i=i: leaf[i], params[name]) for i in range(count)]
    return {**{name: leaf for name, leaf in params.items() if name not in runs}, "layers": tuple(layers)}


def decode_params(params: Params, dtype: Any, numerics: Numerics = "none", output_first: bool = False) -> DecodeParams:
    """What decoding takes of stacked parameters: unstacked, new arrays, in `dtype` or quantised. See `Execution`.

    Weights are quantised as they come, not in `dtype`: to the values that training in the same numerics has.
    """
    taken = unstack(params)
    if numerics == "fp8":
        taken = {**taken, "layers": tuple(quantise_layer(layer) for layer in taken["layers"])}
    elif output_first:
        taken = {**taken, "layers": tuple(of_products(layer, reordered) for layer in taken["layers"])}

    def copied(leaf: Any) -> Any:
        return leaf if isinstance(leaf, QArray) else jnp.array(leaf, dtype, copy=True)

    return jax.tree.map(copied, taken, is_leaf=lambda node: isinstance(node, QArray))


def _cuts(config: ModelConfig, layout: Layout, numerics: Numerics, output_first: bool) -> list[tuple[Params, Params]]:
    """`layer_cuts` of each layer, of weights quantised or reordered."""
    cuts = [layer_cuts(config, layout, run) for run in config.runs for _ in range(len(run))]
    if numerics == "none" and not output_first:
        return cuts
    changed = quantised_like if numerics == "fp8" else reordered
    return [(of_products(specs, changed), of_products(axes, changed)) for specs, axes in cuts]


def decode_param_specs(
    config: ModelConfig, layout: Layout, numerics: Numerics = "none", output_first: bool = False
) -> DecodeParams:
    """How each of `decode_params` is cut."""
    layers = [specs for specs, _ in _cuts(config, layout, numerics, output_first)]
    rest = {name: spec for name, spec in param_specs(config, layout).items() if not name.startswith("run")}
    return {**rest, "layers": tuple(layers)}


def cache_heads(config: ModelConfig, layout: Layout) -> int:
    """Key-value heads of a cache: the model's, or one for each piece of the attention heads if those are more."""
    return max(config.num_key_value_heads, layout.ways(layout.spec(("heads",), (config.num_attention_heads,))[0]))


def cache_specs(config: ModelConfig, layout: Layout, rows: int, dtype: Any = "float32") -> Cache:
    """How each array of a cache with so many rows is cut; 0 rows: its rows lie whole on every device."""
    heads = layout.spec(("heads",), (config.num_attention_heads,))[0]
    spread = layout.spec(("rows",), (rows,))[0] if rows else None
    spec: Any = PartitionSpec(spread, heads, None, None)
    if jnp.dtype(dtype) == jnp.int8:
        spec = Int8(spec, PartitionSpec(spread, heads, None))
    return Cache(k=(spec,) * config.num_hidden_layers, v=(spec,) * config.num_hidden_layers)


def init_cache(
    config: ModelConfig, slots: int, length: int, dtype: Any = "float32", execution: Execution = ONE_DEVICE
) -> Cache:
    """An empty cache: every position is masked until `decode` or an inserted prefill has written it.

    `dtype` is a floating one, or int8 for entries with a scale for each token and head.
    """
    shape = (slots, length, cache_heads(config, execution.layout), config.head_dim)
    zeros = [empty(*shape, dtype) for _ in range(2 * config.num_hidden_layers)]
    return Cache(k=tuple(zeros[::2]), v=tuple(zeros[1::2]))


def prefill(
    params: DecodeParams,
    config: ModelConfig,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    execution: Execution = ONE_DEVICE,
    cache_dtype: Any = None,
) -> tuple[Cache, Int[Array, "M B P k"]]:
    """Keys and values of prompts from position 0, in a cache of length P, and their routing.

    Entries at and beyond a prompt's length are padding: their keys, values and expert ids mean nothing. The cache is of
    the parameters' dtype unless `cache_dtype` says otherwise; what is attended to is not rounded to it.
    """
    layout = execution.layout
    cache_dtype = params["embedding"].dtype if cache_dtype is None else cache_dtype
    rows = layout.spec(TOKENS[:1], lengths.shape)
    cut = PartitionSpec(*rows, None)
    piece = Piece.of(config, execution, cut)

    def run(params: DecodeParams, tokens: Array, lengths: Array) -> tuple[Cache, Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        segment_ids = (positions < lengths[:, None]).astype(jnp.int32)

        def attend(q: Array, k: Array, v: Array, _: Any) -> tuple[Array, Any]:
            # A prompt is one sequence, and its padding the other.
            kernel = (jnp.int32(0), 1, attention_kernels.kernel_of(layout.device), 2)
            attended = attention_kernels.attend(q, k, v, segment_ids, segment_ids, *kernel)
            return attended, (stored(k, cache_dtype), stored(v, cache_dtype))

        _, cache, expert_ids = _layers(params, config, tokens, positions, attend, None, piece)
        return cache, expert_ids

    out = (cache_specs(config, layout, tokens.shape[0], cache_dtype), PartitionSpec(None, *cut, None))
    specs = decode_param_specs(config, layout, execution.numerics, execution.output_first)
    return layout.manual(run, (specs, cut, rows), out)(params, tokens, lengths)


def prefill_chunk(
    params: DecodeParams,
    config: ModelConfig,
    cache: Cache,
    tokens: Int[Array, "B C"],
    positions: Int[Array, "B C"],
    start: Int[Array, ""],
    execution: Execution = ONE_DEVICE,
) -> tuple[Cache, Int[Array, "M B C k"]]:
    """Reads positions start, start + 1, ... of sequences whose earlier ones are in the cache: it with them, routing.

    `start` is a multiple of C. `positions` says where in the cache each entry is kept; those beyond it are not. Donate
    the cache: it is rewritten in place.
    """
    layout = execution.layout
    rows = layout.spec(TOKENS[:1], tokens.shape[:1])
    cut = PartitionSpec(*rows, None)
    piece = Piece.of(config, execution, cut)

    def run(params: DecodeParams, cache: Cache, tokens: Array, positions: Array, start: Array) -> tuple[Cache, Array]:
        def attend(q: Array, k: Array, v: Array, layer_cache: tuple[Stored, Stored]) -> tuple[Array, Any]:
            attended = attend_chunk(q, k, v, layer_cache, start)
            kept = tuple(write(old, new, positions) for old, new in zip(layer_cache, (k, v), strict=True))
            return attended, kept

        places = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        _, cache, expert_ids = _layers(params, config, tokens, places, attend, cache, piece)
        return cache, expert_ids

    specs = decode_param_specs(config, layout, execution.numerics, execution.output_first)
    caches = cache_specs(config, layout, tokens.shape[0], cache.dtype)
    taken = (specs, caches, cut, cut, PartitionSpec())
    given = (caches, PartitionSpec(None, *cut, None))
    return layout.manual(run, taken, given)(params, cache, tokens, positions, start)


def decode(
    params: DecodeParams,
    config: ModelConfig,
    cache: Cache,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    execution: Execution = ONE_DEVICE,
) -> tuple[Float[Array, "S V"], Cache, Int[Array, "M S k"]]:
    """Feeds one token a slot at its position: next-token logits in float32, the cache with it, its routing.

    Attends to cached positions 0..position of the slot. Donate the cache: it is rewritten in place.
    """
    layout = execution.layout
    rows = layout.spec(TOKENS[:1], tokens.shape)
    piece = Piece.of(config, execution, PartitionSpec(*rows, None))
    specs = decode_param_specs(config, layout, execution.numerics, execution.output_first)
    head = specs["head" if "head" in specs else "embedding"]

    def run(params: DecodeParams, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache, Array]:
        def attend(q: Array, k: Array, v: Array, layer_cache: tuple[Stored, Stored]) -> tuple[Array, Any]:
            at = positions[:, None]
            keys, values = (write(old, new, at) for old, new in zip(layer_cache, (k, v), strict=True))
            return attend_cache(q[:, 0], keys, values, positions)[:, None], (keys, values)

        x, cache, expert_ids = _layers(params, config, tokens[:, None], positions[:, None], attend, cache, piece)
        return local_logits(params, x[:, 0], head, execution), cache, expert_ids[:, :, 0]

    caches = cache_specs(config, layout, tokens.shape[0], cache.dtype)
    out = (PartitionSpec(*rows, None), caches, PartitionSpec(None, *rows, None))
    return layout.manual(run, (specs, caches, rows, rows), out)(params, cache, tokens, positions)


def _layers(
    params: DecodeParams,
    config: ModelConfig,
    tokens: Array,
    positions: Array,
    attend: Attend,
    cache: Cache | None,
    piece: Piece,
) -> tuple[Array, Cache, Array]:
    """One device's part of all layers."""
    layout = piece.layout
    angles = rope(positions, config.head_dim, config.rope_theta)
    x = embed(params["embedding"], tokens, param_specs(config, layout)["embedding"], layout)
    cuts = _cuts(config, layout, piece.numerics, piece.output_first)
    keys, values, routing = [], [], []
    for index, (layer_params, cut) in enumerate(zip(params["layers"], cuts, strict=True)):
        layer_cache = None if cache is None else (cache.k[index], cache.v[index])
        weights = gathered(layer_params, *cut, layout)
        x, (k, v), router = layer(weights, config, x, angles, attend, layer_cache, None, piece)
        keys.append(k)
        values.append(v)
        if router is not None:
            routing.append(router.expert_ids)
    expert_ids = jnp.stack(routing) if routing else jnp.zeros((0, *tokens.shape, 0), jnp.int32)
    x = rms_norm(x, whole_norm(params, config, layout), config.rms_norm_eps)
    return x, Cache(k=tuple(keys), v=tuple(values)), expert_ids

"""The parameters: one NNX module a block, where shape, dtype, logical axes and initial value stand once each.

A module holds parameters and does nothing. Outside this file there is only the pytree of arrays (nested dicts). The
layers of a run are stacked on axis 0. Linear maps are stored input first; the embedding and the head as [words, D].
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl_sat.layout import Layout
from jaxrl_sat.model.config import ModelConfig, Run
from jaxrl_sat.types import InputError, Params


class _Declare:
    """Makes parameters: normal(initializer_range) for weights, ones for norms, as transformers initialises them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any, layers: int | None = None):
        self._rngs, self._dtype, self._std = rngs, dtype, config.initializer_range
        self._shape, self._axes = ((), ()) if layers is None else ((layers,), ("layers",))

    def weight(self, **axes: int) -> nnx.Param:
        return self._param(jax.nn.initializers.normal(self._std), axes)

    def scale(self, **axes: int) -> nnx.Param:
        return self._param(jax.nn.initializers.ones, axes)

    def _param(self, init: Any, axes: dict[str, int]) -> nnx.Param:
        value = init(self._rngs.params(), (*self._shape, *axes.values()), self._dtype)
        return nnx.Param(value, axes=(*self._axes, *axes))


class Attention(nnx.Module):
    """Grouped-query attention; with `qk_norm` a norm per head on queries and keys."""

    def __init__(self, config: ModelConfig, declare: _Declare):
        d, h, kv, hd = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q = declare.weight(embed=d, heads=h, head_dim=hd)
        self.k = declare.weight(embed=d, kv_heads=kv, head_dim=hd)
        self.v = declare.weight(embed=d, kv_heads=kv, head_dim=hd)
        self.o = declare.weight(heads=h, head_dim=hd, embed=d)
        if config.qk_norm:
            self.q_norm = declare.scale(head_dim=hd)
            self.k_norm = declare.scale(head_dim=hd)


class Mlp(nnx.Module):
    """The gated feed-forward block of a dense layer."""

    def __init__(self, config: ModelConfig, declare: _Declare):
        self.gate = declare.weight(embed=config.hidden_size, mlp=config.intermediate_size)
        self.up = declare.weight(embed=config.hidden_size, mlp=config.intermediate_size)
        self.down = declare.weight(mlp=config.intermediate_size, embed=config.hidden_size)


class Moe(nnx.Module):
    """Router and experts of a sparse layer."""

    def __init__(self, config: ModelConfig, declare: _Declare):
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.router = declare.weight(embed=d, choices=e)
        self.gate = declare.weight(experts=e, embed=d, mlp=f)
        self.up = declare.weight(experts=e, embed=d, mlp=f)
        self.down = declare.weight(experts=e, mlp=f, embed=d)


class Layers(nnx.Module):
    """A run of decoder layers of one kind, stacked."""

    def __init__(self, config: ModelConfig, run: Run, rngs: nnx.Rngs, dtype: Any):
        declare = _Declare(config, rngs, dtype, layers=len(run))
        self.attention_norm = declare.scale(embed=config.hidden_size)
        self.attention = Attention(config, declare)
        self.mlp_norm = declare.scale(embed=config.hidden_size)
        self.mlp = Moe(config, declare) if run.sparse else Mlp(config, declare)


class Model(nnx.Module):
    """The whole decoder. Tied heads have no `head`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any):
        declare = _Declare(config, rngs, dtype)
        self.embedding = declare.weight(vocab=config.vocab_size, embed=config.hidden_size)
        for run in config.runs:
            setattr(self, run.name, Layers(config, run, rngs, dtype))
        self.final_norm = declare.scale(embed=config.hidden_size)
        if not config.tie_word_embeddings:
            self.head = declare.weight(vocab=config.vocab_size, embed=config.hidden_size)


def _state(config: ModelConfig, key: Any, dtype: Any) -> nnx.State:
    return nnx.state(Model(config, nnx.Rngs(params=key), jnp.dtype(dtype)), nnx.Param)


def init_params(config: ModelConfig, key: jax.Array, dtype: Any = "float32") -> Params:
    """Random parameters as nested dicts. Pure in `key`: jit it with out_shardings to make them where they belong."""
    return nnx.to_pure_dict(_state(config, key, dtype))


def abstract_params(config: ModelConfig, dtype: Any = "float32") -> Params:
    """The shapes and dtypes of the parameters (jax.ShapeDtypeStruct), without making any."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype))


@functools.lru_cache(maxsize=16)
def param_axes(config: ModelConfig) -> Params:
    """The logical axis names of each parameter: a tuple of names, one a dimension, where the array would be.

    Treat as constant: it is shared.
    """
    state = nnx.eval_shape(lambda: _state(config, jax.random.key(0), "float32"))
    axes: dict[Any, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        node = axes
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = variable.get_metadata("axes")
    return axes


@functools.lru_cache(maxsize=64)
def param_specs(config: ModelConfig, layout: Layout) -> Params:
    """How each parameter is cut, a PartitionSpec a parameter. Treat as constant: it is shared.

    Raises `InputError` where the key-value heads neither divide the pieces of the attention heads nor are divided.
    """
    pieces = layout.ways(layout.spec(("heads",), (config.num_attention_heads,))[0])
    heads = config.num_key_value_heads
    if heads % pieces and pieces % heads:
        raise InputError(
            f"num_key_value_heads: {heads}, with attention heads cut {pieces} ways; allowed: a number that "
            "divides the other"
        )
    return layout.specs(abstract_params(config), param_axes(config))


@functools.lru_cache(maxsize=64)
def layer_cuts(config: ModelConfig, layout: Layout, run: Run) -> tuple[Params, Params]:
    """Specs and logical axes of the parameters of one layer of a run, as they are once it is taken from the stack."""
    axes = jax.tree.map(lambda names: names[1:], param_axes(config)[run.name], is_leaf=lambda n: isinstance(n, tuple))
    specs = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), param_specs(config, layout)[run.name])
    return specs, axes


def gathered(params: Params, specs: Params, axes: Params, layout: Layout) -> Params:
    """Inside `Layout.manual`: this device's pieces with the model's width made whole, as the products need them."""

    def whole(piece: jax.Array, spec: PartitionSpec, names: tuple[str | None, ...]) -> jax.Array:
        for dimension, name in enumerate(names):
            if name == "embed":
                piece = layout.gather(piece, spec[dimension], dimension)
        return piece

    return jax.tree.map(whole, params, specs, axes)

"""What lives on the sampler's devices between two steps, and where on the mesh it lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sat import model
from jaxrl_sat.model import ModelConfig

Rules = Mapping[str, Any]
"""Logical axis -> mesh axis, tuple of mesh axes, or None. "slots" is the axis of the decode state."""


@struct.dataclass
class Prefix:
    """Prompts that have been read, B at a time. Rows past the prompts given are padding of length 1."""

    cache: Any  # keys and values of each layer, as in `Cache`, of length P
    tokens: Any  # int32 [B, P]
    lengths: Any  # int32 [B]
    expert_ids: Any  # uint8 or uint16 [B, P, M * k]
    version: Any  # int32 [], of the weights that read them


@struct.dataclass
class DecodeState:
    """S responses in the making. An inactive slot is computed with the others, and its results are marked invalid."""

    cache: Any  # keys and values of each layer, of length longest bucket + max_response
    tokens: Any  # int32 [S], to be fed next
    positions: Any  # int32 [S], where
    seeds: Any  # uint32 [S]
    temperature: Any  # float32 [S]
    lengths: Any  # int32 [S], tokens sampled so far
    active: Any  # bool [S]


def empty_state(config: ModelConfig, slots: int, length: int, cache_dtype: Any) -> DecodeState:
    """A decode state with no slot in use."""
    zeros = jnp.zeros(slots, jnp.int32)
    cache = model.init_cache(config, slots, length, cache_dtype)
    return DecodeState(
        cache=(cache.k, cache.v),
        tokens=zeros,
        positions=zeros,
        seeds=jnp.zeros(slots, jnp.uint32),
        temperature=jnp.ones(slots, jnp.float32),
        lengths=zeros,
        active=jnp.zeros(slots, bool),
    )


def sharding(mesh: Mesh, rules: Rules, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Where an array with these logical axes lies. An axis that its mesh axes do not divide is kept whole, as is one
    whose rule names an axis this mesh has not."""
    spec: list[Any] = []
    used: set[str] = set()
    for axis, size in zip(axes, shape, strict=True):
        rule = rules.get(axis) if axis is not None else None
        names = (rule,) if isinstance(rule, str) else tuple(rule or ())
        names = tuple(name for name in names if name in mesh.shape and name not in used)
        ways = 1
        for name in names:
            ways *= mesh.shape[name]
        if ways == 1 or size % ways:
            names = ()
        used.update(names)
        spec.append(names[0] if len(names) == 1 else names or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def param_shardings(config: ModelConfig, mesh: Mesh, rules: Rules) -> Any:
    """Where each stacked parameter lies on the sampler's mesh."""
    return jax.tree.map(
        lambda array, axes: sharding(mesh, rules, axes, array.shape),
        model.abstract_params(config),
        model.param_axes(config),
    )


def slot_shardings(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """Where the arrays of a decode state or prefix lie: first axis by slot, cache heads by head, the rest whole."""

    def place(array: Any) -> NamedSharding:
        axes: tuple[str | None, ...] = ("slots",) + (None,) * (array.ndim - 1) if array.ndim else ()
        if array.ndim == 4:
            axes = ("slots", None, "kv_heads", None)
        return sharding(mesh, rules, axes, array.shape)

    return jax.tree.map(place, tree)

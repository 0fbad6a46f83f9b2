"""What lives on the sampler's devices between two steps, and where on the mesh it lies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl_sat import model
from jaxrl_sat.layout import Layout
from jaxrl_sat.model import ModelConfig


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


def empty_state(config: ModelConfig, slots: int, length: int, cache_dtype: Any, layout: Layout) -> DecodeState:
    """A decode state with no slot in use."""
    zeros = jnp.zeros(slots, jnp.int32)
    cache = model.init_cache(config, slots, length, cache_dtype, model.Execution(layout))
    return DecodeState(
        cache=(cache.k, cache.v),
        tokens=zeros,
        positions=zeros,
        seeds=jnp.zeros(slots, jnp.uint32),
        temperature=jnp.ones(slots, jnp.float32),
        lengths=zeros,
        active=jnp.zeros(slots, bool),
    )


def slot_shardings(tree: Any, config: ModelConfig, layout: Layout) -> Any:
    """Where the arrays of a decode state or prefix lie: first axis by slot, a cache's heads by head, the rest whole."""

    def cut(array: Any) -> PartitionSpec:
        if array.ndim == 4:
            return model.cache_specs(config, layout, array.shape[0]).k[0]
        return layout.spec(("rows",) * min(array.ndim, 1) + (None,) * (array.ndim - 1), array.shape)

    return layout.place(jax.tree.map(cut, tree))

"""What lives on the sampler's devices between two steps, and where on the mesh it lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl_sat import model
from jaxrl_sat.layout import Layout
from jaxrl_sat.model import ModelConfig
from jaxrl_sat.types import SamplingParams

MAX_STOP_IDS = 8
"""Stop ids that a request may have."""


@struct.dataclass
class Prefix:
    """Prompts that have been read, B at a time. Rows past the prompts given are padding of length 1."""

    cache: Any  # keys and values of each layer, as in `Cache`, of length P
    tokens: Any  # int32 [B, P]
    lengths: Any  # int32 [B]
    expert_ids: Any  # uint8 or uint16 [B, P, M * k]
    versions: Any  # int32 [B], the oldest of the weights that read any of them


@struct.dataclass
class Pool:
    """N pieces of prompts that have been read, C tokens each, kept for prompts that begin with the same text."""

    cache: Any  # keys and values of each layer, as in `Cache`, of length C
    expert_ids: Any  # uint8 or uint16 [N, C, M * k]


@struct.dataclass
class SlotSampling:
    """How each slot draws and when its response ends."""

    temperature: Any  # float32 [S]
    top_p: Any  # float32 [S]
    top_k: Any  # int32 [S], all words where not above 0
    limit: Any  # int32 [S], tokens
    stop_ids: Any  # int32 [S, MAX_STOP_IDS], -1 where there are fewer

    @classmethod
    def of(cls, sampling: Sequence[SamplingParams], size: int) -> SlotSampling:
        """In host memory, a row a request; rows beyond them are padding."""
        stop_ids = np.full((size, MAX_STOP_IDS), -1, np.int32)
        for row, one in enumerate(sampling):
            stop_ids[row, : len(one.stop_ids)] = one.stop_ids

        def column(values: list[Any], dtype: Any) -> np.ndarray:
            return np.asarray(values + [1] * (size - len(values)), dtype)

        return cls(
            temperature=column([one.temperature for one in sampling], np.float32),
            top_p=column([one.top_p for one in sampling], np.float32),
            top_k=column([one.top_k for one in sampling], np.int32),
            limit=column([one.max_response_tokens for one in sampling], np.int32),
            stop_ids=stop_ids,
        )


@struct.dataclass
class DecodeState:
    """S responses in the making. An inactive slot is computed with the others, and its results are marked invalid."""

    cache: Any  # keys and values of each layer, of length longest bucket + max_response
    tokens: Any  # int32 [S], to be fed next
    positions: Any  # int32 [S], where
    seeds: Any  # uint32 [S]
    sampling: SlotSampling
    lengths: Any  # int32 [S], tokens sampled so far
    active: Any  # bool [S]
    read_by: Any  # int32 [S], the oldest of the weights that made any of the slot's cache
    history: Any  # int32 [S, length] tokens by position; [S, 0] where no cache is read again


Placed = TypeVar("Placed", Prefix, DecodeState)


def empty_state(
    config: ModelConfig, slots: int, length: int, cache_dtype: Any, layout: Layout, remembers: bool
) -> DecodeState:
    """A decode state with no slot in use; with the tokens of each slot where it `remembers` them."""
    zeros = jnp.zeros(slots, jnp.int32)
    cache = model.init_cache(config, slots, length, cache_dtype, model.Execution(layout))
    return DecodeState(
        cache=(cache.k, cache.v),
        tokens=zeros,
        positions=zeros,
        seeds=jnp.zeros(slots, jnp.uint32),
        sampling=jax.tree.map(jnp.asarray, SlotSampling.of((), slots)),
        lengths=zeros,
        active=jnp.zeros(slots, bool),
        read_by=zeros,
        history=jnp.zeros((slots, length if remembers else 0), jnp.int32),
    )


def slot_shardings(tree: Placed, config: ModelConfig, layout: Layout) -> Placed:
    """Where a decode state or prefix lies: first axis by slot, a cache's heads by head, the rest whole."""

    def cut(array: Any) -> PartitionSpec:
        return layout.spec(("rows",) * min(array.ndim, 1) + (None,) * (array.ndim - 1), array.shape)

    cache = model.Cache(*tree.cache)
    specs = model.cache_specs(config, layout, tree.tokens.shape[0], cache.dtype)
    rest = jax.tree.map(cut, dataclasses.replace(tree, cache=None))
    return layout.place(dataclasses.replace(rest, cache=(specs.k, specs.v)))


def pool_shardings(config: ModelConfig, layout: Layout, cache_dtype: Any) -> Pool:
    """Where a pool lies: whole on every device but for a cache's heads."""
    specs = model.cache_specs(config, layout, 0, cache_dtype)
    return layout.place(Pool(cache=(specs.k, specs.v), expert_ids=PartitionSpec()))

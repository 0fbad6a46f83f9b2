"""Prompts read piece by piece, and caches in 8 bits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.model import decode, init_cache, prefill, prefill_chunk, stored, unstack
from tests.model.helpers import gap, logits, random_tokens, tiny

LENGTH, SIZE, ROOM = 16, 4, 19


@functools.cache
def programs() -> tuple[Any, Any]:
    config, _ = tiny(mlp_only_layers=(0,))
    read = functools.partial(prefill_chunk, config=config)
    return jax.jit(lambda p, c, t, at, start: read(p, cache=c, tokens=t, positions=at, start=start)), jax.jit(
        lambda p, c, t, at: decode(p, config, c, t, at)
    )


def read_in_pieces(cache_dtype: str, slots: int = 2) -> tuple[Any, Any, Any]:
    """Prompts of 16 tokens in pieces of 4 at the start of a longer cache: it, the routing, and the tokens."""
    config, params = tiny(mlp_only_layers=(0,))
    weights, tokens = unstack(params), random_tokens(config, slots, ROOM)
    cache, routing = init_cache(config, slots, ROOM, cache_dtype), []
    cache = jax.tree.map(lambda array: array + jnp.asarray(7, array.dtype), cache)  # never to be seen
    for start in range(0, LENGTH, SIZE):
        at = jnp.broadcast_to(start + jnp.arange(SIZE), (slots, SIZE))
        cache, ids = programs()[0](weights, cache, tokens[:, start : start + SIZE], at, jnp.int32(start))
        routing.append(ids)
    return cache, jnp.concatenate(routing, axis=2), tokens


def test_pieces_are_the_whole() -> None:
    config, params = tiny(mlp_only_layers=(0,))
    cache, routing, tokens = read_in_pieces("float32")
    whole, ids = jax.jit(prefill, static_argnums=1)(
        unstack(params), config, tokens[:, :LENGTH], jnp.asarray([16, 16], jnp.int32)
    )
    for part, full in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
        assert gap(part[:, :, :LENGTH], full) < 2e-6
        np.testing.assert_array_equal(part[:, :, LENGTH:], np.full_like(part[:, :, LENGTH:], 7))
    np.testing.assert_array_equal(routing, ids)


@pytest.mark.parametrize(("cache_dtype", "allowed"), [("float32", 1e-5), ("bfloat16", 0.03), ("int8", 0.06)])
def test_decoding_from_pieces_is_the_forward_pass(cache_dtype: str, allowed: float) -> None:
    """The mismatch of a cache in fewer bits, bounded: the logits here are up to 4, and differ by 0.02 in int8."""
    config, params = tiny(mlp_only_layers=(0,))
    cache, _, tokens = read_in_pieces(cache_dtype)
    whole = logits(params, config, tokens).logits
    for position in range(LENGTH, ROOM):
        at = jnp.full(2, position, jnp.int32)
        out, cache, _ = programs()[1](unstack(params), cache, tokens[:, position], at)
        assert gap(out, whole[:, position]) < allowed


def test_entries_in_eight_bits_are_within_half_a_step() -> None:
    x = np.random.default_rng(0).normal(size=(3, 5, 2, 6)).astype(np.float32)
    x[0, 0, 0] = 0.0
    kept = stored.stored(jnp.asarray(x), "int8")
    assert (kept.values.dtype, kept.values.shape) == (jnp.int8, (3, 2, 5, 6))
    assert (kept.scale.dtype, kept.scale.shape) == (jnp.float32, (3, 2, 5))
    largest = np.abs(x).max(axis=-1, keepdims=True)
    found = np.asarray(stored.read(kept, jnp.int32(0), 5, jnp.float32)).swapaxes(1, 2)
    assert (np.abs(found - x) <= largest / 127 * 0.5001).all()
    np.testing.assert_array_equal(np.abs(kept.values).max(axis=-1)[1:], np.full((2, 2, 5), 127))
    np.testing.assert_array_equal(found[0, 0, 0], np.zeros(6))


def test_attention_to_eight_bits_is_attention_to_the_numbers_they_stand_for() -> None:
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(3, 4, 6)), jnp.float32)
    k, v = (stored.stored(jnp.asarray(rng.normal(size=(3, 5, 2, 6)), jnp.float32), "int8") for _ in range(2))
    positions = jnp.asarray([0, 2, 4])
    keys, values = (stored.read(x, jnp.int32(0), 5, jnp.float32) for x in (k, v))
    assert gap(stored.attend_cache(q, k, v, positions), stored.attend_cache(q, keys, values, positions)) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_blocks_of_a_pool_come_back(dtype: str) -> None:
    rng = np.random.default_rng(2)
    rows = stored.stored(jnp.asarray(rng.normal(size=(2, 12, 2, 6)), jnp.float32), dtype)
    pool = stored.to_blocks(stored.empty(5, 4, 2, 6, dtype), rows, jnp.asarray([[3, 0, 5], [1, 5, 4]]))
    found = stored.from_blocks(pool, jnp.asarray([[3, 0, 5], [2, 1, 4]]))
    read = lambda x: np.asarray(stored.read(x, jnp.int32(0), 12, jnp.float32)).swapaxes(1, 2)  # noqa: E731
    expected = np.zeros((2, 12, 2, 6), np.float32)
    expected[0, :8] = read(rows)[0, :8]
    expected[1, 4:8], expected[1, 8:] = read(rows)[1, :4], read(rows)[1, 8:]
    np.testing.assert_array_equal(read(found), expected)

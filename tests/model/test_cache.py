"""Prefill and decoding against the whole forward pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.model import Cache, decode, init_cache, prefill, unstack
from tests.model.helpers import gap, logits, random_tokens, tiny

LENGTH, PROMPT, ROOM = 12, 7, 16


@pytest.mark.parametrize(
    ("slots", "changes"), [(40, {}), (2, {"mlp_only_layers": (0,)}), (3, {"num_experts": 0, "num_experts_per_tok": 0})]
)
def test_prefill_and_decode_equal_the_forward_pass(slots: int, changes: dict) -> None:
    """Prompts of different lengths; the slots step together, each at its own position."""
    config, params = tiny(**changes)
    tokens = random_tokens(config, slots, LENGTH)
    whole = logits(params, config, tokens)
    weights = jax.jit(unstack)(params)
    starts = PROMPT - jnp.arange(slots) % 3
    filled, prompt_ids = jax.jit(prefill, static_argnums=1)(weights, config, tokens[:, :PROMPT], starts)
    cache = init_cache(config, slots, ROOM)
    # Garbage beyond what was written must not be seen.
    cache = jax.tree.map(lambda full, part: (full + 1e3).at[:, :, :PROMPT].set(part), cache, filled)
    step = jax.jit(functools.partial(decode, config=config), donate_argnames="cache")
    row = jnp.arange(slots)
    for offset in range(LENGTH - PROMPT):
        at = starts + offset
        out, cache, ids = step(weights, cache=cache, tokens=tokens[row, at], positions=at)
        assert gap(out, whole.logits[row, at]) < 1e-5
        np.testing.assert_array_equal(ids, whole.routing.expert_ids[:, row, at])
    for slot in range(2):
        length = int(starts[slot])
        np.testing.assert_array_equal(prompt_ids[:, slot, :length], whole.routing.expert_ids[:, slot, :length])


def test_unstacked_layers_are_the_stacked_ones_in_order() -> None:
    config, params = tiny(num_hidden_layers=5, mlp_only_layers=(1, 2))
    weights = unstack(params)
    assert [("router" in layer["mlp"]) for layer in weights["layers"]] == [config.sparse(layer) for layer in range(5)]
    np.testing.assert_array_equal(weights["layers"][2]["mlp"]["up"], params["run1"]["mlp"]["up"][1])
    np.testing.assert_array_equal(weights["layers"][4]["attention"]["q"], params["run2"]["attention"]["q"][1])
    assert weights["embedding"] is params["embedding"]


def test_cache_shapes_and_dtype() -> None:
    config, _ = tiny()
    cache = jax.eval_shape(lambda: init_cache(config, 3, 8, "bfloat16"))
    assert isinstance(cache, Cache)
    assert len(cache.k) == len(cache.v) == config.num_hidden_layers
    assert {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(cache)} == {((3, 2, 8, 6), "bfloat16")}


def test_a_shorter_cache_dtype_keeps_the_dtype_of_the_model() -> None:
    config, params = tiny()
    cache = jax.eval_shape(lambda: init_cache(config, 2, 4, "bfloat16"))
    tokens, positions = jnp.asarray([3, 4], jnp.int32), jnp.asarray([0, 1], jnp.int32)
    out, cache, _ = jax.eval_shape(lambda p, c: decode(unstack(p), config, c, tokens, positions), params, cache)
    assert out.dtype == jnp.float32
    assert cache.k[0].dtype == jnp.bfloat16

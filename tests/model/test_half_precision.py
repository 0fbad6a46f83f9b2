"""In bfloat16 every gradient is that of float32 but for rounding: sums over many tokens are not taken in bfloat16."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.layout import Layout
from jaxrl_sat.model import forward
from jaxrl_sat.model.embedding import embed
from jaxrl_sat.model.ops import rms_norm
from tests.model.helpers import random_tokens, tiny


def test_the_gradient_of_a_norm_counts_every_token() -> None:
    """32,768 tokens of 1: a sum in bfloat16 would stop at 256 or, by halves, a power of two on the way."""
    x = jnp.ones((32768, 4), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda scale: jnp.sum(rms_norm(x, scale, 0.0).astype(jnp.float32))))
    np.testing.assert_array_equal(gradient(jnp.ones(4, jnp.bfloat16)).astype(jnp.float32), 32768.0)


def test_the_gradient_of_a_frequent_word_counts_every_token() -> None:
    tokens = jnp.zeros((4, 4096), jnp.int32)

    def loss(table):
        return jnp.sum(embed(table, tokens, Layout().spec((None, None), (3, 4)), Layout()).astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss))(jnp.ones((3, 4), jnp.bfloat16))
    np.testing.assert_array_equal(gradient.astype(jnp.float32), [[16384.0] * 4, [0.0] * 4, [0.0] * 4])


@pytest.mark.slow
def test_every_gradient_is_near_that_of_float32() -> None:
    """The same rounded parameters in both; replayed routing, so that no tie falls otherwise."""
    config, params = tiny()
    tokens = random_tokens(config, 16, 128)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(dtype: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            out = forward(params, config, tokens, replay=routing)
            return jnp.mean(jnp.square(out.hidden.astype(jnp.float32)) * weight)

        return jax.grad(loss)(jax.tree.map(lambda x: x.astype(dtype), params))

    weight = jax.random.normal(jax.random.key(0), (*tokens.shape, config.hidden_size))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    routing = jax.jit(lambda p: forward(p, config, tokens).routing)(wide)
    found, expected = (gradient(jnp.dtype(name)) for name in ("bfloat16", "float32"))
    for path, leaf in jax.tree_util.tree_flatten_with_path(expected)[0]:
        other = functools.reduce(lambda node, key: node[key.key], path, found)
        scale = float(jnp.linalg.norm(leaf))
        apart = float(jnp.linalg.norm(other.astype(jnp.float32) - leaf))
        # Rounding of activations makes 0.5 to 5%; a sum that stagnates loses most of its terms.
        assert apart <= 0.1 * scale, jax.tree_util.keystr(path)

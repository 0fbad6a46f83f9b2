"""The same numbers on one device and sharded over four."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sat.model import decode, forward, init_cache, param_axes, token_statistics, unstack
from jaxrl_sat.types import RouterTrace
from tests.model.helpers import gap, random_tokens, tiny, tree_gap

RULES = {"experts": "x", "heads": "x", "vocab": "x", "embed": "y"}


def place(params, config, mesh):
    def put(leaf, axes):
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*(RULES.get(axis) for axis in axes))))

    return jax.tree.map(put, params, param_axes(config))


@pytest.mark.slow
def test_loss_and_gradient_do_not_depend_on_the_sharding() -> None:
    config, params = tiny(vocab_size=24)
    tokens = random_tokens(config, 4, 8)
    trace = jax.jit(lambda p: forward(p, config, tokens).routing)(params)

    def loss(params, tokens, ids):
        replay = RouterTrace(expert_ids=ids, valid=jnp.ones(tokens.shape, bool))
        hidden = forward(params, config, tokens, replay=replay).hidden
        out = token_statistics(params, config, hidden, jnp.roll(tokens, -1, axis=1))
        return jnp.mean(out.logp + 0.1 * out.entropy)

    run = jax.jit(jax.value_and_grad(loss))
    value, gradient = run(params, tokens, trace.expert_ids)
    mesh = Mesh([jax.devices()[i : i + 2] for i in (0, 2)], ("x", "y"))
    batch = NamedSharding(mesh, PartitionSpec("y"))
    sharded = place(params, config, mesh), jax.device_put(tokens, batch)
    ids = jax.device_put(trace.expert_ids, NamedSharding(mesh, PartitionSpec(None, "y")))
    sharded_value, sharded_gradient = run(*sharded, ids)
    assert gap(sharded_value, value) < 1e-5
    assert tree_gap(sharded_gradient, gradient) < 1e-5


def test_decoding_does_not_depend_on_the_sharding() -> None:
    config, params = tiny(vocab_size=24)
    tokens, positions = random_tokens(config, 1, 4)[0], jnp.zeros(4, jnp.int32)
    step = jax.jit(lambda w, cache, tokens: decode(w, config, cache, tokens, positions)[0])
    expected = step(unstack(params), init_cache(config, 4, 4), tokens)
    mesh = Mesh([jax.devices()[i : i + 2] for i in (0, 2)], ("x", "y"))
    weights = jax.jit(unstack)(place(params, config, mesh))
    out = step(weights, jax.device_put(init_cache(config, 4, 4), NamedSharding(mesh, PartitionSpec("y"))), tokens)
    assert gap(out, expected) < 1e-5


def test_axes_fit_the_shapes() -> None:
    config, params = tiny(num_hidden_layers=4, mlp_only_layers=(1,))
    axes = param_axes(config)
    assert jax.tree.structure(params) == jax.tree.structure(axes, is_leaf=lambda x: isinstance(x, tuple))
    sizes = {"embed": 16, "vocab": 23, "heads": 4, "kv_heads": 2, "head_dim": 6, "experts": 8}

    def check(leaf, names):
        assert len(names) == leaf.ndim
        assert all(sizes.get(name, size) == size for name, size in zip(names, leaf.shape, strict=True))

    jax.tree.map(check, params, axes)

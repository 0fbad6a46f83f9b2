"""The same numbers on one device and on eight, however the mesh is laid."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl_sat.layout import Layout
from jaxrl_sat.mesh import SAMPLER_RULES, TRAINER_RULES
from jaxrl_sat.model import (
    ONE_DEVICE,
    Execution,
    decode,
    decode_param_specs,
    forward,
    init_cache,
    logits,
    param_axes,
    param_specs,
    prefill,
    token_statistics,
    unstack,
)
from jaxrl_sat.types import RouterTrace
from tests.model.helpers import gap, random_tokens, tiny, tree_gap

AXES = ("data", "fsdp", "expert", "context", "tensor")
SHAPES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=5) if math.prod(sizes) == 8]
SHORT = [(1, 2, 2, 2, 1), (2, 1, 1, 1, 4)]
"""Every axis once, tensor past the key-value heads."""

ACROSS = [(8, 1, 1, 1, 1), (1, 8, 1, 1, 1), (1, 1, 8, 1, 1), (1, 1, 1, 8, 1), (1, 1, 1, 1, 8), *SHORT]
"""Each axis in turn between two processes, of which each has four devices."""

ROWS, LENGTH = 8, 16
CONFIG, PARAMS = tiny(
    vocab_size=24, num_attention_heads=8, num_hidden_layers=3, mlp_only_layers=(1,), moe_intermediate_size=16
)


def layout(sizes: tuple[int, ...]) -> Layout:
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Layout.of(Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 5), TRAINER_RULES)


@functools.partial(jax.jit, static_argnums=3)
def value_and_gradient(params: Any, tokens: jax.Array, ids: jax.Array, execution: Execution) -> Any:
    """A mean over tokens in two packed segments and padding, some of it replayed, of all that a forward pass gives."""
    segment_ids = jnp.asarray([[1] * 5 + [2] * 8 + [0] * 3] * ROWS, jnp.int32)
    replay = RouterTrace(expert_ids=ids, valid=(jnp.arange(LENGTH) < 9)[None] & (segment_ids > 0))
    weight = jax.random.normal(jax.random.key(1), tokens.shape)
    words = (tokens[..., None] + jnp.arange(3)) % CONFIG.vocab_size

    def loss(params: Any) -> Any:
        out = forward(params, CONFIG, tokens, None, segment_ids, replay, execution)
        more = {"topk_ids": words, "nucleus_ids": words[..., :2], "execution": execution}
        stats = token_statistics(params, CONFIG, out.hidden, jnp.roll(tokens, -1, axis=1), 0.9, **more)
        each = weight * stats.logp + 0.1 * stats.entropy + 0.1 * jnp.sum(stats.nucleus_logp, axis=-1)
        sums = out.router
        assert sums is not None
        router = jnp.sum(sums.counts * sums.probabilities) / sums.tokens**2 + jnp.sum(sums.z) / sums.tokens
        real = segment_ids > 0
        total = jnp.sum(jnp.where(real, each, 0)) / jnp.sum(real) + 0.01 * router
        return total, (jnp.where(real[..., None], out.routing.expert_ids, 0), stats.topk_logp, sums)

    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def one_device() -> tuple[Any, jax.Array, Any]:
    tokens = random_tokens(CONFIG, ROWS, LENGTH)
    ids = (jax.jit(lambda p: forward(p, CONFIG, tokens).routing.expert_ids)(PARAMS) + 1) % CONFIG.num_experts
    return tokens, ids, value_and_gradient(PARAMS, tokens, ids, Execution(router_sums=True))


def check(sizes: tuple[int, ...]) -> None:
    tokens, ids, ((value, seen), gradient) = one_device()
    cut = layout(sizes)
    params = jax.device_put(PARAMS, cut.place(param_specs(CONFIG, cut)))
    tokens = jax.device_put(tokens, cut.sharding(("rows", "sequence"), tokens.shape))
    (found, found_seen), found_gradient = value_and_gradient(params, tokens, ids, Execution(cut, router_sums=True))
    assert gap(found, value) < 1e-5
    assert tree_gap(found_gradient, gradient) < 1e-5
    assert tree_gap(found_seen, seen) < 1e-5
    lie_alike = jax.tree.map(lambda g, p: g.sharding.is_equivalent_to(p.sharding, g.ndim), found_gradient, params)
    assert all(jax.tree.leaves(lie_alike)), lie_alike


def test_loss_and_gradient_do_not_depend_on_the_mesh() -> None:
    check(SHORT[0])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 2, 2, 2), (1, 2, 1, 1, 4)])
def test_what_does_not_divide_stays_whole_and_is_counted_once(sizes: tuple[int, ...]) -> None:
    """Rows, sequence, words under a tied head, experts and their width: none divides all that would cut it."""
    config, params = tiny(num_attention_heads=8, num_experts=6, moe_intermediate_size=6, tie_word_embeddings=True)
    tokens, cut = random_tokens(config, 6, 15), layout(sizes)

    @functools.partial(jax.jit, static_argnums=1)
    def run(params: Any, execution: Execution) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = forward(params, config, tokens, execution=execution).hidden
            return jnp.mean(token_statistics(params, config, hidden, tokens, execution=execution).logp)

        return jax.value_and_grad(loss)(params)

    found = run(jax.device_put(params, cut.place(param_specs(config, cut))), Execution(cut))
    assert tree_gap(found, run(params, ONE_DEVICE)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SHAPES)
def test_loss_and_gradient_do_not_depend_on_any_mesh_of_eight(sizes: tuple[int, ...]) -> None:
    check(sizes)


@pytest.mark.parametrize("sizes", [pytest.param((2, 2, 2), marks=pytest.mark.slow), (1, 2, 4)])
def test_prefill_and_decoding_do_not_depend_on_the_mesh(sizes: tuple[int, ...]) -> None:
    """Slots over data, experts with all tokens on each of their devices, heads cut past the key-value heads."""
    axes = ("data", "expert", "tensor")
    devices = np.array(jax.devices()).reshape(sizes)
    cut = Layout.of(Mesh(devices, axes, axis_types=(AxisType.Auto,) * 3), SAMPLER_RULES)
    tokens, lengths = random_tokens(CONFIG, 4, 6), jnp.asarray([3, 6, 1, 5], jnp.int32)

    @functools.partial(jax.jit, static_argnums=1)
    def run(params: Any, execution: Execution) -> Any:
        cache, ids = prefill(params, CONFIG, tokens, lengths, execution)
        empty = init_cache(CONFIG, 4, 8, execution=execution)
        cache = jax.tree.map(lambda old, new: old.at[:, :, :6].set(new), empty, cache)
        out, _, more = decode(params, CONFIG, cache, tokens[:, 0], lengths, execution)
        return out, more, jnp.where(jnp.arange(6)[:, None] < lengths[:, None, None], ids, 0)

    weights = unstack(PARAMS)
    expected = run(weights, ONE_DEVICE)
    found = run(jax.device_put(weights, cut.place(decode_param_specs(CONFIG, cut))), Execution(cut))
    assert tree_gap(found, expected) < 1e-5


@pytest.mark.slow
def test_logits_do_not_depend_on_the_mesh() -> None:
    cut = layout((2, 1, 1, 2, 2))
    tokens = random_tokens(CONFIG, 4, 8)
    run = jax.jit(lambda p, e: logits(p, CONFIG, tokens, execution=e).logits, static_argnums=1)
    params = jax.device_put(PARAMS, cut.place(param_specs(CONFIG, cut)))
    assert gap(run(params, Execution(cut)), run(PARAMS, ONE_DEVICE)) < 1e-5


def test_axes_fit_the_shapes() -> None:
    config, params = tiny(num_hidden_layers=4, mlp_only_layers=(1,))
    axes = param_axes(config)
    assert jax.tree.structure(params) == jax.tree.structure(axes, is_leaf=lambda x: isinstance(x, tuple))
    sizes = {"embed": 16, "vocab": 23, "heads": 4, "kv_heads": 2, "head_dim": 6, "experts": 8}

    def check(leaf, names):
        assert len(names) == leaf.ndim
        assert all(sizes.get(name, size) == size for name, size in zip(names, leaf.shape, strict=True))

    jax.tree.map(check, params, axes)

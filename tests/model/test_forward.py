"""Values against transformers' recorded vectors and against an independent float64 forward pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat import model
from jaxrl_sat.model import Execution, abstract_params, forward, init_params, load_hf
from jaxrl_sat.types import RouterTrace
from tests.model import reference
from tests.model.helpers import FIXTURES, NAMES, TINY, gap, logits, random_tokens, tiny


@pytest.mark.parametrize("name", NAMES)
def test_transformers_vectors(name: str) -> None:
    config, params = load_hf(FIXTURES / name)
    recorded = np.load(FIXTURES / f"{name}.npz")
    tokens, mask = jnp.asarray(recorded["tokens"], jnp.int32), recorded["mask"]
    out = logits(params, config, tokens, segment_ids=jnp.asarray(mask, jnp.int32))
    hidden = jax.jit(forward, static_argnums=1)(params, config, tokens, segment_ids=jnp.asarray(mask, jnp.int32)).hidden
    keep = mask == 1
    assert gap(out.logits[keep], recorded["logits"][keep]) < 2e-5
    assert gap(hidden[keep], recorded["hidden"][keep]) < 2e-5
    if config.num_experts:
        raw = recorded["router_logits"].reshape(config.num_sparse_layers, *mask.shape, config.num_experts)
        best = np.argsort(-raw, axis=-1, kind="stable")[..., : config.num_experts_per_tok]
        np.testing.assert_array_equal(np.asarray(out.routing.expert_ids)[:, keep], best[:, keep])
    else:
        assert out.routing.expert_ids.shape == (0, *mask.shape, 0)


@pytest.mark.parametrize("name", NAMES)
def test_float64_reference(name: str) -> None:
    config, params = load_hf(FIXTURES / name)
    weights = reference.load(FIXTURES / name)
    tokens = random_tokens(config, 2, 9, seed=3)
    positions = jnp.asarray([np.arange(9), np.arange(9) + 5], jnp.int32)
    out = logits(params, config, tokens, positions=positions)
    for row in range(2):
        expected = reference.forward(weights, config, np.asarray(tokens[row]), np.asarray(positions[row]))
        assert gap(out.logits[row], expected["logits"]) < 2e-5
        if config.num_experts:
            np.testing.assert_array_equal(out.routing.expert_ids[:, row], expected["expert_ids"])


@pytest.mark.parametrize("name", ["moe", "moe_norm"])
def test_replay_of_other_experts_is_what_the_reference_computes(name: str) -> None:
    config, params = load_hf(FIXTURES / name)
    tokens, k = random_tokens(config, 1, 7, seed=4), config.num_experts_per_tok
    rng = np.random.default_rng(5)
    count = config.num_sparse_layers
    ids = np.stack([[rng.permutation(config.num_experts)[:k] for _ in range(7)] for _ in range(count)])
    trace = RouterTrace(expert_ids=jnp.asarray(ids[:, None], jnp.uint8), valid=jnp.ones((1, 7), bool))
    out = logits(params, config, tokens, replay=trace)
    expected = reference.forward(reference.load(FIXTURES / name), config, np.asarray(tokens[0]), np.arange(7), ids)
    assert gap(out.logits[0], expected["logits"]) < 2e-5
    np.testing.assert_array_equal(out.routing.expert_ids[:, 0], ids)


@pytest.mark.parametrize("normalise", [True, False])
def test_replaying_a_trace_changes_no_bit(normalise: bool) -> None:
    config, params = tiny(norm_topk_prob=normalise)
    tokens = random_tokens(config, 2, 12)
    free = logits(params, config, tokens)
    replayed = logits(params, config, tokens, replay=free.routing)
    np.testing.assert_array_equal(free.logits, replayed.logits)
    np.testing.assert_array_equal(free.routing.expert_ids, replayed.routing.expert_ids)


def test_rows_without_a_record_route_freely() -> None:
    config, params = tiny()
    tokens = random_tokens(config, 2, 12)
    free = logits(params, config, tokens)
    wrong = (free.routing.expert_ids + 3) % config.num_experts
    valid = jnp.arange(12)[None] < jnp.asarray([[0], [5]])
    mixed = logits(params, config, tokens, replay=RouterTrace(expert_ids=wrong, valid=valid))
    np.testing.assert_array_equal(mixed.logits[0], free.logits[0])
    np.testing.assert_array_equal(mixed.routing.expert_ids[:, 1, :5], wrong[:, 1, :5])
    np.testing.assert_array_equal(mixed.routing.expert_ids[0, 1, 5:], free.routing.expert_ids[0, 1, 5:])
    assert gap(mixed.logits[1], free.logits[1]) > 1e-3


def test_packed_segments_equal_separate_rows() -> None:
    config, params = tiny()
    tokens = random_tokens(config, 2, 12)
    alone = logits(params, config, tokens)
    # Five tokens of one row, then seven of the other, and the same the other way round.
    packed = jnp.concatenate([tokens[:, :5], tokens[::-1, :7]], axis=1)
    segment_ids = jnp.asarray([[4] * 5 + [2] * 7] * 2)
    out = logits(params, config, packed, segment_ids=segment_ids)
    assert gap(out.logits[:, :5], alone.logits[:, :5]) < 1e-5
    assert gap(out.logits[:, 5:], alone.logits[::-1, :7]) < 1e-5
    np.testing.assert_array_equal(out.routing.expert_ids[:, :, 5:], alone.routing.expert_ids[:, ::-1, :7])


def test_padding_changes_nothing_for_the_others() -> None:
    config, params = tiny()
    tokens = random_tokens(config, 2, 12)
    segment_ids = jnp.asarray([[0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]] * 2)
    other = jnp.where(segment_ids == 0, (tokens + 1) % config.vocab_size, tokens)
    first, second = (logits(params, config, t, segment_ids=segment_ids) for t in (tokens, other))
    assert gap(first.logits[:, 2:7], second.logits[:, 2:7]) < 1e-6
    assert gap(first.logits[:, 2:7], logits(params, config, jnp.roll(tokens, -2, axis=1)).logits[:, :5]) < 1e-5
    np.testing.assert_array_equal(first.routing.valid, segment_ids != 0)
    assert bool(jnp.isfinite(first.logits).all())


@pytest.mark.parametrize("pattern", [{"decoder_sparse_step": 2}, {"mlp_only_layers": (0, 2)}])
def test_runs_of_sparse_and_dense_layers(pattern: dict) -> None:
    config = dataclasses.replace(TINY, num_hidden_layers=5, **pattern)
    params = abstract_params(config)
    sparse = [config.sparse(layer) for layer in range(5)]
    for run in config.runs:
        assert sparse[run.start : run.stop] == [run.sparse] * len(run)
        assert ("router" in params[run.name]["mlp"]) == run.sparse
        assert {leaf.shape[0] for leaf in jax.tree.leaves(params[run.name])} == {len(run)}
    out = jax.eval_shape(lambda p: forward(p, config, random_tokens(config, 1, 4)), params)
    assert out.routing.expert_ids.shape == (sum(sparse), 1, 4, 2)


@pytest.mark.parametrize(("normalise", "remat"), [(True, "products"), (False, "layer")])
def test_gradient_under_replay_is_the_finite_difference(normalise: bool, remat: Any) -> None:
    """Along a random direction of each parameter, in float64 but for norms and softmax; the router's is not zero."""
    config, params = tiny(norm_topk_prob=normalise)
    tokens, weight = random_tokens(config, 2, 12), jax.random.normal(jax.random.key(2), (2, 12, config.hidden_size))
    trace = logits(params, config, tokens).routing
    with jax.enable_x64(True):

        @jax.jit
        @jax.value_and_grad
        def loss(params):
            out = forward(params, config, tokens, replay=trace, execution=Execution(remat=remat))
            return jnp.sum(out.hidden * weight)

        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        _, gradient = loss(params)
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        rng, step = np.random.default_rng(6), 1e-3
        for index, (path, leaf) in enumerate(paths):
            direction = rng.normal(size=leaf.shape)

            def at(t: float, index: int = index, direction: np.ndarray = direction) -> float:
                moved = [leaf + t * direction if i == index else leaf for i, (_, leaf) in enumerate(paths)]
                return float(loss(jax.tree.unflatten(tree, moved))[0])

            slope = (at(step) - at(-step)) / (2 * step)
            expected = float(jnp.sum(jax.tree.leaves(gradient)[index] * direction))
            name = jax.tree_util.keystr(path)
            assert abs(slope - expected) < 5e-3 * max(1.0, abs(slope)), name
            # The head is not used here.
            assert abs(expected) > 1e-2 or name == "['head']", name


def test_initial_parameters_are_drawn_as_declared() -> None:
    config = dataclasses.replace(TINY, initializer_range=0.05)
    params = jax.jit(lambda key: init_params(config, key, "bfloat16"))(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert float(jnp.std(params["run0"]["mlp"]["gate"].astype(jnp.float32))) == pytest.approx(0.05, rel=0.1)
    np.testing.assert_array_equal(np.asarray(params["final_norm"], np.float32), 1.0)
    out = jax.eval_shape(lambda p: model.logits(p, config, random_tokens(config, 1, 4)), params)
    assert out.logits.dtype == jnp.float32

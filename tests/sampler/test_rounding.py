"""In bfloat16, with every rounding as it is written, the sampler's numbers are those of a training-mode forward."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_policy as tiny

from jaxrl_sat import model
from jaxrl_sat.sampler import generate

EXECUTION = model.Execution(excess_precision=False)


@functools.cache
def halved() -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tiny.params())


@functools.partial(jax.jit, compiler_options=EXECUTION.compiler_options)
def judged(params: Any, tokens: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = model.forward(params, tiny.CONFIG, tokens, segment_ids=segment_ids, execution=EXECUTION)
    found = model.token_statistics(params, tiny.CONFIG, out.hidden[:, :-1], tokens[:, 1:])
    return found.logp, out.routing.expert_ids


def test_bfloat16_rollouts_equal_a_forward():
    """Sums in float32 go in other orders, which now and then moves one rounding: hence a largest difference."""
    half = {"dtype": "bfloat16", "cache_dtype": "bfloat16", "excess_precision": False}
    engine = tiny.engine(**half)
    rollouts = generate(engine, engine.load_params(halved()), tiny.requests([3, 9, 17, 20], 3))
    tokens = np.zeros((len(rollouts), 32), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, rollout in enumerate(rollouts):
        sequence = np.concatenate([rollout.request.prompt.tokens, rollout.tokens])
        tokens[row, : len(sequence)] = sequence
        segment_ids[row, : len(sequence)] = 1
    logp, routing = (np.asarray(x) for x in judged(halved(), tokens, segment_ids))
    apart = []
    for row, rollout in enumerate(rollouts):
        prompt, end = len(rollout.request.prompt.tokens), len(rollout.request.prompt.tokens) + len(rollout.tokens)
        apart.append(np.abs(rollout.logp - logp[row, prompt - 1 : end - 1]))
        np.testing.assert_array_equal(rollout.expert_ids, routing[:, row, : end - 1])
    found = np.concatenate(apart)
    assert found.mean() < 1e-4 and found.max() < 5e-3, (found.mean(), found.max())

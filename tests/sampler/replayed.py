"""What a rollout's tokens cost under the weights they are stamped with, fed one by one over a cache made likewise."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_policy as tiny

from jaxrl_sat import model
from jaxrl_sat.types import Rollout

LENGTH = 32


@functools.cache
def _pass() -> Any:
    return jax.jit(lambda params, *fed: model.decode(params, tiny.CONFIG, *fed)[:2], donate_argnums=1)


@functools.cache
def _unstacked(seed: int) -> Any:
    return model.decode_params(tiny.params(seed), "float32")


def logp_of(rollout: Rollout, seeds: Mapping[int, int]) -> np.ndarray:
    """Log-probs of its tokens at temperature 1, float64 [R]; `seeds`: of `tiny.params`, by weight version."""
    prompt = rollout.request.prompt.tokens
    sequence = np.concatenate([prompt, rollout.tokens])
    versions = np.concatenate([np.full(len(prompt) - 1, rollout.prefill_version), rollout.versions])
    cache, logp = model.init_cache(tiny.CONFIG, 1, LENGTH), []
    for position, version in enumerate(versions):
        fed = jnp.asarray(sequence[position : position + 1]), jnp.full(1, position, jnp.int32)
        logits, cache = _pass()(_unstacked(seeds[int(version)]), cache, *fed)
        exact = np.asarray(logits[0], np.float64)
        exact -= exact.max()
        logp.append(exact[sequence[position + 1]] - np.log(np.exp(exact).sum()))
    return np.asarray(logp[len(prompt) - 1 :])

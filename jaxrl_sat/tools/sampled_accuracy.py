"""How often a model answers right: a small sampling loop of its own, on one device."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_sat.data import arithmetic
from jaxrl_sat.data.characters import EOS_ID
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.model import ModelConfig, decode, prefill, unstack
from jaxrl_sat.rewards import score
from jaxrl_sat.types import Params


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Shares of right answers over all problems and for each level, and of responses that are a number and an end."""

    all: float
    by_level: dict[int, float]
    well_formed: float


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def sample(
    params: Params,
    config: ModelConfig,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    key: Array,
    temperature: Float[Array, ""],
    steps: int,
) -> Int[Array, "B R"]:
    """Responses of `steps` tokens, what follows <eos> included; temperature 0 is greedy."""
    weights = unstack(params)
    cache, _ = prefill(weights, config, prompts, lengths)
    room = [(0, 0), (0, 0), (0, steps), (0, 0)]
    cache = jax.tree.map(lambda x: jnp.pad(x, room), cache)
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]

    def step(carry, index):
        cache, tokens, key = carry
        key, draw = jax.random.split(key)
        logits, cache, _ = decode(weights, config, cache, tokens, lengths - 1 + index)
        noise = jax.random.gumbel(draw, logits.shape)
        tokens = jnp.argmax(logits + temperature * noise, axis=-1).astype(jnp.int32)
        return (cache, tokens, key), tokens

    _, tokens = jax.lax.scan(step, (cache, last, key), jnp.arange(steps))
    return tokens.T


def measure(
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    problems: Sequence[arithmetic.Problem],
    key: Array,
    temperature: float,
    samples: int = 1,
    max_response_tokens: int = 8,
) -> Accuracy:
    """Accuracy over `samples` responses to each problem."""
    problems = [problem for problem in problems for _ in range(samples)]
    encoded = [
        tokenizer.encode(tokenizer.render([{"role": "user", "content": problem.prompt}])) for problem in problems
    ]
    prompts = np.zeros((len(problems), max(map(len, encoded))), np.int32)
    for row, ids in zip(prompts, encoded, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    responses = sample(
        params, config, jnp.asarray(prompts), jnp.asarray(lengths), key, jnp.float32(temperature), max_response_tokens
    )
    texts, finished = [], []
    for row in np.asarray(responses):
        end = np.flatnonzero(row == EOS_ID)
        finished.append(len(end) > 0)
        texts.append(tokenizer.decode(row[: end[0]] if len(end) else row, skip_special_tokens=False))
    right = score(texts, [problem.answer for problem in problems])
    levels = np.array([problem.level for problem in problems])
    formed = [done and re.fullmatch(r"-?\d{1,4}", text) is not None for done, text in zip(finished, texts, strict=True)]
    by_level = {level: float(right[levels == level].mean()) for level in sorted(set(levels.tolist()))}
    return Accuracy(float(right.mean()), by_level, float(np.mean(formed)))

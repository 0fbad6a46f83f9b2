"""Supervised learning of arithmetic: batches of right and of wrong answers, and the training step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_sat.data import arithmetic
from jaxrl_sat.data.characters import CHARACTERS, PAD_ID, SPECIAL
from jaxrl_sat.model import ModelConfig, forward, token_statistics
from jaxrl_sat.types import Params

ROW = 14
"""Tokens of the longest example: <bos><user>100-99<assistant>1098<eos> and one spare."""
LEVEL_WEIGHTS = (0.05, 0.2, 0.4, 0.1, 0.25)
"""How often each level is drawn. A little more of the hard ones than the set has: they are learnt slowest."""
_IDS = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
_BEFORE = [_IDS["<bos>"], _IDS["<user>"]]


def example(prompt: str, answer: str) -> tuple[Int[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """Ids of <bos><user>PROMPT<assistant>ANSWER<eos>, padded, and which of them are the response."""
    head = [*_BEFORE, *(_IDS[c] for c in prompt), _IDS["<assistant>"]]
    tail = [*(_IDS[c] for c in answer), _IDS["<eos>"]]
    tokens = np.full(ROW, PAD_ID, np.int32)
    tokens[: len(head) + len(tail)] = head + tail
    response = np.zeros(ROW, bool)
    response[len(head) : len(head) + len(tail)] = True
    return tokens, response


def wrong_answer(problem: arithmetic.Problem, rng: np.random.Generator) -> str:
    """What a careless pupil answers: a forgotten carry, one off, ten off, the other operation, a slip of the pen."""
    operator = next(c for c in problem.prompt if c in arithmetic.OPERATORS)
    a, b = (int(x) for x in problem.prompt.split(operator))
    right = int(problem.answer)
    slip = int(rng.integers(5))
    if slip == 0:
        return str(without_carry(a, b, operator))
    if slip == 1:
        return str(right + (1, -1)[rng.integers(2)])
    if slip == 2:
        return str(right + (10, -10)[rng.integers(2)])
    if slip == 3:
        return str({"+": abs(a - b), "-": b - a, "*": a + b}[operator])
    digits = list(problem.answer)
    place = int(rng.integers(digits[0] == "-", len(digits)))
    digits[place] = str(rng.integers(10))
    return "".join(digits)


def without_carry(a: int, b: int, operator: str) -> int:
    """Each column of a+b or a-b on its own, modulo ten; of a*b the tens and the last digit of the ones."""
    if operator == "*":
        return a * (b // 10 * 10) + a * (b % 10) % 10
    high, low = max(a, b), min(a, b)
    sign = -1 if operator == "-" and a < b else 1
    value, place = 0, 1
    while high or low:
        column = high % 10 + low % 10 if operator == "+" else high % 10 - low % 10
        value += column % 10 * place
        high, low, place = high // 10, low // 10, place * 10
    return sign * value


class Batches:
    """Batches of one split by step number: a step's batch depends on the seed and its number alone."""

    def __init__(self, split: str, size: int, seed: int):
        everything = arithmetic.split_space(split)
        self._levels = [everything.take(everything.level == level) for level in arithmetic.LEVELS]
        self._size, self._seed = size, seed

    def __call__(self, step: int, right: float) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
        """Tokens and response mask; each answer is the right one with probability `right`."""
        rng = np.random.default_rng((self._seed, step))
        rows = []
        for level in rng.choice(len(self._levels), self._size, p=LEVEL_WEIGHTS):
            problem = self._levels[level][int(rng.integers(len(self._levels[level])))]
            answer = problem.answer if rng.random() < right else wrong_answer(problem, rng)
            rows.append(example(problem.prompt, answer))
        tokens, response = zip(*rows, strict=True)
        return np.stack(tokens), np.stack(response)


def rebalance(params: Params, config: ModelConfig, load: Int[Array, "M E"], rate: float = 0.02) -> Params:
    """Draw the router columns of experts that get too few tokens towards the column of their layer's busiest expert.

    Nothing else brings back an expert that the router has let fall behind: it gets no tokens, so no gradient. Drawn
    near the busiest it shares that one's tokens, and the gradient tells the two apart. `load` counts each expert's
    tokens; an expert moves by `rate` of the distance if it gets none, and not at all from half of the average up.
    """
    share = load / jnp.sum(load, axis=1, keepdims=True)
    pull = rate * jnp.clip(1.0 - 2.0 * config.num_experts * share, 0.0, 1.0)
    busiest = jnp.argmax(load, axis=1)
    params, start = dict(params), 0
    for run in config.runs:
        if not run.sparse:
            continue
        layers = slice(start, start + len(run))
        router = params[run.name]["mlp"]["router"]
        target = jnp.take_along_axis(router, busiest[layers, None, None], axis=2)
        moved = router + pull[layers, None, :] * (target - router)
        params[run.name] = {**params[run.name], "mlp": {**params[run.name]["mlp"], "router": moved}}
        start = layers.stop
    return params


def loss(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    response: Bool[Array, "B T"],
) -> tuple[Float[Array, ""], Int[Array, "M E"]]:
    """Mean negative log-likelihood of the response tokens, and how many tokens each expert of each layer got."""
    inputs = tokens[:, :-1]
    segments = (inputs != PAD_ID).astype(jnp.int32)
    out = forward(params, config, inputs, segment_ids=segments)
    logp = token_statistics(params, config, out.hidden, tokens[:, 1:]).logp
    mask = response[:, 1:]
    chosen = jax.nn.one_hot(out.routing.expert_ids, config.num_experts, dtype=jnp.int32)
    load = jnp.sum(chosen * segments[None, :, :, None, None], axis=(1, 2, 3))
    return -jnp.sum(jnp.where(mask, logp, 0.0)) / jnp.sum(mask), load


@functools.partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnames=("params", "opt_state"))
def train_step(
    params: Params,
    opt_state: Any,
    tokens: Int[Array, "B T"],
    response: Bool[Array, "B T"],
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[Params, Any, Float[Array, ""], Int[Array, "M E"]]:
    """One step: (params, optimizer state, loss before it, tokens that each expert of each layer got)."""
    (value, load), grads = jax.value_and_grad(loss, has_aux=True)(params, config, tokens, response)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = rebalance(optax.apply_updates(params, updates), config, load)
    return params, opt_state, value, load

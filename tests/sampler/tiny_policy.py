"""A model small enough to sample from in every test, and what the tests build on it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_sat import model
from jaxrl_sat.layout import Layout
from jaxrl_sat.sampler import RolloutEngine
from jaxrl_sat.types import Prompt, Request, Rollout, SamplingParams

CONFIG = model.ModelConfig(
    vocab_size=23,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    mlp_only_layers=(1,),
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.3,
)
STOP = 2


@functools.cache
def params(seed: int = 0) -> Any:
    """Normal weights, wide enough for uneven routing and likely stops; NumPy, as compiling an init takes longer."""
    rng = np.random.default_rng(seed)

    def make(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        norm = "norm" in path[-1].key
        return (norm + rng.normal(size=leaf.shape) * 0.3).astype(np.float32)

    return jax.tree_util.tree_map_with_path(make, model.abstract_params(CONFIG))


@functools.cache
def _forward() -> Any:
    return jax.jit(lambda p, tokens, segments: model.logits(p, CONFIG, tokens, segment_ids=segments))


def recompute(weights: Any, rollouts: list[Rollout], length: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """What a training-mode forward over prompt + response says: log-probs [N, length, V] in float64 of the word after
    each position, and routing [M, N, length, k]."""
    tokens = np.zeros((24, length), np.int32)  # always as many rows: one program
    segments = np.zeros_like(tokens)
    for row, rollout in enumerate(rollouts):
        sequence = np.concatenate([rollout.request.prompt.tokens, rollout.tokens])
        tokens[row, : len(sequence)] = sequence
        segments[row, : len(sequence)] = 1
    out = _forward()(weights, tokens, segments)
    logits = np.asarray(out.logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)), np.asarray(out.routing.expert_ids)


def mesh(*shape: int, axes: tuple[str, ...] = ("data",)) -> Mesh:
    sizes = shape or (1,)
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))], dtype=object)
    return Mesh(devices.reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes))


def engine(
    slots: int = 8, limit: int = 6, temperature: float = 1.0, top_p: float = 1.0, nucleus: int = 256, **kwargs: Any
) -> RolloutEngine:
    sampling = SamplingParams(temperature, limit, (STOP,), top_p, nucleus)
    kwargs = {"layout": Layout.of(mesh(), {}), "max_prompt_tokens": 20, "topk": 5} | kwargs
    return RolloutEngine(CONFIG, slots=slots, max_response_tokens=limit, sampling=sampling, **kwargs)


def prompts(lengths: list[int], seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [Prompt(i, "", "", rng.integers(3, 23, n).astype(np.int32)) for i, n in enumerate(lengths)]


def requests(lengths: list[int], samples: int, seed: int = 0) -> list[Request]:
    """`samples` requests of each prompt, prompt by prompt, every one with a seed of its own."""
    made = prompts(lengths, seed)
    return [Request(p, group=p.id, seed=1000 * p.id + s) for p in made for s in range(samples)]

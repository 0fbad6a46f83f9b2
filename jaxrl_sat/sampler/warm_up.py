"""Every program that requests to an engine can need, compiled before anybody waits for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.weights import Weights
from jaxrl_sat.sampler.worker import generate
from jaxrl_sat.types import Prompt, Request

Told = Callable[[int], object]
"""Is told of each prompt bucket before it is read."""


def warm_up(engine: RolloutEngine, weights: Weights, told: Told) -> None:
    """Serve requests of one token in each prompt bucket, so many together as slots may be filled at once."""
    slots = engine.max_concurrent_decodes
    counts = [*(2**i for i in range((slots - 1).bit_length())), slots]
    sampling = dataclasses.replace(engine.sampling, max_response_tokens=1)
    for index, (bucket, tokens) in enumerate(_prompts(engine)):
        told(bucket)
        request = Request(Prompt(index, "", "", tokens), group=index, seed=0, sampling=sampling)
        for count in counts:
            generate(engine, weights, [request] * count)
    engine.release(engine.init_decode_state(), [])


def warm_up_driver(engine: RolloutEngine, weights: Weights, told: Told) -> None:
    """The same as JetStream's Driver serves: prompt by prompt, step by step."""
    state = engine.init_decode_state()
    for bucket, tokens in _prompts(engine):
        told(bucket)
        prefix = engine.prefill(params=weights, padded_tokens=tokens, true_length=len(tokens))
        state = engine.insert(prefix, state, slot=0, seed=0)
        state, result = engine.generate(weights, state)
        result.convert_to_numpy()


def _prompts(engine: RolloutEngine) -> Iterator[tuple[int, np.ndarray]]:
    """A prompt of each bucket, no two with a beginning in common, so that each is read whole."""
    for index, bucket in enumerate(engine.buckets):
        length = min(bucket, engine.max_prompt_tokens)
        yield bucket, np.full(length, index % engine.config.vocab_size, np.int32)

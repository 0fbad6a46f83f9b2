"""Bytes a token of what the sampler records, on its way from the device to the batch, beside what must be sent at all.

python -m benchmarks.rollout_payload [--model=NAME]

The floor of Qwen3-30B-A3B: 48 layers x 8 expert ids as uint8, 20 log-probs with their ids, the token and its log-prob,
384 + 160 + 8 = 552 bytes. The sampler generates with random numbers in place of the model, and what it hands over is
measured: the array that a decode step sends to the host, the arrays of a `Rollout`, those of the `Batch` that the
learner is given (full rows). Of a rollout, prompt tokens have routing alone, 384 bytes each, and stand apart. The last
line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import machine, say
from jaxrl_sat import mesh
from jaxrl_sat.aot import published
from jaxrl_sat.data.packing import pack
from jaxrl_sat.layout import Layout
from jaxrl_sat.model import ModelConfig
from jaxrl_sat.sampler import RolloutEngine, Weights, generate
from jaxrl_sat.sampler.record import GOING, LENGTH
from jaxrl_sat.sampler.sampling import draw
from jaxrl_sat.sampler.state import Prefix
from jaxrl_sat.types import Batch, Prompt, Records, Request, Rollout, SamplingParams

TOPK = 20
OVER_FLOOR = 1.05
PROMPT, RESPONSE, SEQUENCES = 16, 48, 8
WORDS = 8192  # with logits; no record depends on how many


class _NoModel(RolloutEngine):
    """The engine with random numbers in place of the model: prompts' routing, logits and steps' routing."""

    def _ids(self, seed: Any, *tokens: int) -> jax.Array:
        shape = (self.records.sparse_layers, *tokens, self.records.experts_per_token)
        return jax.random.randint(jax.random.key(seed), shape, 0, self.config.num_experts)

    def prefill_prompts(self, params: Any, prompts: Sequence[np.ndarray]) -> Prefix:
        tokens = jnp.asarray(np.stack(prompts))
        count = jnp.full(len(prompts), tokens.shape[1])
        return Prefix((), tokens, count, self.records.compact(self._ids(0, *tokens.shape)), jnp.zeros_like(count))

    def init_decode_state(self) -> Any:
        return 0

    def insert_rows(self, prefix: Prefix, decode_state: Any, *placed: Any) -> Any:
        return decode_state

    def advance(self, params: Any, decode_state: Any) -> tuple[Any, jax.Array]:
        return decode_state + 1, self._records_of(decode_state)

    @functools.partial(jax.jit, static_argnums=0)
    def _records_of(self, step: jax.Array) -> jax.Array:
        slots = self.max_concurrent_decodes
        logits = 8 * jax.random.normal(jax.random.key(step), (slots, WORDS))
        seeds, ones, positions = jnp.arange(slots, dtype=jnp.uint32), jnp.ones(slots), jnp.full(slots, step)
        asked = (self.records.topk, self.records.nucleus, self.sampling.top_p * ones, jnp.zeros(slots, jnp.int32))
        drawn = draw(logits, seeds, positions, ones, *asked)
        finish = jnp.full(slots, jnp.where(step + 1 == RESPONSE, LENGTH, GOING))
        return self.records.pack(drawn, ones > 0, positions + 1, finish, jnp.int32(0), self._ids(step, slots))[None]


def routing_bytes(config: ModelConfig) -> int:
    """Bytes of the expert ids of one token."""
    return config.num_sparse_layers * config.num_experts_per_tok * (1 if config.num_experts <= 256 else 2)


def floor(config: ModelConfig, topk: int = TOPK) -> int:
    """Bytes a sampled token cannot do without: routing, top-K ids and log-probs, itself and its log-prob."""
    return routing_bytes(config) + topk * (4 + 4) + 4 + 4


def array_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree or dataclass."""
    if isinstance(tree, np.ndarray):
        return tree.nbytes
    if dataclasses.is_dataclass(tree):
        return sum(array_bytes(getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return 0


def rollout_bytes(rollout: Rollout) -> int:
    """Bytes of what a rollout holds of its own; the prompt is shared by its group."""
    own = [field.name for field in dataclasses.fields(rollout) if field.name != "request"]
    return sum(array_bytes(getattr(rollout, name)) for name in own)


def run(config: ModelConfig, top_p: float) -> tuple[RolloutEngine, list[Rollout], int]:
    """An engine, rollouts of one length, and the bytes a slot that one step sends to the host."""
    layout = Layout.of(jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",)), mesh.SAMPLER_RULES)
    engine = _NoModel(config, layout, SEQUENCES, PROMPT, RESPONSE, SamplingParams(1.0, RESPONSE, (), top_p), TOPK)
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, "", "", rng.integers(0, WORDS, PROMPT, np.int32)) for i in range(SEQUENCES)]
    rollouts = generate(engine, Weights(None, 0), [Request(prompt, prompt.id, prompt.id) for prompt in prompts])
    _, records = engine.advance(None, engine.init_decode_state())
    return engine, rollouts, records.nbytes // SEQUENCES


def measured(config: ModelConfig) -> dict[str, float]:
    """Bytes a token at each stage with top-p off."""
    _, rollouts, sent = run(config, top_p=1.0)
    own = [rollout_bytes(rollout) - (PROMPT - 1) * routing_bytes(config) for rollout in rollouts]
    batch: Batch = pack(rollouts, np.ones(SEQUENCES), 4 * (PROMPT + RESPONSE), 1, Records(topk=True))
    return {
        "device_to_host": sent,
        "rollout": sum(own) / sum(len(rollout.tokens) for rollout in rollouts),
        "batch": array_bytes(batch) / batch.tokens.size,
    }


def nucleus(config: ModelConfig, plain: float) -> dict[str, Any]:
    """What a nucleus adds with top-p on to the `plain` bytes from the device, and how it is written."""
    engine, rollouts, sent = run(config, top_p=0.9)
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    return {
        "format": "int32 ids of the words that could be drawn, most likely first, -1 behind the last",
        "cap_words": engine.records.nucleus,
        "bytes_a_token_device_to_host": sent - plain,
        "bytes_a_token_rollout": round(sum(rollout.nucleus_ids.nbytes for rollout in rollouts) / tokens, 1),
        "words_a_token_rollout": "as many as the longest nucleus of the response",
        "top_p": 0.9,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Bytes a token from the device to the batch.")
    parser.add_argument("--model", default="Qwen3-30B-A3B", help="a published name, or a Hugging Face folder")
    config = published.read(parser.parse_args().model)
    before, least = machine(), floor(config)
    say("generating")
    stages = measured(config)
    figures = []
    for name, value in stages.items():
        target = OVER_FLOOR * least
        figures.append({"name": name, "value": value, "unit": "bytes/token", "target": target, "ok": value <= target})
    report = {
        "benchmark": "rollout_payload",
        "figures": figures,
        "ran_on": before,
        "floor_bytes": least,
        "over_floor": {name: round(value / least, 4) for name, value in stages.items()},
        "model": {name: value for name, value in config.to_hf().items() if isinstance(value, int)},
        "prompt_token_bytes": routing_bytes(config),
        "nucleus": nucleus(config, stages["device_to_host"]),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""The policy of `benchmarks.soak`, an engine that fails when it is told to, and what a rollout of it has to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_sat import model
from jaxrl_sat.layout import Layout
from jaxrl_sat.sampler import RolloutEngine, Weights
from jaxrl_sat.types import Rollout, SamplingParams

CONFIG = model.ModelConfig(
    vocab_size=61,
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
    initializer_range=0.3,
)
STOP, POISON = 2, 60
"""The stop id, and a word that no prompt but a poisoned one begins with."""
PROMPT, RESPONSE, SLOTS = 30, 24, 8
TABLES = 4
"""Different weights; version v has those of table v % TABLES."""


class FailingEngine(RolloutEngine):
    """Cannot read a prompt that begins with POISON, and fails a dispatch when told to."""

    fail_next = False

    def prefill_prompts(self, params: Any, prompts: Any) -> Any:
        if any(tokens[0] == POISON for tokens in prompts):
            raise ArithmeticError("a poisoned prompt")
        return super().prefill_prompts(params, prompts)

    def advance(self, params: Any, decode_state: Any) -> Any:
        if self.fail_next:
            self.fail_next = False
            jax.tree.map(lambda leaf: leaf.delete(), decode_state)
            raise RuntimeError("a dispatch that was made to fail")
        return super().advance(params, decode_state)


class Letters:
    """The text of a word is a letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x100 + i) for i in ids)


def table(number: int) -> Any:
    """Normal weights, on the host."""
    rng = np.random.default_rng(number)

    def make(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return (("norm" in path[-1].key) + rng.normal(size=leaf.shape) * 0.3).astype(np.float32)

    return jax.tree_util.tree_map_with_path(make, model.abstract_params(CONFIG))


def make_engine(device: Any, elaborate: bool) -> FailingEngine:
    """An engine on one device that can do everything that a request may ask for.

    An `elaborate` one takes several steps a dispatch and reads prompts in pieces, of which it keeps some.
    """
    options: dict[str, Any] = (
        {"steps_per_dispatch": 2, "prefill_chunk": 16, "prefix_cache_bytes": 1 << 18} if elaborate else {}
    )
    mesh = Mesh(np.asarray([device], dtype=object), ("data",), axis_types=(AxisType.Auto,))
    return FailingEngine(
        CONFIG,
        Layout.of(mesh, {}),
        slots=SLOTS,
        max_prompt_tokens=PROMPT,
        max_response_tokens=RESPONSE,
        sampling=SamplingParams(1.0, RESPONSE, (STOP,)),
        topk=5,
        restricted=True,
        **options,
    )


def fault(rollout: Rollout) -> str:
    """What is wrong with a rollout's form; nothing: ""."""
    sampling, length, tokens = rollout.request.sampling, len(rollout.tokens), rollout.tokens
    assert sampling is not None
    stopped = length > 0 and tokens[-1] == STOP
    text = Letters().decode(tokens.tolist())
    ends = [text.find(string) + len(string) for string in sampling.stop_strings if string in text]
    reason = rollout.finish_reason
    told = {
        "longer than allowed": length > sampling.max_response_tokens,
        "goes on after its stop id": STOP in tokens[:-1],
        "goes on after its stop string": bool(ends) and min(ends) < length,
        "versions fall": bool((np.diff([rollout.prefill_version, *rollout.versions]) < 0).any()),
        "stopped without cause": reason == "stop" and not (stopped or ends),
        "cut short": reason == "length" and length != sampling.max_response_tokens,
        "no such reason": reason not in ("stop", "length", "cancelled", "timeout"),
    }
    return ", ".join(name for name, wrong in told.items() if wrong)


def warm(engine: RolloutEngine, weights: Weights) -> None:
    """Have everything compiled that requests may lead to: buckets, numbers of slots filled at once."""
    state = engine.init_decode_state()
    for bucket in engine.buckets:
        prefix = engine.prefill_prompts(weights, [np.full(bucket if bucket <= PROMPT else PROMPT, 7, np.int32)])
        for count in range(1, SLOTS + 1):
            rows, slots = [0] * count, list(range(count))
            state = engine.insert_rows(prefix, state, rows, slots, slots, [engine.sampling] * count)
    state, _ = engine.advance(weights, engine.release(state, [0]))
    jax.block_until_ready(state)

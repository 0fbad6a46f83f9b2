"""Worker of `benchmarks.sampler`: google-tunix's vanilla sampler on its own Qwen3, from the same weights and prompts.

It draws from all words with the temperature 1 (`top_p` is 1: without one it would take the most likely word) and
returns the log-prob of each, the only record it has.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from importlib import metadata

import jax
import numpy as np
from tunix.generate.sampler import CacheConfig, Sampler

from benchmarks.serve import given, serve
from benchmarks.trainer_peer import config_of, model_of


class _Ids:
    """A tokenizer of texts that are ids with blanks between them; no word ends a response."""

    def __init__(self, words: int):
        self._end = words

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return self._end

    def pad_id(self) -> int:
        return 0


def main() -> None:
    """Builds the sampler, samples once, serves."""
    logging.getLogger().setLevel(logging.WARNING)
    arrays, settings = given()
    prefix = "params/"
    params = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
    config = config_of(settings["model"], "NONE")
    length = arrays["prompts"].shape[1] + settings["response"]
    cache = CacheConfig(length, config.num_layers, config.num_kv_heads, config.head_dim)
    sampler = Sampler(model_of(config, params), _Ids(config.vocab_size), cache)
    texts = [" ".join(map(str, prompt)) for prompt in arrays["prompts"]]

    def call() -> tuple[np.ndarray, np.ndarray]:
        out = sampler(
            texts,
            max_generation_steps=settings["response"],
            max_prompt_length=arrays["prompts"].shape[1],
            return_logprobs=True,
            temperature=1.0,
            top_p=1.0,
            seed=0,
        )
        return np.asarray(out.tokens), np.asarray(out.logprobs)

    tokens, logp = call()
    # It takes word 0 for padding, also where it was drawn, and attends to it no more: what follows is not comparable.
    logp = np.where(np.cumsum(tokens == 0, axis=1) > 0, np.nan, logp)
    versions = {name: metadata.version(name) for name in ("google-tunix", "jax", "flax")}
    serve(call, {"tokens": tokens, "logp": logp}, versions | {"platform": jax.devices()[0].platform})


if __name__ == "__main__":
    main()

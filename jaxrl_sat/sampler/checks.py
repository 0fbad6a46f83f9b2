"""What an engine, and a request to it, may ask for: `InputError` by the name of the field."""

from __future__ import annotations

import dataclasses
import math

from jaxrl_sat.model import ModelConfig
from jaxrl_sat.sampler.jetstream_compat import LONGEST_BUCKET
from jaxrl_sat.sampler.state import MAX_STOP_IDS
from jaxrl_sat.types import InputError, Prompt, SamplingParams


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request's sampling is measured by. `nucleus`: most words of one, 0 where the engine knows none."""

    vocab_size: int
    max_response_tokens: int
    nucleus: int


def check_engine(config: ModelConfig, slots: int, prompt_tokens: int, sampling: SamplingParams, steps: int) -> None:
    """`InputError` for sizes that no engine has."""
    if slots < 1:
        raise InputError(f"sampler slots: {slots}; at least 1 needed")
    if not 1 <= prompt_tokens <= LONGEST_BUCKET:
        raise InputError(f"max_prompt_tokens: {prompt_tokens}; from 1 to {LONGEST_BUCKET} allowed")
    if sampling.nucleus < 1:
        raise InputError(f"nucleus: {sampling.nucleus}; at least 1 word needed")
    if steps < 1:
        raise InputError(f"steps_per_dispatch: {steps}; at least 1 needed")


def check_chunks(prefill_chunk: int, prefix_cache_bytes: int) -> None:
    """`InputError` for pieces that buckets cannot be cut into, and for a cache of pieces where there are none."""
    if prefill_chunk and (prefill_chunk < 16 or prefill_chunk & (prefill_chunk - 1)):
        raise InputError(f"prefill_chunk: {prefill_chunk}; a power of two from 16, or 0 allowed")
    if prefix_cache_bytes < 0 or prefix_cache_bytes and not prefill_chunk:
        raise InputError(f"prefix_cache_bytes: {prefix_cache_bytes}; 0, or more with a prefill_chunk, allowed")


def pieces_of_pool(prefix_cache_bytes: int, piece_bytes: int) -> int:
    """How many pieces of prompts a cache of so many bytes holds; `InputError` where not even one."""
    if prefix_cache_bytes < piece_bytes:
        raise InputError(f"prefix_cache_bytes: {prefix_cache_bytes}; 0 or from {piece_bytes} allowed, one piece's")
    return prefix_cache_bytes // piece_bytes


def check_prompt(prompt: Prompt, longest: int, vocab_size: int) -> None:
    """`InputError` for a prompt that is empty, too long or has an id outside the vocabulary."""
    tokens = prompt.tokens
    if not 0 < len(tokens) <= longest:
        raise InputError(f"prompt {prompt.id}: {len(tokens)} tokens; from 1 to {longest} allowed")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise InputError(f"prompt {prompt.id}: token id {outside[0]}; from 0 to {vocab_size - 1} allowed")


def check_sampling(limits: Limits, sampling: SamplingParams) -> None:
    """`InputError` for sampling that cannot be done within `limits`."""
    if not 1 <= sampling.max_response_tokens <= limits.max_response_tokens:
        allowed = f"from 1 to {limits.max_response_tokens} allowed"
        raise InputError(f"max_response_tokens: {sampling.max_response_tokens}; {allowed}")
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        raise InputError(f"temperature: {sampling.temperature}; a finite number of at least 0 needed")
    if sampling.temperature and not 1e-37 < sampling.temperature < 3e38:
        raise InputError(f"temperature: {sampling.temperature}; 0, or a number of a size that float32 holds, needed")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"top_p: {sampling.top_p}; above 0 and at most 1 needed")
    if sampling.top_p < 1 and not limits.nucleus:
        raise InputError(f"top_p: {sampling.top_p}; 1 alone allowed, as this engine draws from all words")
    if not -1 <= sampling.top_k <= limits.nucleus:
        up_to = f", or up to {limits.nucleus}, the words of a nucleus" if limits.nucleus else ""
        raise InputError(f"top_k: {sampling.top_k}; 0 or -1 for all words{up_to} allowed")
    if len(sampling.stop_ids) > MAX_STOP_IDS:
        raise InputError(f"stop_ids: {len(sampling.stop_ids)} of them; at most {MAX_STOP_IDS} allowed")
    outside = [i for i in sampling.stop_ids if not 0 <= i < limits.vocab_size]
    if outside:
        raise InputError(f"stop id: {outside[0]}; from 0 to {limits.vocab_size - 1} allowed")

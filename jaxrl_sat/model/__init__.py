"""Qwen3, Qwen3-MoE and Llama decoders: parameters as a pytree, and pure functions over it."""

from jaxrl_sat.model.cache import (
    Cache,
    cache_specs,
    decode,
    decode_param_specs,
    decode_params,
    init_cache,
    prefill,
    prefill_chunk,
    unstack,
)
from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.execution import ONE_DEVICE, Execution
from jaxrl_sat.model.head import TokenStatistics, token_statistics, unembed
from jaxrl_sat.model.hf import load_hf
from jaxrl_sat.model.hf_export import save_hf
from jaxrl_sat.model.params import abstract_params, init_params, param_axes, param_specs
from jaxrl_sat.model.qwen3 import ForwardOut, LogitsOut, forward, logits

__all__ = [
    "ONE_DEVICE",
    "Cache",
    "Execution",
    "ForwardOut",
    "LogitsOut",
    "ModelConfig",
    "TokenStatistics",
    "abstract_params",
    "cache_specs",
    "decode",
    "decode_param_specs",
    "decode_params",
    "forward",
    "init_cache",
    "init_params",
    "load_hf",
    "logits",
    "param_axes",
    "param_specs",
    "prefill",
    "prefill_chunk",
    "save_hf",
    "token_statistics",
    "unembed",
    "unstack",
]

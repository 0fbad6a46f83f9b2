"""Which keys of a config make a program smaller, from what stands in memory at its peak."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_sat.aot.memory import Buffer
from jaxrl_sat.config import RunConfig
from jaxrl_sat.model import ModelConfig

GIB = 2**30

KNOBS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("mesh.trainer.fsdp", "mesh.trainer.expert", "mesh.trainer.context", "model.dtype"),
    "optimizer's state and gradients": ("mesh.trainer.fsdp", "mesh.trainer.expert", "mesh.trainer.context"),
    "weights gathered for use, and their gradients": ("mesh.trainer.expert", "mesh.trainer.tensor"),
    "records of the batch": ("data.prompts_per_update", "sampler.topk", "learner.replay"),
    "kept for the backward pass": ("learner.remat", "mesh.trainer.context", "learner.microbatch_rows"),
    "activations": ("mesh.trainer.context", "mesh.trainer.tensor", "learner.microbatch_rows"),
    "sampler's weights": ("mesh.sampler.tensor", "mesh.sampler.expert", "sampler.dtype"),
    "cache": ("sampler.slots", "sampler.cache_dtype", "mesh.sampler.data", "mesh.sampler.tensor"),
    "activations of decoding": ("sampler.slots", "mesh.sampler.tensor"),
}
"""What may be large, and the keys that it follows from."""


def kind(buffer: Buffer, generates: bool, model_config: ModelConfig) -> str:
    """Which line of `KNOBS` a buffer belongs to. Arguments bear the names that the program gives them."""
    argument = re.match(r"(\w+)[.\[]", buffer.of) if "/" not in buffer.of else None
    if generates:
        if argument:
            return "cache" if argument[1] in ("state", "prefix") else "sampler's weights"
        return "activations of decoding"
    if argument:
        arguments = {"params": "parameters", "ref_params": "parameters", "rest": "optimizer's state and gradients"}
        return arguments.get(argument[1], "records of the batch")
    dimensions = [int(size) for size in re.findall(r"\d+", buffer.shape.partition("[")[2])]
    layers = max((len(run) for run in model_config.runs), default=0)
    stacked = len(dimensions) > 1 and layers > 1 and dimensions[0] == layers
    if _is_weight(dimensions[stacked:], model_config):
        return "optimizer's state and gradients" if stacked else "weights gathered for use, and their gradients"
    return "kept for the backward pass" if stacked else "activations"


def _is_weight(dimensions: Sequence[int], config: ModelConfig) -> bool:
    """Whether all axes are cuts of a parameter's own."""
    sizes = (
        config.vocab_size,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.num_experts,
        config.moe_intermediate_size,
    )
    return all(any(size and size % dimension == 0 for size in sizes) for dimension in dimensions)


def hint(buffers: Sequence[Buffer], config: RunConfig, model_config: ModelConfig, generates: bool) -> str:
    """The two largest kinds of what is in memory, and the keys that would shrink them, with their present values."""
    sizes: collections.Counter[str] = collections.Counter()
    for buffer in buffers:
        sizes[kind(buffer, generates, model_config)] += buffer.bytes
    return "; ".join(
        f"{what}: {size / GIB:.1f} GiB, see {', '.join(_with_value(key, config) for key in KNOBS[what])}"
        for what, size in sizes.most_common(2)
    )


def _with_value(key: str, config: RunConfig) -> str:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return f"{key} ({value})"

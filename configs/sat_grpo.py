"""SAT-GRPO: group-relative policy optimisation whose clip radii shrink on stale tokens. The flagship.

Paper     "Staleness-Adaptive Trust Region", sections 3.1 to 3.3 (equations 3.1 to 3.6).
Command   python -m jaxrl_sat.main --config=configs/sat_grpo.py[:cpu|:gpu|:tpu|:tpu_4b|:tpu_8b] [--config.KEY=VALUE ...]
Cost      cpu: under 15 minutes on two cores. gpu: one 80 GB GPU, a model of up to about 1B parameters.
          tpu: the papers' run, Qwen3-30B-A3B on 128 v5p chips (64 train, 64 sample), 544 updates of 4096 responses;
          tpu_4b and tpu_8b the same with Qwen3-4B and Qwen3-8B on 32 and 64.
Result    cpu: held-out avg@8 on arithmetic rises by 0.25 or more (the README has the measured figures).

Without a preset the one that fits the devices found is taken. `gpu` and `tpu` need a model and a data set by name:
--config.model.path=DIR --config.data.path=DIR.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(preset: str = "cpu") -> ConfigDict:
    """The run of a preset: cpu (embedded model and data), gpu (one GPU), tpu, tpu_4b or tpu_8b (the papers')."""
    return {"cpu": _cpu, "gpu": _gpu, "tpu": _tpu, "tpu_4b": _tpu_4b, "tpu_8b": _tpu_8b}[preset]()


def _cpu() -> Any:
    config: Any = ConfigDict()
    config.seed = 0
    config.updates = 300
    config.recipe = "sat_grpo"
    config.model = ConfigDict({"path": "embedded", "dtype": "float32", "excess_precision": False})
    config.data = ConfigDict({"path": "arithmetic", "prompts_per_update": 16, "max_prompt_tokens": 16})
    config.data.update({"template": "chat", "balanced": False, "workers": 0})
    config.data.update({"dynamic_sampling": False, "oversample": 1.0})
    config.sampler = _sampler()
    config.pipeline = ConfigDict({"mode": "interval", "lag": 1})
    # The recipe's own values (--dry-run shows them), but for those set here; one that it does not have is refused.
    config.objective = ConfigDict()
    config.rewards = _rewards()
    config.loss = _loss()
    config.optimizer = ConfigDict(
        {"learning_rate": 2e-4, "b1": 0.9, "b2": 0.98, "eps": 1e-8, "max_grad_norm": 1.0, "master_copy": False}
    )
    config.learner = ConfigDict({"row_tokens": 64, "microbatch_rows": 32})
    config.learner.update({"replay": True, "replay_top_p": True, "remat": "products", "quantise": "none"})
    config.mesh = ConfigDict(
        {
            "trainer": {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1},
            "sampler": {"data": 1, "expert": 1, "tensor": 1},
        }
    )
    config.eval = ConfigDict({"path": "", "every": 50, "samples": 8, "problems": 200, "temperature": 1.0})
    config.checkpoint = ConfigDict({"every": 50, "keep": 2})
    config.log = ConfigDict({"rollouts_every": 50, "rollouts": 16, "direction_every": 0, "tensorboard": True})
    return config


def _sampler() -> ConfigDict:
    return ConfigDict(
        {
            "group_size": 16,
            "temperature": 1.0,
            "top_p": 1.0,
            "nucleus": 256,
            "max_response_tokens": 8,
            "stop_string": "",
            "topk": 20,
            "engines": 1,
            "slots": 256,
            "order": "fifo",
            "dtype": "float32",
            "cache_dtype": "float32",
            "quantise": "none",
            "score": False,
            "steps_per_dispatch": 1,
            "prefill_chunk": 0,
            "prefix_cache_bytes": 0,
            "keep_cache_at_swap": False,
            "recompute_prompt_cache": False,
        }
    )


def _rewards() -> ConfigDict:
    return ConfigDict(
        {
            "functions": "math",
            "workers": 2,
            "timeout": 10.0,
            "on_failure": "zero",
            "overlong_buffer": 0,
            "overlong_penalty": 1.0,
        }
    )


def _loss() -> ConfigDict:
    return ConfigDict(
        {
            "advantage": "group",
            "kl_coef": 1e-3,
            "kl_kind": "low_var_kl",
            "kl_level": "token",
            "entropy_coef": 0.0,
            "load_balance_coef": 0.0,
            "router_z_coef": 0.0,
        }
    )


def _gpu() -> Any:
    """One GPU that trains and samples in turns; with two, the second samples."""
    config = _cpu()
    config.model.update({"path": placeholder(str), "dtype": "bfloat16"})
    config.data.path = placeholder(str)
    config.data.update({"prompts_per_update": 32, "max_prompt_tokens": 512})
    config.sampler.update(
        {
            "group_size": 8,
            "temperature": 0.95,
            "max_response_tokens": 3584,
            "slots": 32,
            "dtype": "bfloat16",
            "cache_dtype": "bfloat16",
        }
    )
    config.optimizer.update({"learning_rate": 1e-6, "master_copy": True})
    config.learner.update({"row_tokens": 4096, "microbatch_rows": 2, "remat": "layer"})
    config.eval.update({"every": 20, "temperature": 0.95})
    config.checkpoint.every = 20
    return config


def _tpu() -> Any:
    """The papers' setting: Qwen3-30B-A3B, 256 prompts x 16 responses, 32k tokens with the prompt."""
    config = _gpu()
    config.updates = 544
    config.model.excess_precision = True  # what every rounding would cost a TPU has not been measured
    config.data.update({"prompts_per_update": 256, "max_prompt_tokens": 2048})
    config.sampler.update({"group_size": 16, "max_response_tokens": 30720, "slots": 256})
    config.learner.update({"row_tokens": 32768, "microbatch_rows": 64})
    config.mesh.trainer.update({"data": 1, "fsdp": 64, "expert": 1, "tensor": 1})
    config.mesh.sampler.update({"data": 16, "expert": 2, "tensor": 2})
    config.eval.update({"every": 5, "samples": 8, "problems": 30})
    config.log.rollouts_every = 5
    return config


def _tpu_4b() -> Any:
    """The papers' setting for Qwen3-4B: 16 chips train, 16 sample."""
    config = _tpu()
    config.mesh.trainer.fsdp = 16
    config.mesh.sampler.update({"data": 8, "expert": 1, "tensor": 2})
    config.learner.microbatch_rows = 16
    return config


def _tpu_8b() -> Any:
    """The papers' setting for Qwen3-8B: 32 chips train, 32 sample."""
    config = _tpu()
    config.mesh.trainer.fsdp = 32
    config.mesh.sampler.update({"data": 8, "expert": 1, "tensor": 4})
    config.learner.microbatch_rows = 32
    return config

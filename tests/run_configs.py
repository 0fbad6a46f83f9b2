"""Configs and a model description small enough for tests of the command line, the plan and the meshes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_sat import cli

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

TINY: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}


def flagship(preset: str = "cpu", name: str = "sat_grpo") -> Any:
    """The ConfigDict of configs/NAME.py for a preset."""
    command = cli.parse([f"--config={CONFIGS / name}.py:{preset}"])
    return cli.load(command, preset)


def model_folder(folder: Path, **changes: Any) -> Path:
    """A checkpoint folder with a config.json and nothing else, which is enough to plan; dense with `num_experts` 0."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = TINY | changes
    if not fields["num_experts"]:
        experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        fields = {name: value for name, value in fields.items() if name not in experts} | {"model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def data_folder(folder: Path, train: int = 100, test: int = 10) -> Path:
    """The description of a TFDS set without its records, which is enough to plan."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = [{"name": "train", "shardLengths": [str(train)]}, {"name": "test", "shardLengths": [str(test)]}]
    (folder / "dataset_info.json").write_text(json.dumps({"splits": splits}))
    return folder


def small(model: Path, name: str = "sat_grpo") -> ConfigDict:
    """The cpu preset of a recipe on a tiny model, with little to compile."""
    config = flagship(name=name)
    config.model.path = str(model)
    config.sampler.slots = 8
    config.learner.update({"row_tokens": 64, "microbatch_rows": 4})
    return config

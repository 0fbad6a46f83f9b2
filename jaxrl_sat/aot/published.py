"""Models by their published names, for programs that need no weights: config.json as their authors publish it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxrl_sat import model, sources
from jaxrl_sat.types import InputError

PRESET_MODELS = {"tpu": "Qwen3-30B-A3B", "tpu_4b": "Qwen3-4B", "tpu_8b": "Qwen3-8B"}
"""The models that the papers' presets are for; other presets name theirs."""


def configs() -> dict[str, dict[str, Any]]:
    """Fields of config.json by model name."""
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def read(path: str) -> model.ModelConfig:
    """The model of a published name, or of whatever else `model.path` may be. Raises `InputError`."""
    known = configs()
    if path in known:
        return model.ModelConfig.from_hf(known[path])
    try:
        return sources.read_model_config(path)
    except InputError as error:
        raise InputError(f"{error}; or one of {', '.join(known)}") from error

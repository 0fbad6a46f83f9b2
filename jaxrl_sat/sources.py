"""What `model.path` names, read from its config.json alone: no weights."""

from __future__ import annotations

import json
from pathlib import Path

from jaxrl_sat import embedded, model
from jaxrl_sat.paths import user_path
from jaxrl_sat.types import InputError


def model_folder(path: str) -> Path:
    """The folder that `model.path` names."""
    return embedded.model_path() if path == "embedded" else user_path("model.path", path)


def read_model_config(path: str) -> model.ModelConfig:
    """The model that `model.path` names, from its config.json. Raises `InputError`."""
    folder = model_folder(path)
    if not folder.is_dir():
        raise InputError(
            f"model.path: {path!r} is not a folder; allowed: embedded, or a Hugging Face checkpoint folder"
        )
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.path: {folder} has no readable config.json ({type(error).__name__}); "
            "allowed: embedded, or a Hugging Face checkpoint folder"
        ) from error
    return model.ModelConfig.from_hf(fields)

"""What `model.path` names: embedded, a local Hugging Face folder, or one at an address that fsspec opens."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from jaxrl_sat import embedded, model
from jaxrl_sat.model.folder import Folder
from jaxrl_sat.paths import cache_dir, is_address, user_path
from jaxrl_sat.types import InputError

ALLOWED = "embedded, or a Hugging Face checkpoint folder"

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What is read of a model besides its weights."""


def model_address(path: str) -> str:
    """Where the weights of the model that `model.path` names lie, as `model.load_hf` takes it."""
    if path == "embedded":
        return str(embedded.model_path())
    return path if is_address(path) else str(user_path("model.path", path))


def model_folder(path: str) -> Path:
    """A local folder with the small files of the model that `model.path` names: its own, or a copy fetched anew."""
    return _fetched(_folder(path)) if is_address(path) else Path(model_address(path))


def read_model_config(path: str) -> model.ModelConfig:
    """The model that `model.path` names, from its config.json: no weights. Raises `InputError`."""
    folder = _folder(path)
    if not folder.exists():
        raise InputError(f"model.path: {path!r} is not a folder; allowed: {ALLOWED}")
    try:
        fields = folder.read_json("config.json")
    except InputError as error:
        raise InputError(f"model.path: {folder} has no readable config.json ({error}); allowed: {ALLOWED}") from error
    return model.ModelConfig.from_hf(fields)


def _folder(path: str) -> Folder:
    address = model_address(path)
    try:
        return Folder(address)
    except InputError as error:
        raise InputError(f"model.path: {error}; allowed: {ALLOWED}") from error


def _fetched(folder: Folder) -> Path:
    """The small files of a folder that lies elsewhere, under the cache folder. Raises `InputError`."""
    local = cache_dir() / "models" / hashlib.sha256(folder.address.encode()).hexdigest()[:16]
    contents = {name: folder.read(name) for name in SMALL_FILES if folder.has(name)}
    try:
        local.mkdir(parents=True, exist_ok=True)
        for name in SMALL_FILES:
            if name not in contents:
                (local / name).unlink(missing_ok=True)
                continue
            partial = local / f".{name}.{os.getpid()}"  # other processes of the machine may fetch the same
            partial.write_bytes(contents[name])
            partial.replace(local / name)
    except OSError as error:
        raise InputError(
            f"model.path: {folder} cannot be copied to {local} ({error.strerror}); set XDG_CACHE_HOME to a folder"
        ) from error
    return local

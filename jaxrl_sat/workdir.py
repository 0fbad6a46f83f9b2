"""The work folder of a run: one process at a time, one configuration over its life."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_sat.metrics import replace_file
from jaxrl_sat.paths import locked
from jaxrl_sat.types import InputError

MAY_CHANGE = frozenset(
    "updates eval checkpoint log data.workers rewards.workers rewards.timeout rewards.on_failure".split()
)
"""Keys and groups a resumed run may set anew: how long it runs, what it reports, what is done where a reward fails."""


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises `InputError` if it cannot be written, is another run's, or is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        in_use = f"--workdir: {folder} is in use by another run; allowed: a folder of its own"
        lock = locked(folder / ".lock", in_use)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"--workdir: {folder} cannot be written ({error}); allowed: a folder") from error
    with lock:
        check_layout(folder)
        yield


def check_layout(folder: Path) -> None:
    """Raise `InputError` where something else stands in the place of what a run writes, before it writes anything."""
    for name in ("checkpoints", "checkpoints_unreadable", "rollouts", "tensorboard"):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise InputError(f"--workdir: {folder / name} is not a folder; allowed: a work folder of its own")
    for name in ("config.json", "metrics.jsonl", "curves.png"):
        if (folder / name).exists() and not (folder / name).is_file():
            raise InputError(f"--workdir: {folder / name} is not a file; allowed: a work folder of its own")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts to {"a.b": value}."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def check_same_run(folder: Path, config: Mapping[str, Any], resumes: bool) -> None:
    """Refuse, by `InputError`, what would harm the folder.

    That is resuming its run with a configuration that would learn something else, and writing over a config.json that
    no run wrote (a model's, say).
    """
    path = folder / "config.json"
    if not path.exists():
        if resumes:
            raise InputError(f"--workdir: {folder} has checkpoints but no config.json; allowed: the one they came with")
        return
    try:
        written = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise InputError(f"--workdir: {path} is not JSON ({error}); allowed: what a run wrote there") from error
    before = flat(written) if isinstance(written, dict) else {}
    if not {"recipe", "updates"} <= before.keys():
        raise InputError(f"--workdir: {path} is not a run's; allowed: a new folder, or that of a run")
    now = flat(json.loads(json.dumps(config)))
    for key in sorted(before.keys() | now.keys()) if resumes else ():
        if not {key, key.split(".")[0]} & MAY_CHANGE and before.get(key) != now.get(key):
            raise InputError(
                f"{key}: {now.get(key)!r}, but the run in {folder} was started with {before.get(key)!r}; "
                "allowed: the same value, or another --workdir"
            )


def record_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the resolved configuration to config.json."""
    replace_file(folder / "config.json", json.dumps(config, indent=2) + "\n")


def model_of(folder: Path, key: str) -> tuple[str, str]:
    """What the run in `folder` trains: model.path and model.dtype. Raises `InputError`, which names `key`."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["model"]
        if found["dtype"] not in ("float32", "bfloat16"):
            raise ValueError(f"model.dtype is {found['dtype']!r}")
        return str(found["path"]), found["dtype"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{key}: {path} is not a run's ({error}); allowed: the work folder of a run") from error

"""What `data.path` names, read from its description alone: no records, no TFDS."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_sat.data import arithmetic
from jaxrl_sat.paths import user_path
from jaxrl_sat.types import InputError


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A prepared set: its own name, as metrics have it, problems by split, and where it lies (None: made on demand)."""

    name: str
    problems: dict[str, int]
    folder: Path | None


def read_data_sets(paths: list[str], key: str) -> list[DataSet]:
    """The sets that `key` lists. Raises `InputError` for one that cannot be read, and for two of one name."""
    sets = [read_data_set(path, key) for path in paths]
    check_names([one.name for one in sets], key)
    return sets


def check_names(names: Sequence[str], key: str) -> None:
    """Raise `InputError` for two sets of one name, as `key` lists them."""
    for one, other in itertools.combinations(names, 2):
        if one == other:
            raise InputError(f"{key}: two sets are called {one!r}; allowed: sets of different names")


def read_data_set(path: str, key: str = "data.path") -> DataSet:
    """The set that `key` names by `path`, from its dataset_info.json. Raises `InputError`."""
    if path == arithmetic.NAME:
        return DataSet(path, dict(arithmetic.SIZES), None)
    info_file = data_set_info(path, key)
    try:
        info: dict[str, Any] = json.loads(info_file.read_text(encoding="utf-8"))
        problems = {split["name"]: sum(map(int, split["shardLengths"])) for split in info["splits"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{key}: {info_file} cannot be read ({type(error).__name__}); allowed: one that TFDS wrote"
        ) from error
    return DataSet(str(info.get("name") or Path(path).resolve().name), problems, info_file.parent)


def data_set_info(path: str, key: str) -> Path:
    """The one dataset_info.json in a prepared set's folder, or up to two folders down. Raises `InputError`."""
    folder = user_path(key, path)
    direct = folder / "dataset_info.json"
    below = [info for depth in ("*", "*/*") for info in folder.glob(f"{depth}/dataset_info.json")]
    found = [direct] if direct.is_file() else sorted(below)
    if len(found) != 1:
        what = "holds no data set" if not found else f"holds {len(found)} data sets"
        allowed = f"{arithmetic.NAME}, or the folder of one TFDS set, as prepare_data makes it of files"
        raise InputError(f"{key}: {path!r} {what}; allowed: {allowed}")
    return found[0]

"""The out folder of an evaluation: what was asked, a line a finished problem, and the summary.

settings.json   what the answers hang on; another evaluation is refused
NAME.jsonl      a line a problem of the set NAME, in the set's order once all are there
summary.json    the figures, with the settings and versions
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxrl_sat.evaluation import estimates
from jaxrl_sat.metrics import replace_file
from jaxrl_sat.paths import locked
from jaxrl_sat.types import InputError

SETTINGS, SUMMARY = "settings.json", "summary.json"
NOT_OURS = "a new folder, or that of an evaluation"


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one problem. `right`: of each response; `responses`: their texts, where they are kept."""

    id: str
    problem: str
    answer: str
    right: list[bool]
    tokens_mean: float
    truncated: int
    unjudged: int  # responses that the verifier ran out of time or memory on; counted as wrong
    responses: list[str] | None = None


@contextlib.contextmanager
def claimed(folder: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder for this process and this evaluation. Raises `InputError` where it is another's, or no folder."""
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / SETTINGS).is_file():
            raise InputError(f"--out: {folder} holds something else; allowed: {NOT_OURS}")
        folder.mkdir(parents=True, exist_ok=True)
        lock = locked(folder / ".lock", f"--out: {folder} is in use by another evaluation; allowed: another folder")
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"--out: {folder} cannot be written ({error}); allowed: a folder") from error
    with lock:
        _check_same(folder, settings)
        replace_file(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
        yield


def _check_same(folder: Path, settings: Mapping[str, Any]) -> None:
    if not (folder / SETTINGS).exists():
        return
    before, now = read_json(folder / SETTINGS, "--out"), json.loads(json.dumps(settings))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise InputError(
                f"--{name.replace('_', '-')}: {now.get(name)!r}, but the evaluation in {folder} has "
                f"{before.get(name)!r}; allowed: the same, or another --out"
            )


def read_json(path: Path, flag: str) -> dict[str, Any]:
    """The object in a file of an evaluation. Raises `InputError` that names `flag`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{flag}: {path} cannot be read ({error}); allowed: {NOT_OURS}") from error
    if not isinstance(found, dict):
        raise InputError(f"{flag}: {path} holds no JSON object; allowed: {NOT_OURS}")
    return found


def table(folder: Path, name: str) -> Path:
    """The file with the problems of a set."""
    return folder / f"{name}.jsonl"


def resumed(path: Path) -> dict[str, Result]:
    """What `finished` finds; a torn line goes, so that the next one does not end in it."""
    found = finished(path)
    if path.exists():
        write(path, list(found.values()))
    return found


def finished(path: Path) -> dict[str, Result]:
    """The problems in a table, by id; a torn line (of a process that was killed) is none."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            result = Result(**json.loads(line))
            found[result.id] = result
    return found


def write(path: Path, results: Sequence[Result]) -> None:
    """Write a table anew, whole or not at all."""
    replace_file(path, "".join(_line(one) for one in results))


def add(path: Path, result: Result) -> None:
    """Add a problem to its table."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(result))


def _line(result: Result) -> str:
    fields = {name: value for name, value in dataclasses.asdict(result).items() if value is not None}
    return json.dumps(fields) + "\n"


def right(results: Sequence[Result]) -> Bool[np.ndarray, "P n"]:
    """Which response to which problem is right."""
    return np.asarray([one.right for one in results], bool)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of one set: avg@n and pass@k as {value, low, high}, lengths in tokens, shares of responses."""
    found = right(results)
    problems, samples = found.shape
    estimated = {f"avg_at_{samples}": estimates.avg_at_k(found)}
    estimated |= {f"pass_at_{k}": estimates.pass_at_k(found, k) for k in estimates.ks(samples)}
    return {
        "problems": problems,
        "samples": samples,
        **{name: dataclasses.asdict(one) for name, one in estimated.items()},
        "tokens_mean": float(np.mean([one.tokens_mean for one in results])),
        "truncated": sum(one.truncated for one in results) / found.size,
        "unjudged": sum(one.unjudged for one in results) / found.size,
    }


def versions() -> dict[str, str]:
    """Of what computed the answers."""
    packages = ("jaxrl-sat", "jax", "jaxlib", "flax", "numpy", "tokenizers", "sympy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}

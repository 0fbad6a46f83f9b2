"""Two evaluations of the same problems, compared problem by problem."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_sat.evaluation import estimates, folder
from jaxrl_sat.evaluation.folder import Result
from jaxrl_sat.evaluation.options import Pair
from jaxrl_sat.metrics import replace_file
from jaxrl_sat.types import InputError

FLAG = "--compare"
EXPECTED = ("model", "data", "seed", "responses")
"""Settings in which two evaluations may differ without a word: what is compared, and what changes no figure."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of one set: figures by name (avg, pass@k) as (first, second, difference), and problems by id.

    `problems` are those where the shares of right responses differ, with both shares. `wins` are the second's.
    """

    name: str
    size: int
    figures: dict[str, tuple[float, float, estimates.Difference]]
    problems: dict[str, tuple[float, float]]

    @property
    def wins(self) -> int:
        """Problems on which the second is right more often."""
        return sum(other > one for one, other in self.problems.values())

    @property
    def losses(self) -> int:
        """Problems on which the second is right less often."""
        return len(self.problems) - self.wins

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts."""
        rows = {
            name: {"first": one, "second": other} | dataclasses.asdict(gap)
            for name, (one, other, gap) in self.figures.items()
        }
        return {"problems": self.size, "wins": self.wins, "losses": self.losses, **rows, "differ": self.problems}


def compare(one: Path, other: Path) -> list[Comparison]:
    """Each set of two out folders. Raises `InputError` where they are not both finished or have other problems."""
    first, second = _sets(one), _sets(other)
    for name in sorted(first.keys() | second.keys()):
        lacking = [str(path) for path, sets in ((one, first), (other, second)) if name not in sets]
        if lacking:
            raise InputError(f"{FLAG}: {lacking[0]} has no set {name!r}; allowed: two evaluations of the same sets")
        if first[name] != second[name]:
            raise InputError(f"{FLAG}: {name} has other problems in {other} than in {one}; allowed: the same problems")
    return [_compared(name, _table(one, name), _table(other, name)) for name in first]


def unlike(one: Path, other: Path) -> dict[str, tuple[Any, Any]]:
    """Settings that two evaluations do not share, which may make the difference that is found. Raises `InputError`."""
    first, second = (folder.read_json(path / folder.SETTINGS, FLAG) for path in (one, other))
    names = sorted((first.keys() | second.keys()) - set(EXPECTED))
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def _sets(path: Path) -> dict[str, Any]:
    """The sets of a finished evaluation, with what their problems are known by."""
    if not (path / folder.SETTINGS).is_file():
        raise InputError(f"{FLAG}: {path} is not the folder of an evaluation; allowed: an --out of this command")
    if not (path / folder.SUMMARY).is_file():
        raise InputError(f"{FLAG}: {path} is not finished; allowed: to run its command to the end")
    sets = folder.read_json(path / folder.SETTINGS, FLAG).get("data")
    if not isinstance(sets, dict):
        raise InputError(f"{FLAG}: {path / folder.SETTINGS} names no sets; allowed: what this command wrote")
    return sets


def _table(path: Path, name: str) -> dict[str, Result]:
    found = folder.finished(folder.table(path, name))
    if not found:
        raise InputError(f"{FLAG}: {folder.table(path, name)} has no problems; allowed: what this command wrote")
    return found


def _compared(name: str, one: dict[str, Result], other: dict[str, Result]) -> Comparison:
    if one.keys() != other.keys():
        odd = sorted(one.keys() ^ other.keys())[0]
        raise InputError(f"{FLAG}: problem {odd} of {name} is in one of the tables alone; allowed: whole tables")
    first, second = folder.right(list(one.values())), folder.right([other[key] for key in one])
    shares = first.mean(axis=1), second.mean(axis=1)
    fewest = min(first.shape[1], second.shape[1])
    both = {"avg": (*shares, 1 / fewest)}
    for k in sorted(set(estimates.ks(first.shape[1])) & set(estimates.ks(second.shape[1])) - {1}):
        both[f"pass@{k}"] = (estimates.solved_by(first, k), estimates.solved_by(second, k), k / fewest)
    differ = {key: (float(a), float(b)) for key, a, b in zip(one, *shares, strict=True) if a != b}
    rows = {
        label: (float(np.mean(a)), float(np.mean(b)), estimates.difference(a, b, step))
        for label, (a, b, step) in both.items()
    }
    return Comparison(name, len(one), rows, differ)


def run(pair: Pair) -> None:
    """Compare, print the table, and write comparison.json where a folder was given. Raises `InputError`."""
    found, differing = compare(pair.one, pair.other), unlike(pair.one, pair.other)
    for line in _lines(found):
        print(line)
    for name, (one, other) in differing.items():
        print(f"--{name.replace('_', '-')} is {one!r} in the first and {other!r} in the second")
    if pair.out is not None:
        try:
            pair.out.mkdir(parents=True, exist_ok=True)
            content = {"first": str(pair.one), "second": str(pair.other), "settings": differing}
            content |= {"sets": {one.name: one.to_dict() for one in found}}
            replace_file(pair.out / "comparison.json", json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"--out: {pair.out} cannot be written ({error}); allowed: a folder") from error


def _lines(found: Sequence[Comparison]) -> Iterator[str]:
    yield f"{'set':<20} {'measure':<8} {'first':>7} {'second':>7} {'change':>8}  {'95% interval':<20} {'p':>7}"
    for one in found:
        for measure, (first, second, gap) in one.figures.items():
            interval = f"{gap.low:+.4f} to {gap.high:+.4f}"
            start = f"{one.name:<20} {measure:<8} {first:>7.4f} {second:>7.4f} {gap.change:>+8.4f}"
            yield f"{start}  {interval:<20} {gap.p:>7.4f}"
        even = one.size - len(one.problems)
        yield f"{one.name:<20} the second is better on {one.wins} problems, worse on {one.losses}, even on {even}"

"""Which reward functions a run has: the text of the key `rewards.functions`, read and checked."""

from __future__ import annotations

import dataclasses
import re

from jaxrl_sat.types import InputError

BUILT_IN = ("math", "format")
"""Reward functions of this package, by name."""
KEY = "rewards.functions"
_RESERVED = ("mean", "overlong", *BUILT_IN)
"""What no user's function may be called: its metrics would have the names of others."""
_TARGET = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.*\.py):([A-Za-z_]\w*)", re.ASCII | re.DOTALL)
_ALLOWED = (
    "NAME=WEIGHT with commas between, each NAME math, format, package.module:function or file.py:function "
    "(=WEIGHT may be left out: 1)"
)


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """One reward function of a run. `target`: where a user's is found; empty for one of this package."""

    name: str
    weight: float
    target: str = ""


def parse(text: str) -> tuple[RewardFunction, ...]:
    """The reward functions that `text` names, in order: "math=1,format=0.1,my_package.rewards:brief=0.5".

    Raises `InputError` for text that names none, for a weight that is no number, and for two of one name.
    """
    functions = tuple(_one(part.strip()) for part in text.split(",") if part.strip())
    if not functions:
        raise InputError(f"{KEY}: {text!r} names no reward; allowed: {_ALLOWED}")
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{KEY}: two are called {name!r}; allowed: names of their own, which the metrics have")
    if not any(function.weight for function in functions):
        raise InputError(f"{KEY}: {text!r} has no weight but 0; allowed: at least one other, or nothing is learnt")
    return functions


def _weight(text: str) -> float:
    if not re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", text, re.ASCII) or abs(float(text)) > 1e6:
        raise InputError(f"{KEY}: {text!r} is no weight; allowed: a number from -1e6 to 1e6")
    return float(text)


def _one(text: str) -> RewardFunction:
    target, equals, said = text.partition("=")
    target = target.strip()
    weight = _weight(said.strip()) if equals else 1.0
    if target in BUILT_IN:
        return RewardFunction(target, weight)
    named = _TARGET.fullmatch(target)
    if named is None:
        raise InputError(f"{KEY}: {target!r}; allowed: {_ALLOWED}")
    if named.group(1) in _RESERVED:
        raise InputError(
            f"{KEY}: {target!r} has a name that other metrics have; allowed: any but {', '.join(_RESERVED)}"
        )
    return RewardFunction(named.group(1), weight, target)

"""Frozen dataclasses whose annotations are the rules of a config: checked, parsed from text, and put into words.

An annotation is a type, `Annotated[type, Range(...)]` or a `Literal`; None beside it (with a default of None) is a key
that may be absent.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from jaxrl_sat.types import InputError


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` (itself left out if `above`) to `high` (itself left out if `below`)."""

    low: int | float = -math.inf
    high: int | float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: int | float) -> bool:
        """Whether `value` lies inside."""
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"above {self.low}" if self.above else f"{self.low} or more"
        if self.high == math.inf:
            return low
        return f"{low}, {'below' if self.below else 'at most'} {self.high}"


def flat_keys(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a dataclass of dataclasses, as ("model.path", its annotation) and so on."""
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from flat_keys(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def parse_text(cls: Any, key: str, text: str) -> Any:
    """The value that `text`, given for `key` on the command line, stands for. Raises `InputError`."""
    keys = dict(flat_keys(cls))
    if key not in keys:
        raise unknown(key, keys)
    kind = plain(keys[key])[0]
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is float and ("_" in text or not text.isascii()):
            raise ValueError
        if kind is int and not re.fullmatch(r"[-+]?\d+", text, re.ASCII):
            raise ValueError
        return kind(text)
    except (ValueError, KeyError) as error:
        raise InputError(f"{key}: {text!r}; allowed: {describe(keys[key])}") from error


def describe(hint: Any) -> str:
    """What an annotation allows, in words."""
    kind, limit = plain(hint)
    if isinstance(limit, tuple):
        return ", ".join(limit)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    return f"{words}, {limit}" if limit else words


def plain(hint: Any) -> tuple[type, Range | tuple[str, ...] | None]:
    """The type behind an annotation and what limits it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        kind, limit = typing.get_args(hint)
        return kind, limit
    return hint, None


def unknown(key: str, allowed: Iterable[str]) -> InputError:
    """The error for a key that does not exist, with the closest one that does."""
    allowed = list(allowed)
    group = [other for other in allowed if other.startswith(f"{key}.")]
    if group:
        return InputError(f"{key}: a group of keys; allowed: {', '.join(group)}")
    close = difflib.get_close_matches(key, allowed, n=1)
    inside = [other for other in allowed if other.rpartition(".")[0] == key.rpartition(".")[0]]
    return InputError(
        f"{key}: no such key; {f'did you mean {close[0]}? ' if close else ''}allowed: {', '.join(inside or allowed)}"
    )


def build(cls: Any, tree: Any, prefix: str = "") -> Any:
    """An instance of `cls` from nested mappings. Raises `InputError` for the first key or value that does not fit."""
    if not isinstance(tree, Mapping):
        raise InputError(f"{prefix[:-1]}: {tree!r}; allowed: a group of keys")
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in tree:
        if key not in hints:
            raise unknown(prefix + str(key), [prefix + name for name in hints])
    values = {}
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        if field.name not in tree:
            if field.default is dataclasses.MISSING:
                group = dataclasses.is_dataclass(hint)
                raise InputError(f"{name}: missing; allowed: {'a group of keys' if group else describe(hint)}")
        elif dataclasses.is_dataclass(hint):
            values[field.name] = build(hint, tree[field.name], f"{name}.")
        elif tree[field.name] is not None or field.default is not None:
            values[field.name] = _checked(name, hint, tree[field.name])
    return cls(**values)


def _checked(key: str, hint: Any, value: Any) -> Any:
    kind, limit = plain(hint)
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**128:
        value = float(value)
    # What float32 cannot hold would be 0 or infinite where it is used.
    fits = type(value) is kind and (kind is not float or value == 0 or 1e-37 < abs(value) < 3e38)
    if fits and isinstance(limit, Range):
        fits = limit.holds(value)
    if fits and isinstance(limit, tuple):
        fits = value in limit
    if not fits:
        held = ", of a size that float32 holds" if kind is float else ""
        raise InputError(f"{key}: {value!r}; allowed: {describe(hint)}{held}")
    return value

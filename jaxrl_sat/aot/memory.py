"""What the compiler says of a program that does not fit: how much it needs, and the buffers alive at its peak.

The error itself states two numbers. The buffers come from the files that the compiler writes, when asked to, before it
gives up: the assignment of buffers to memory, their life times, and the program.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(\d+(?:\.\d+)?)([KMGTB]?)"

# "... the total memory required for HLO temporaries (132.00G) exceeds available HBM (95.74G)." of present compilers,
# "Used 19.46G of 15.48G hbm." of others.
_EXHAUSTED = (
    re.compile(rf"required for [\w ]+ \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer of a device at the program's peak. `of`: what made it, as JAX names it; "" if the compiler did."""

    bytes: int
    shape: str
    of: str


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes a device. `largest`: the buffers alive at the peak, largest first."""

    argument_bytes: int
    temp_bytes: int
    largest: tuple[Buffer, ...]


def exhausted(message: str) -> bool:
    """Whether a compiler's error says that the program needs too much memory."""
    return "RESOURCE_EXHAUSTED" in message


def required_bytes(message: str) -> int | None:
    """What the program needs, from the compiler's error; None if it does not say."""
    return _stated(message, 0)


def limit_bytes(message: str) -> int | None:
    """What a program may use, from the compiler's error; None if it does not say."""
    return _stated(message, 1)


def _stated(message: str, which: int) -> int | None:
    for pattern in _EXHAUSTED:
        found = pattern.search(message)
        if found:
            number, unit = found.groups()[2 * which : 2 * which + 2]
            return round(float(number) * UNITS[unit])
    return None


# ------------------------------------------------------------------------------------ the compiler's own files

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+)(?: \(\w+\))? @\d+> \(size=(\d+),offset=\d+\): (.*)$")
_SHAPE = re.compile(r"\w+\[[\d,]*\]")
_LIVE = re.compile(r"    (\S+): (\d+) bytes \(cumulative")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(\S+) = .*op_name=\"([^\"]*)\"")


def usage(folder: Path) -> Usage | None:
    """Of the largest program whose files lie in `folder`; None if the compiler gave up before it wrote them."""
    assignments = sorted(
        folder.glob("*after_optimizations-buffer-assignment.txt"), key=lambda path: path.stat().st_size
    )
    if not assignments:
        return None
    stem = assignments[-1].name.removesuffix("-buffer-assignment.txt")
    totals, values = _assignment(assignments[-1])
    names = _op_names(folder / f"{stem}.txt")
    largest = []
    for name, size in _alive_at_peak(folder / f"{stem}-live-range.txt"):
        whole, _, index = name.partition("{")
        padded, shapes = values.get(name, (size, values.get(whole, (0, ()))[1][_first(index) :]))
        largest.append(Buffer(max(size, padded), "".join(shapes[:1]), names.get(whole, "")))
    largest.sort(key=lambda buffer: -buffer.bytes)
    return Usage(totals["argument"], totals["temp"], tuple(largest))


def _first(index: str) -> int:
    """The first number of "4}" or "4,1}": an element of a tuple. 0 where there is none."""
    digits = re.match(r"\d+", index)
    return int(digits[0]) if digits else 0


def _assignment(path: Path) -> tuple[dict[str, int], dict[str, tuple[int, list[str]]]]:
    """Bytes of arguments and temporaries in the device's memory; size of each value and its shape, or its elements'."""
    totals, values = {"argument": 0, "temp": 0}, {}
    for line in _lines(path):
        if found := _VALUE.match(line):
            values[found[1].removesuffix("{}")] = (int(found[2]), _SHAPE.findall(found[3]))
        elif found := _ALLOCATION.match(line):
            size, rest = int(found[1]), found[2]
            if "color" not in rest:  # other memories than the device's main one
                totals["argument"] += size * (", parameter " in rest)
                totals["temp"] += size * ("preallocated-temp" in rest)
    return totals, values


def _alive_at_peak(path: Path) -> list[tuple[str, int]]:
    alive, at_peak = [], False
    for line in _lines(path):
        at_peak = (at_peak or "(peak)" in line) and "Stack trace" not in line
        found = _LIVE.match(line) if at_peak else None
        if found:
            alive.append((found[1].removesuffix("{}"), int(found[2])))
    return alive


def _op_names(path: Path) -> dict[str, str]:
    return {found[1]: found[2] for line in _lines(path) if (found := _INSTRUCTION.match(line))}


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n") for line in file)


def table(buffers: tuple[Buffer, ...], rows: int) -> list[dict[str, Any]]:
    """The largest buffers, alike ones counted together: `bytes` of all, `count`, `shape`, `of`."""
    together: collections.Counter[tuple[str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for buffer in buffers:
        key = (buffer.shape, buffer.of)
        together[key] += buffer.bytes
        counts[key] += 1
    return [
        {"bytes": size, "count": counts[key], "shape": key[0], "of": key[1]} for key, size in together.most_common(rows)
    ]

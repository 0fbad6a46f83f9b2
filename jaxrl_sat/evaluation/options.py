"""The flags of `python -m jaxrl_sat.evaluate`, checked. No JAX yet."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxrl_sat import cli
from jaxrl_sat.paths import user_path
from jaxrl_sat.types import InputError

FLAGS = (
    "--model=FOLDER, --data=SET[,SET], --out=FOLDER, --samples=K, --temperature=T, --top-p=P, --max-tokens=N, "
    "--stop=TEXT, --seed=N, --template=chat|none, --split=NAME, --problems=N, --responses, --slots=N, "
    "--dtype=float32|bfloat16, --mesh=AXIS=N,..., --compare A B, --help"
)
AXES: tuple[str, ...] = ("data", "expert", "tensor")
MOST = 10**6
N = TypeVar("N", int, float)


@dataclasses.dataclass(frozen=True)
class Options:
    """What the flags say. None is a default that hangs on the devices or the data."""

    model: str
    data: tuple[str, ...]
    out: Path | None
    samples: int
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...]
    seed: int
    template: Literal["chat", "none"]
    split: str
    problems: int | None
    responses: bool
    slots: int
    dtype: Literal["float32", "bfloat16"] | None
    mesh: dict[str, int] | None


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two out folders to compare, and where to write what was found."""

    one: Path
    other: Path
    out: Path | None


def parse(argv: Sequence[str], description: str) -> Options | Pair:
    """The flags in `argv`. Raises `InputError`; --help prints and exits 0."""
    parser = cli.FlagParser(
        FLAGS,
        prog="python -m jaxrl_sat.evaluate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="a Hugging Face folder or address, embedded, or the work folder of a run (newest checkpoint)")
    add("--data", help="prepared sets, arithmetic, or files of problems, with commas between")
    add("--out", help="folder of tables and summary; the same command goes on where it was stopped")
    add("--samples", default="8", help="responses a problem (8)")
    add("--temperature", default="1", help="of the sampling (1); 0: greedy, with --samples=1")
    add("--top-p", default="1", help="probability of the words drawn from (1)")
    add("--max-tokens", default="1024", help="longest response (1024)")
    add("--stop", action="append", default=[], help="text that ends a response and is left out; may be repeated")
    add("--seed", default="0", help="of the sampling (0)")
    add("--template", default="chat", help="chat (the model's own) or none: problems are read as they stand")
    add("--split", default="test", help="of prepared sets (test)")
    add("--problems", help="the first so many of each set (all)")
    add("--responses", action="store_true", help="keep the texts in the tables")
    add("--slots", default="64", help="responses decoded at once (64)")
    add("--dtype", help="float32 or bfloat16 (on a CPU float32)")
    add("--mesh", help="devices along data, expert and tensor, as data=2,tensor=4 (data: all of an accelerator's)")
    add("--compare", nargs=2, metavar=("A", "B"), help="two out folders: B against A")
    given = parser.parse_args(argv)
    out = _path("--out", given.out)
    if given.compare:
        one, other = (user_path("--compare", text) for text in given.compare)
        others = {name for name, value in vars(given).items() if value != parser.get_default(name)}
        if extra := sorted(others - {"compare", "out"}):
            raise InputError(f"--{extra[0].replace('_', '-')}: given with --compare; allowed: --out beside it")
        return Pair(one, other, out)
    return _options(given, out)


def _options(given: argparse.Namespace, out: Path | None) -> Options:
    for name, what in (("model", "a Hugging Face folder or a run's"), ("data", "prepared sets or files")):
        if not getattr(given, name):
            raise InputError(f"--{name}: missing; allowed: {what}")
    data = tuple(path.strip() for path in given.data.split(","))
    if not all(data):
        raise InputError(f"--data: {given.data!r} has an empty name; allowed: sets with commas between")
    if not all(given.stop):
        raise InputError("--stop: an empty text; allowed: one character or more")
    options = Options(
        model=given.model,
        data=data,
        out=out,
        samples=_number("samples", given.samples, int, 1, MOST),
        temperature=_number("temperature", given.temperature, float, 0, 100),
        top_p=_number("top-p", given.top_p, float, 1e-6, 1),
        max_tokens=_number("max-tokens", given.max_tokens, int, 1, MOST),
        stop=tuple(given.stop),
        seed=_number("seed", given.seed, int, 0, 2**32 - 1),
        template=_one_of("template", given.template, "chat", "none"),
        split=given.split,
        problems=None if given.problems is None else _number("problems", given.problems, int, 1, 10**9),
        responses=given.responses,
        slots=_number("slots", given.slots, int, 1, MOST),
        dtype=None if given.dtype is None else _one_of("dtype", given.dtype, "float32", "bfloat16"),
        mesh=None if given.mesh is None else _mesh(given.mesh),
    )
    if options.temperature == 0 and options.samples > 1:
        raise InputError(f"--samples: {options.samples} at --temperature=0, which would be alike; allowed: 1")
    return options


def _path(flag: str, text: str | None) -> Path | None:
    if text is not None and not text.strip():
        raise InputError(f"{flag}: {text!r}; allowed: a folder")
    return None if text is None else user_path(flag, text)


def _number(name: str, text: str, kind: Callable[[str], N], low: int | float, high: int | float) -> N:
    try:
        value = kind(text)
        if not (math.isfinite(value) and low <= value <= high) or "_" in text:
            raise ValueError
    except (ValueError, OverflowError) as error:
        what = "a whole number" if kind is int else "a number"
        raise InputError(f"--{name}: {text[:40]!r}; allowed: {what} from {low} to {high}") from error
    return value


def _one_of(name: str, text: str, *allowed: Any) -> Any:
    if text not in allowed:
        raise InputError(f"--{name}: {text!r}; allowed: {', '.join(allowed)}")
    return text


def _mesh(text: str) -> dict[str, int]:
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES:
            raise InputError(f"--mesh: axis {axis!r}; allowed: {', '.join(f'{name}=N' for name in AXES)}")
        sizes[axis] = _number(f"mesh {axis}", size, int, 1, MOST)
    return sizes

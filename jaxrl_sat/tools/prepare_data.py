"""Files of mathematics problems to a prepared data set, for data.path and eval.path.

    python -m jaxrl_sat.tools.prepare_data --out=FOLDER SOURCE [SOURCE ...]

A source is a file of JSON lines, a JSON array, Parquet or array_record, or the folder of a prepared set, with what else
is to be said of it behind commas: FILE[,name=NAME][,split=train|test][,weight=SHARE][,schema=SCHEMA]

    python -m jaxrl_sat.tools.prepare_data --out=math_rl --tokenizer=Qwen3-4B --max-tokens=2048 \\
        dapo-math-17k.parquet,name=dapo,weight=2 dolci.parquet,name=dolci,weight=1 aime24.jsonl,split=test

Problems that stand twice are kept once, and those of test sources never in training. docs/data.md has the schemas and
the rules; FOLDER/report.json what was read, kept and dropped. Exit status 2 with one line for what cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_sat import cli, sources
from jaxrl_sat.data import account
from jaxrl_sat.data.prepare import Options, Source, prepare
from jaxrl_sat.data.schemas import SCHEMAS
from jaxrl_sat.data.tokenizer import Template, Tokenizer
from jaxrl_sat.paths import locked, user_path
from jaxrl_sat.types import InputError

FLAGS = (
    "--out=FOLDER, --name=NAME, --on-bad-row=skip|refuse, --on-bad-file=skip|refuse, --keep-unreadable, "
    "--keep-conflicts, --instruction=TEXT, --tokenizer=MODEL, --template=chat|none, --max-tokens=N, SOURCE ..."
)
NAME = re.compile(r"[a-z][a-z0-9_]*")
KEYS = ("name", "split", "weight", "schema")


def run(arguments: Sequence[str]) -> None:
    """The command. Raises `InputError`; --help prints and exits 0."""
    given = _parser().parse_args(arguments)
    read = [read_source(text) for text in given.sources]
    _check_together(read)
    out = user_path("--out", given.out)
    name = given.name or re.sub(r"[^a-z0-9_]", "_", out.name.lower())
    if not NAME.fullmatch(name):
        raise InputError(f"--name: {name!r}; allowed: small letters, digits and _, a letter first")
    if given.max_tokens < 0 or (given.max_tokens and not given.tokenizer):
        raise InputError(f"--max-tokens: {given.max_tokens}; allowed: 1 or more, with --tokenizer=MODEL, which counts")
    options = Options(
        on_bad_row=given.on_bad_row,
        on_bad_file=given.on_bad_file,
        keep_unreadable=given.keep_unreadable,
        keep_conflicts=given.keep_conflicts,
        instruction=given.instruction,
        count_tokens=_counter(given.tokenizer, given.template) if given.tokenizer else None,
        max_tokens=given.max_tokens,
        progress=lambda words: print(words, file=sys.stderr, flush=True),
    )
    try:
        with building(out) as folder:
            built, report = prepare(name, read, options, folder)
            os.rename(built, out)
    except OSError as error:
        raise InputError(f"--out: {out} cannot be written ({error.strerror}); allowed: a folder that can") from error
    print("\n".join(account.table(report)))
    print(f"written to {out}: --config.data.path={out}")


def _parser() -> argparse.ArgumentParser:
    usage, _, text = (__doc__ or "").partition("\n\n")
    parser = cli.FlagParser(
        FLAGS,
        prog="python -m jaxrl_sat.tools.prepare_data",
        description=usage,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="FILE[,KEY=VALUE...]")
    parser.add_argument("--out", required=True, help="folder of the set; must not exist")
    parser.add_argument("--name", default="", help="what metrics call it; default: the folder's name")
    choices: dict[str, Any] = {"choices": ("skip", "refuse")}
    parser.add_argument("--on-bad-row", default="skip", **choices, help="rows without a usable problem (skip)")
    parser.add_argument("--on-bad-file", default="refuse", **choices, help="files that cannot be read (refuse)")
    parser.add_argument("--keep-unreadable", action="store_true", help="keep answers that match as text alone")
    parser.add_argument("--keep-conflicts", action="store_true", help="keep problems of which copies differ in answer")
    parser.add_argument("--instruction", default="", metavar="TEXT", help="put behind every prompt")
    parser.add_argument(
        "--tokenizer", default="", metavar="MODEL", help="embedded or a checkpoint folder: counts tokens"
    )
    parser.add_argument("--template", default="chat", choices=("chat", "none"), help="as data.template (chat)")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="longest prompt kept, in tokens (any)")
    return parser


def read_source(text: str) -> Source:
    """FILE[,KEY=VALUE...] in words. Raises `InputError`."""
    pieces, given = text.split(","), {}
    while len(pieces) > 1 and re.match(r"[a-z]+=", pieces[-1]):
        key, _, value = pieces.pop().partition("=")
        if key not in KEYS or key in given:
            raise InputError(
                f"{text}: {key}={value}; allowed: each of {', '.join(KEYS)} once, as in FILE,{KEYS[0]}=..."
            )
        given[key] = value
    file = user_path("SOURCE", ",".join(pieces))
    name = given.get("name", re.sub(r"[^a-z0-9_]", "_", file.stem.lower()))
    split, schema, weight = given.get("split", "train"), given.get("schema"), given.get("weight")
    if not NAME.fullmatch(name) or not NAME.fullmatch(split) or split == "all":
        allowed = "small letters, digits and _, a letter first (not all, which TFDS keeps for itself)"
        raise InputError(f"{text}: name {name!r}, split {split!r}; allowed: {allowed}")
    if schema is not None and schema not in SCHEMAS:
        raise InputError(f"{text}: schema {schema!r}; allowed: {', '.join(SCHEMAS)}")
    return Source(file, name, schema, None if weight is None else _share(text, weight), split)


def _share(text: str, weight: str) -> float:
    with contextlib.suppress(ValueError):
        if weight.isascii() and "_" not in weight and 1e-6 <= (share := float(weight)) <= 1e6:
            return share
    raise InputError(f"{text}: weight {weight!r}; allowed: a number from 1e-6 to 1e6")


def _check_together(read: Sequence[Source]) -> None:
    """Refuse sources of one name that differ, weights in another split than train, and weights of only some."""
    by_name: dict[str, Source] = {}
    for source in read:
        first = by_name.setdefault(source.name, source)
        if (first.split, first.weight) != (source.split, source.weight):
            both = f"{first.file} and {source.file} are both called {source.name!r}"
            raise InputError(f"{both}; allowed: names of their own, or one split and weight (FILE,name=NAME)")
        if source.weight is not None and source.split != "train":
            raise InputError(f"{source.file}: weight in split {source.split!r}; allowed: weights in split 'train'")
    weighted = [source.weight is not None for source in read if source.split == "train"]
    if any(weighted) and not all(weighted):
        lacking = next(source for source in read if source.split == "train" and source.weight is None)
        raise InputError(f"{lacking.file}: no weight, while others have one; allowed: weights for all or for none")


def _counter(model: str, template: Template) -> Callable[[str], int]:
    """How many tokens a prompt has for a model."""
    try:
        tokenizer = Tokenizer.load(sources.model_folder(model))
    except InputError as error:
        raise InputError(f"--tokenizer: {error}") from error
    return lambda problem: len(tokenizer.encode(tokenizer.asked(problem, template)))


@contextlib.contextmanager
def building(out: Path) -> Iterator[Path]:
    """An empty folder beside `out` to build it in, gone afterwards; what a run that was killed left in it goes first.

    Raises `InputError` where `out` exists or another process is building it.
    """
    if out.exists():
        raise InputError(f"--out: {out} exists; allowed: a folder that does not yet")
    folder = out.parent / f".{out.name}.building"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock", f"--out: {out} is being built by another process; allowed: one at a time"):
        try:
            for entry in folder.iterdir():
                if entry.name != "lock":
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return cli.exit_status(run, arguments)


if __name__ == "__main__":
    sys.exit(main())

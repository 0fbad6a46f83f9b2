"""The command line: flags, the config file they name, and the keys they override. Every mistake is an `InputError`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

from jaxrl_sat.config import PRESETS, RunConfig
from jaxrl_sat.schema import parse_text
from jaxrl_sat.types import InputError

FLAGS = "--config=FILE[:PRESET], --workdir=DIR, --dry-run, --config.KEY=VALUE, --help"


@dataclasses.dataclass(frozen=True)
class Source:
    """The config that the user asked for; `overrides` are (key, text) in the order given."""

    file: Path
    preset: str | None
    overrides: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Command(Source):
    """The run that the user asked for."""

    workdir: Path
    dry_run: bool


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are an `InputError` that says what is `allowed`; flags are not abbreviated."""

    def __init__(self, allowed: str, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)
        self.allowed = allowed

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; allowed: {self.allowed}")


class Parser(FlagParser):
    """A parser with --config."""

    def __init__(self, prog: str, description: str, allowed: str):
        epilog = "--config.KEY=VALUE (or --config.KEY VALUE) sets one key of the config, as in --config.pipeline.lag=8."
        super().__init__(allowed, prog=prog, description=description, epilog=epilog)
        presets = f"config file; presets: {', '.join(PRESETS)}"
        self.add_argument("--config", required=True, metavar="FILE[:PRESET]", help=presets)

    def parse_source(self, argv: Sequence[str]) -> tuple[argparse.Namespace, Source]:
        """The flags in `argv` and the config they name. Raises `InputError`; --help prints and exits 0."""
        flags, rest = self.parse_known_args(argv)
        path, colon, preset = flags.config.rpartition(":")
        if colon and preset not in PRESETS:
            raise InputError(f"--config: preset {preset!r}; allowed: {', '.join(PRESETS)}")
        overrides = tuple(_overrides(rest, self.allowed))
        return flags, Source(Path(path if colon else flags.config), preset if colon else None, overrides)


def parse(argv: Sequence[str]) -> Command:
    """The command in `argv` (without the program's name). Raises `InputError`; --help prints and exits 0."""
    parser = Parser(
        "python -m jaxrl_sat.main", "Train a language model by RL on rollouts whose staleness is measured.", FLAGS
    )
    parser.add_argument("--workdir", help="folder of the run, resumed if it holds one (runs/NAME OF CONFIG)")
    parser.add_argument("--dry-run", action="store_true", help="print the config, the meshes and the plan; run nothing")
    flags, source = parser.parse_source(argv)
    if flags.workdir is not None and (not flags.workdir or "\0" in flags.workdir):
        raise InputError(f"--workdir: {flags.workdir!r}; allowed: a folder")
    workdir = Path(flags.workdir or Path("runs") / source.file.stem)
    return Command(source.file, source.preset, source.overrides, workdir, flags.dry_run)


def _overrides(tokens: Sequence[str], allowed: str) -> Iterator[tuple[str, str]]:
    """(key, text) of --config.KEY=VALUE and --config.KEY VALUE."""
    waiting = iter(tokens)
    for token in waiting:
        if not token.startswith("--config."):
            raise InputError(f"{token}: no such flag; allowed: {allowed}")
        key, equals, text = token.removeprefix("--config.").partition("=")
        if not equals:
            text = next(waiting, None)
            if text is None or text.startswith("--"):
                raise InputError(f"--config.{key}: no value; allowed: --config.{key}=VALUE")
        if not key:
            raise InputError("--config.: no key; allowed: --config.KEY=VALUE")
        yield key, text


def load(source: Source, preset: str) -> ConfigDict:
    """The file's config for `preset` with the overrides set. Raises `InputError` for whatever is wrong with either."""
    get_config = _get_config(source.file)
    try:
        takes_preset = bool(inspect.signature(get_config).parameters)
    except (TypeError, ValueError):
        takes_preset = True
    if source.preset and not takes_preset:
        raise InputError(f"--config: preset {preset!r}, but {source.file} has none; allowed: {source.file}")
    with _blamed_on(source.file):
        config = get_config(preset) if takes_preset else get_config()
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise InputError(f"--config: get_config of {source.file} returned a {kind}; allowed: a ConfigDict")
    config = ConfigDict(config)  # thaws a frozen one  # pyright: ignore[reportArgumentType]
    for key, text in source.overrides:
        value = parse_text(RunConfig, key, text)
        holder: Any = config
        *groups, last = key.split(".")
        for group in groups:
            holder = holder[group] if isinstance(holder, ConfigDict) and group in holder else None
        if not isinstance(holder, ConfigDict):
            raise InputError(f"{key}: {source.file} has no such group; allowed: a group of the config")
        with holder.ignore_type(), holder.unlocked():
            holder[last] = value
    return config


def _get_config(file: Path) -> Callable[..., Any]:
    try:
        found = file.is_file()
    except (OSError, ValueError):
        found = False
    if not found:
        raise InputError(f"--config: {str(file)[:200]} is not a file; allowed: a config, as configs/sat_grpo.py")
    spec = importlib.util.spec_from_loader("jaxrl_sat_run_config", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    # A config may start from one that lies beside it.
    sys.path.insert(0, str(file.resolve().parent))
    try:
        with _blamed_on(file):
            exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    finally:
        sys.path.pop(0)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise InputError(f"--config: {file} defines no function get_config; allowed: a file that does")
    return get_config


@contextlib.contextmanager
def _blamed_on(file: Path) -> Iterator[None]:
    """Turn what the config file raises into one line that says where in the file."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else places[-1] if places else None
        what = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        place = f"{file}:{line}" if line else str(file)
        raise InputError(f"--config: {place}: {type(error).__name__}: {what}; allowed: a file that runs") from error


def exit_status(run: Callable[[Sequence[str]], object], argv: Sequence[str] | None) -> int:
    """Run a command with `argv`, by default the process's: 0; 130 for Ctrl-C; 2 for an `InputError`, in one line."""
    try:
        run(sys.argv[1:] if argv is None else argv)
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0

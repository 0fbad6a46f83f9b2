"""python -m jaxrl_sat.aot --config=FILE[:PRESET] --topology=KIND:AxBxC [--slices=N] [--config.KEY=VALUE ...]

Progress goes to stderr; the last line of stdout is one JSON object. Exit status 0, whether the programs fit or not; 2:
the input cannot be used, one line on stderr says what, the value, and what is allowed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_sat.cli import Source
    from jaxrl_sat.config import RunConfig

FLAGS = (
    "--config=FILE[:PRESET], --topology=KIND:AxBxC, --slices=N, --program=train|generate|prefill|all, "
    "--microbatches=N, --config.KEY=VALUE, --help"
)
PROGRAMS = {
    "train": ("train",),
    "generate": ("generate",),
    "prefill": ("prefill",),
    "all": ("train", "generate", "prefill"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's own). Returns the exit status."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's C++ log: errors only
    os.environ["JAX_PLATFORMS"] = "cpu"  # an accelerator of this machine has no part in it
    from jaxrl_sat import cli

    return cli.exit_status(lambda given: print(json.dumps(_run(given)), flush=True), argv)


def _run(argv: Sequence[str]) -> dict[str, Any]:
    flags, source = _parse(argv)
    from jaxrl_sat import mesh
    from jaxrl_sat.aot import programs, published, report, topology

    logging.getLogger("jax").setLevel(logging.WARNING)
    config = _config(source)
    model_config = published.read(config.model.path)
    topology.prepare(os.environ, flags.topology)
    target = topology.describe(flags.topology, flags.slices)
    config = programs.over_slices(config, target)
    mesh.check_fits(config, model_config)
    made = [programs.make(name, config, model_config, target, flags.microbatches) for name in PROGRAMS[flags.program]]
    return report.document(config, model_config, target, made)


def _parse(argv: Sequence[str]) -> tuple[Namespace, Source]:
    from jaxrl_sat import cli
    from jaxrl_sat.types import InputError

    parser = cli.Parser(
        "python -m jaxrl_sat.aot", "Compile a run's programs at full size for a TPU that is not there.", FLAGS
    )
    parser.add_argument("--topology", required=True, help="kind of TPU and chips along each axis, as v5p:4x4x4")
    parser.add_argument("--slices", type=int, default=1, help="such slices, joined by the data axis (1)")
    parser.add_argument("--program", choices=PROGRAMS, default="all", help="what to compile (all)")
    parser.add_argument("--microbatches", type=int, help="of an update (as many as its longest responses take)")
    flags, source = parser.parse_source(argv)
    for name, most in (("slices", 64), ("microbatches", 10**4)):
        value = getattr(flags, name)
        if value is not None and not 1 <= value <= most:
            raise InputError(f"--{name}: {value}; allowed: 1 to {most}")
    return flags, source


def _config(source: Source) -> RunConfig:
    """The run to compile for. Data is not read, and a preset of the papers has their model, so both may be left out."""
    from jaxrl_sat import cli, config
    from jaxrl_sat.aot import published

    preset = source.preset or "tpu"
    loaded: Any = cli.load(source, preset)
    for group, path in (("data", "arithmetic"), ("model", published.PRESET_MODELS.get(preset))):
        if path and group in loaded and not loaded[group].get("path"):
            with loaded.ignore_type(), loaded.unlocked():
                loaded[group].path = path
    return config.from_config_dict(loaded)


if __name__ == "__main__":
    sys.exit(main())

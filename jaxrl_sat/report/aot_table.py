"""docs/aot.md: what the programs of full-size runs take of TPUs that are not there.

    python -m jaxrl_sat.report.aot_table [--only=NAME]

compiles every case (or the one named), one after the other, each in a process of its own; keeps the answers in
docs/aot.json; and writes the page from them. All cases together take hours on two cores. Needs the TPU compiler:
`make aot EXTRA=tpu`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_sat import cli
from jaxrl_sat.types import InputError

GIB = 2**30

FLAGSHIP = "--config=configs/sat_grpo.py"

RECORDS = "--config.log.direction_every=1"
"""SAT-GRPO reads no top-K records itself; the analysis of directions does, and so has them in the batch."""

CASES: Mapping[str, tuple[str, ...]] = {
    "30b-v5p-64": (f"{FLAGSHIP}:tpu", "--topology=v5p:4x4x4", "--program=train", RECORDS),
    "30b-v5p-2x64": (f"{FLAGSHIP}:tpu", "--topology=v5p:4x4x4", "--slices=2", "--program=train", RECORDS),
    "30b-v6e-256": (
        f"{FLAGSHIP}:tpu",
        "--topology=v6e:16x16",
        "--program=train",
        "--config.mesh.trainer.fsdp=256",
        "--config.learner.microbatch_rows=256",
        RECORDS,
    ),
    "30b-generate-v5p-4": (
        f"{FLAGSHIP}:tpu",
        "--topology=v5p:2x2x1",
        "--program=generate",
        "--config.mesh.sampler.data=1",
        "--config.mesh.sampler.expert=1",
        "--config.mesh.sampler.tensor=4",
        "--config.sampler.slots=80",
    ),
    "8b-v6e-32": (f"{FLAGSHIP}:tpu_8b", "--topology=v6e:4x8", "--program=train", RECORDS),
    "4b-v6e-16": (f"{FLAGSHIP}:tpu_4b", "--topology=v6e:4x4", "--program=train", RECORDS),
    "4b-v5e-32": (
        f"{FLAGSHIP}:tpu_4b",
        "--topology=v5e:4x8",
        "--program=train",
        "--config.mesh.trainer.context=2",
        RECORDS,
    ),
}
"""What is compiled, by name: the arguments of `python -m jaxrl_sat.aot`."""

INTRODUCTION = """# What full-size runs take of a TPU

Made by `make aot EXTRA=tpu` on a machine without a TPU: the TPU compiler compiles each program at full size for the
topology named, and says what it takes of each chip. Made anew with `python -m jaxrl_sat.report.aot_table`; the answers
in full are in [aot.json](aot.json).

Rows are 32,768 tokens; each program records or reads the top-20 log-probs of every token and replays its routing; Adam
is in float32. *Tokens a chip*: processed at once by the train step, held in the cache when decoding. *State*: bytes
that shapes and shardings alone account for (parameters before and after, reference policy, optimizer, gradient, batch;
weights and cache). *Peak* is the compiler's: what is alive at once. *Operations*: of the compiled program
over those of the mathematics, where nothing is computed twice.
"""

COLUMNS = (
    "case",
    "model and program",
    "chips",
    "mesh",
    "rows x microbatches",
    "tokens a chip",
    "state, GiB",
    "peak, GiB",
    "limit, GiB",
    "operations, x",
    "compiled in, s",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Renew the answers and the page. Returns the exit status."""
    return cli.exit_status(_run, argv)


def _run(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_sat.report.aot_table")
    parser.add_argument("--only", choices=CASES, help="the case to compile (all)")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of aot.json and aot.md (docs)")
    flags = parser.parse_args(argv)
    _renew(flags.docs, [flags.only] if flags.only else list(CASES))


def _renew(docs: Path, names: Sequence[str]) -> None:
    answers = read(docs / "aot.json")
    for name in names:
        answers[name] = ask(CASES[name])
        (docs / "aot.json").write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
    (docs / "aot.md").write_text(page(answers), encoding="utf-8")


def read(file: Path) -> dict[str, Any]:
    """The answers so far, by case."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def ask(arguments: Sequence[str]) -> dict[str, Any]:
    """What `python -m jaxrl_sat.aot` says. Raises `InputError` where it refuses."""
    done = subprocess.run([sys.executable, "-m", "jaxrl_sat.aot", *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise InputError(f"jaxrl_sat.aot {' '.join(arguments)}: exit status {done.returncode}; allowed: 0")
    return json.loads(done.stdout.splitlines()[-1])


def page(answers: Mapping[str, Any]) -> str:
    """The page in Markdown: a line a program, then the commands, then what does not fit."""
    known = {name: answers[name] for name in CASES if name in answers}
    lines = [_line(name, answer, program) for name, answer in known.items() for program in answer["programs"]]
    commands = [f"    # {name}\n    python -m jaxrl_sat.aot {' '.join(CASES[name])}\n" for name in known]
    head = f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    return INTRODUCTION + head + "".join(lines) + "\n## Commands\n\n" + "\n".join(commands)


def _line(name: str, answer: Mapping[str, Any], program: Mapping[str, Any]) -> str:
    mesh = " ".join(f"{axis} {size}" for axis, size in program["mesh"].items() if size > 1)
    slices = f"{answer['slices']} x " if answer["slices"] > 1 else ""
    cells = [
        name,
        f"{answer['model']} {program['name']}",
        f"{answer['devices']} ({slices}{answer['topology']})",
        mesh,
        f"{program['rows']} x {program['microbatches']}" if program["name"] == "train" else str(program["rows"]),
        f"{program['tokens_per_device']:,}",
        f"{program['state_bytes_expected'] / GIB:.1f}",
        f"{program['peak_bytes'] / GIB:.1f}" + ("" if program["fits"] else " (does not fit)"),
        f"{answer['hbm_bytes'] / GIB:.1f}",
        f"{program['flops'] / program['model_flops']:.2f}",
        f"{program['compile_s']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    sys.exit(main())

"""The verifier on cases that catch verifiers, beside others; on the reference answers of GSM8K and MATH; and its speed.

python -m benchmarks.verifier [--data=FOLDER] [--peer-python=PYTHON] [--page=docs/verifier.md]

FOLDER holds gsm8k/*.jsonl and math/*.json; PYTHON is of the environment that `benchmarks/peers.sh verifiers` makes;
--page writes the table anew. Cases are tests/rewards/verifier_cases.jsonl. Speed is that of 4096 responses, no two of
them alike, from a pool not yet started: rewritten reference answers with --data, sums of a variable without. The last
line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import verifier_page, verifier_rewrites
from benchmarks.timing import machine, say
from benchmarks.verifier_peer import CANARY
from jaxrl_sat.rewards import Outcome, outcomes, shared_pool
from jaxrl_sat.types import InputError

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "rewards" / "verifier_cases.jsonl"
RESPONSES, SECONDS = 4096, 20.0
AS_EXPECTED, RATE = 128, 0.995


@dataclasses.dataclass(frozen=True)
class Row:
    """A verifier on the cases: counts, and the numbers of the cases that it got wrong."""

    verifier: str
    false_positives: int
    false_negatives: int
    timed_out: int
    executed: int
    failed: tuple[int, ...]


def row(verifier: str, cases: Sequence[Mapping[str, Any]], found: Sequence[tuple[bool, bool, bool]]) -> Row:
    """Counts of a verifier's [says right, timed out, executed] a case."""
    wrong = [i for i, (case, one) in enumerate(zip(cases, found, strict=True)) if case["expected"] != one[0]]
    positives = sum(found[i][0] for i in wrong)
    late, executed = sum(one[1] for one in found), sum(one[2] for one in found)
    return Row(verifier, positives, len(wrong) - positives, late, executed, tuple(wrong))


def ours(cases: Sequence[Mapping[str, Any]]) -> Row:
    """This project's verifier, a case at a time so that a file that one makes is seen."""
    found = []
    for case in cases:
        CANARY.unlink(missing_ok=True)
        outcome = outcomes([case["response"]], [case["answer"]])[0]
        found.append((outcome is Outcome.RIGHT, outcome in (Outcome.TIMED_OUT, Outcome.DIED), CANARY.exists()))
    return row("jaxrl_sat", cases, found)


def theirs(python: str, cases: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The others, in their own environment. Raises `InputError` where it has none."""
    command = [python, "-m", "benchmarks.verifier_peer", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise InputError(f"--peer-python={python}: exit status {done.returncode}; see benchmarks/peers.sh verifiers")
    rows = []
    for line in done.stdout.splitlines():
        said = json.loads(line)
        found = [(right, seconds > 5.0, touched) for right, seconds, touched, _ in said["outcomes"]]
        rows.append(row(said["verifier"], cases, found))
    return rows


def rates(data: Path) -> dict[str, Any]:
    """Of each data set, share of rewritten answers that are right and of next answers that are wrong; exceptions."""
    found: dict[str, Any] = {}
    for name, rows in verifier_rewrites.gold(data).items():
        for kind, triples, wanted in zip(("right", "wrong"), verifier_rewrites.pairs(rows), (True, False), strict=True):
            say(f"{name}: {len(triples)} {kind}")
            said = outcomes([response for _, response, _ in triples], [answer for _, _, answer in triples])
            missed = [t for t, outcome in zip(triples, said, strict=True) if (outcome is Outcome.RIGHT) != wanted]
            late = sum(outcome in (Outcome.TIMED_OUT, Outcome.DIED) for outcome in said)
            found[f"{name} {kind}"] = {
                "cases": len(triples),
                "rate": 1 - len(missed) / len(triples),
                "timed_out": late,
                "exceptions": missed,
            }
    return found


def workload(data: Path | None) -> tuple[str, list[tuple[str, str]]]:
    """What they are, and 4096 (response, answer) of which no two are alike and none is decided as text."""
    if data is None:
        made = [(f"So \\boxed{{{i}x+{i + 1}x}}", f"{2 * i + 1}x") for i in range(1, RESPONSES + 1)]
        return "sums of one variable", made
    rows = [row for row in verifier_rewrites.gold(data)["MATH"] if verifier_rewrites.number(row[1]) is None]
    right, wrong = verifier_rewrites.pairs(rows)
    made = list(dict.fromkeys(pair[1:] for pair in wrong))[: RESPONSES // 2]
    made += list(dict.fromkeys(pair[1:] for pair in right))[: RESPONSES - len(made)]
    return "reference answers of MATH that are no plain number: the next problem's, and rewritten", made


def speed(data: Path | None) -> dict[str, Any]:
    """Seconds of 4096 responses from nothing: no worker started, nothing remembered."""
    what, made = workload(data)
    before, load = shared_pool().started, os.getloadavg()[0]
    begin = time.perf_counter()
    said = outcomes([response for response, _ in made], [answer for _, answer in made])
    seconds = time.perf_counter() - begin
    again = time.perf_counter()
    outcomes([response for response, _ in made], [answer for _, answer in made])
    return {
        "what": what,
        "responses": len(made),
        "seconds": round(seconds, 2),
        "seconds_again_from_memory": round(time.perf_counter() - again, 3),
        "right": sum(outcome is Outcome.RIGHT for outcome in said),
        "timed_out": sum(outcome in (Outcome.TIMED_OUT, Outcome.DIED) for outcome in said),
        "workers": shared_pool().started - before,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(load, 1),
    }


def main() -> int:
    """Measure, write the page, print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifier")
    parser.add_argument("--data", type=Path, help="folder with gsm8k/*.jsonl and math/*.json (none)")
    parser.add_argument("--peer-python", help="interpreter of the other verifiers' environment (none)")
    parser.add_argument("--page", type=Path, help="file to write the tables to (none)")
    flags = parser.parse_args()
    ran_on = machine()
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    try:
        timed = speed(flags.data)
        say("cases")
        rows = [ours(cases), *(theirs(flags.peer_python, cases) if flags.peer_python else [])]
        found = rates(flags.data) if flags.data else {}
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    right = len(cases) - len(rows[0].failed)
    figures = [
        {"name": "cases", "value": right, "unit": "of 132", "target": AS_EXPECTED, "ok": right >= AS_EXPECTED},
        {"name": "executions", "value": rows[0].executed, "unit": "", "target": 0, "ok": rows[0].executed == 0},
        {"name": "time", "value": timed["seconds"], "unit": "s", "target": SECONDS, "ok": timed["seconds"] < SECONDS},
    ] + [
        {"name": name, "value": one["rate"], "unit": "", "target": RATE, "ok": one["rate"] > RATE}
        for name, one in found.items()
    ]
    if flags.page:
        flags.page.write_text(verifier_page.page(rows, cases, found, timed), encoding="utf-8")
    report = {"benchmark": "verifier", "figures": figures, "ran_on": ran_on, "speed": timed}
    print(json.dumps(report | {"table": [dataclasses.asdict(one) for one in rows], "rates": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

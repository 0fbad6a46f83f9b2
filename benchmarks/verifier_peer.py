"""Other verifiers on cases: python -m benchmarks.verifier_peer CASES, with the Python that `peers.sh verifiers` made.

Each case is tried in a forked process of its own, 10 seconds and 4 GiB. Prints a line of JSON for each verifier:
{"verifier", "outcomes"}, an outcome being [says right, seconds, whether the canary was touched, error].
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

SECONDS = 10.0
MEMORY_BYTES = 4 * 2**30
CANARY = Path("/tmp/verifiercanary")

Verifier = Callable[[str, str], bool]


def math_verify() -> Verifier:
    """Hugging Face's, as its documentation calls it."""
    module = importlib.import_module("math_verify")
    return lambda response, answer: bool(module.verify(module.parse(f"${answer}$"), module.parse(response)))


def verl(name: str) -> Verifier:
    """One of verl's scores, without the rest of verl."""
    root = Path(str(importlib.metadata.distribution("verl").locate_file("verl")))
    for package in ("verl", "verl.utils", "verl.utils.reward_score"):
        stand_in = types.ModuleType(package)
        stand_in.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
        sys.modules[package] = stand_in
    metric = types.ModuleType("verl.utils.metric")  # which would load torch
    metric.Metric = object  # type: ignore[attr-defined]
    sys.modules[metric.__name__] = metric
    score = importlib.import_module(f"verl.utils.reward_score.{name}").compute_score

    def verify(response: str, answer: str) -> bool:
        found = score(response, answer)
        if isinstance(found, dict):
            return found["score"] > 0
        return bool(found[0] if isinstance(found, tuple) else found)

    return verify


def mathruler() -> Verifier:
    """mathruler's grader on the box that it extracts."""
    grader = importlib.import_module("mathruler.grader")
    return lambda response, answer: bool(grader.grade_answer(grader.extract_boxed_content(response), answer))


VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "math-verify": math_verify,
    "verl prime_math": lambda: verl("prime_math"),
    "verl math_dapo": lambda: verl("math_dapo"),
    "verl math_reward": lambda: verl("math_reward"),
    "mathruler": mathruler,
}


def tried(verifier: Verifier, case: dict[str, str]) -> tuple[bool, float, bool, str]:
    """What a verifier says of a case, in a process that can be ended."""
    CANARY.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(verifier, case, sender))
    begin = time.monotonic()
    process.start()
    sender.close()
    right, error = False, "timed out"
    if receiver.poll(SECONDS):
        try:
            right, error = receiver.recv()
        except EOFError:
            error = "died"
    seconds = time.monotonic() - begin
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    touched = CANARY.exists()
    CANARY.unlink(missing_ok=True)
    return right, round(seconds, 3), touched, error


def _answer(verifier: Verifier, case: dict[str, str], sender: Connection) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        sender.send((verifier(case["response"], case["answer"]), ""))
    except BaseException as error:  # noqa: B902 - whatever the text makes it raise, SystemExit too
        sender.send((False, type(error).__name__))


def main() -> None:
    """Try all verifiers on all cases."""
    logging.disable(logging.CRITICAL)
    cases = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    for name, make in VERIFIERS.items():
        verifier = make()
        verifier(r"The answer is $\boxed{\frac{1}{2}}$.", "0.5")  # grammars are loaded before the forks
        print(json.dumps({"verifier": name, "outcomes": [tried(verifier, case) for case in cases]}), flush=True)


if __name__ == "__main__":
    main()

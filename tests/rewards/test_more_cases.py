"""Further cases of the kinds that catch verifiers, judged by hand before the verifier was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_sat.rewards.equivalence import equivalent
from jaxrl_sat.rewards.extract import final_answer

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases_more.jsonl").read_text().splitlines()]
CANARY = Path("/tmp/verifiercanary")
"""What the text of a response makes where it is executed."""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[::4], id="a quarter"),
        pytest.param([case for i, case in enumerate(CASES) if i % 4], id="the rest", marks=pytest.mark.slow),
    ],
)
def test_all_cases_are_as_expected(cases: list[dict]) -> None:
    CANARY.unlink(missing_ok=True)
    failed = []
    for case in cases:
        found = final_answer(case["response"])
        if (found is not None and equivalent(found, case["answer"])) != case["expected"]:
            failed.append((case["kind"], found, case["answer"]))
    assert failed == []
    assert not CANARY.exists()

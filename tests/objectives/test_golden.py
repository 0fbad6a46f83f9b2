"""Every golden vector of the implemented names, in float32 and float64, masks exact."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.golden_adapter import EVALUATORS, evaluate

GOLDEN = Path(__file__).parent.parent / "golden"
TOLERANCE = {"float64": 1e-9, "float32": 2e-5}


def assert_matches(got: dict, expected: dict, tolerance: float, where: str) -> None:
    """Masks and counts (integers in the file) equal; numbers within |x - y| / max(1, |y|)."""
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_matches(got[name], value, tolerance, f"{where} {name}")
            assert set(got[name]) == set(value)
            continue
        actual, wanted = np.asarray(got[name], np.float64), np.asarray(value, np.float64)
        assert actual.shape == wanted.shape, f"{where} {name}"
        limit = 0.0 if np.asarray(value).dtype.kind in "bi" else tolerance
        with np.errstate(invalid="ignore"):  # an infinity equals itself
            error = np.where(actual == wanted, 0, np.abs(actual - wanted) / np.maximum(1, np.abs(wanted)))
        assert np.all(error <= limit), f"{where} {name}: {np.max(error)}"


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("objective", sorted(EVALUATORS))
def test_golden(objective: str, precision: str) -> None:
    document = json.loads((GOLDEN / f"{objective}.json").read_text())
    with jax.enable_x64(precision == "float64"):
        for case in document["cases"]:
            got = evaluate(objective, case["inputs"], case["params"])
            assert_matches(got, case["expected"], TOLERANCE[precision], f"{objective}/{case['name']}")


def test_every_golden_file_is_evaluated() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(EVALUATORS)

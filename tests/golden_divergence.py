"""Golden evaluators of divergences, their masks and their directions: names mapped onto the package, no mathematics."""

from __future__ import annotations

from tests.golden_common import Evaluator

EVALUATORS: dict[str, Evaluator] = {}

"""Maps the names of the golden vectors onto the package's functions. No mathematics of its own.

`evaluate` takes a case's lists as they stand and computes in the precision that JAX_ENABLE_X64 sets. The evaluators
stand beside this file, by room: golden_losses, golden_divergence, golden_figures.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrl_sat.types import InputError
from tests import golden_divergence, golden_figures, golden_losses
from tests.golden_common import Evaluator

EVALUATORS: dict[str, Evaluator] = {
    **golden_losses.EVALUATORS,
    **golden_divergence.EVALUATORS,
    **golden_figures.EVALUATORS,
}


def evaluate(objective: str, inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Every key of a golden case's `expected`, computed by the package."""
    if objective not in EVALUATORS:
        raise InputError(f"objective: {objective!r} is not one of {', '.join(EVALUATORS)}")
    return jax.tree.map(np.asarray, EVALUATORS[objective](inputs, params))

"""avg@k: the mean over problems of the share of k samples that are right."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def avg_at_k(scores: Float[np.ndarray, " N"], samples: int) -> float:
    """Mean of the problems' mean scores; `scores` holds `samples` a problem, together, each 0 to 1."""
    return float(scores.reshape(-1, samples).mean(axis=1).mean())

"""Dynamic sampling, as in DAPO: which groups of a batch an update uses."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True)
class Selection:
    """The responses used, int64 [M] in rising order; groups used, dropped for equal rewards, and not needed."""

    used: Int[np.ndarray, " M"]
    groups_used: int
    groups_dropped: int
    groups_spare: int


def with_signal(rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"], wanted: int) -> Selection:
    """The first `wanted` groups, by number, whose rewards are not all equal."""
    unequal = [g for g in np.unique(groups) if np.ptp(rewards[groups == g]) > 0]
    kept = unequal[:wanted]
    dropped = len(np.unique(groups)) - len(unequal)
    return Selection(np.flatnonzero(np.isin(groups, kept)), len(kept), dropped, len(unequal) - len(kept))

"""Weights as the sampler takes them: always with their version, and through a holder where they may be swapped."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Weights:
    """Unstacked parameters on the sampler's mesh, and the number of updates that made them. Never mutated."""

    decode_params: Any  # `jaxrl_sat.model.decode_params`
    version: int


class WeightHolder:
    """A place that holds the weights of the moment. JetStream's Driver captures its params once: it is given this."""

    def __init__(self, weights: Weights):
        self._weights = weights

    @property
    def current(self) -> Weights:
        """The weights last given."""
        return self._weights

    def swap(self, weights: Weights) -> None:
        """Use `weights` from the next dispatch on. One reference assignment: no dispatch sees a mixture."""
        self._weights = weights


def current(params: Weights | WeightHolder) -> Weights:
    """The weights to use now."""
    return params.current if isinstance(params, WeightHolder) else params

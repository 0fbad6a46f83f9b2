"""Weights on their way to the sampler, and the versions still in flight.

`publish` is the only place where weights cross from the trainer to the sampler. Each version that some batch of the
run is sampled by is moved once; both copies, the trainer's and the sampler's, live until the last such batch is
consumed, so that log-probs can be recomputed at exactly the weights that sampled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from jaxrl_sat.pipeline import lag
from jaxrl_sat.types import Params

W = TypeVar("W")


class WeightStore(Generic[W]):
    """Parameter versions in flight. Safe to read from the sampler's thread while the trainer publishes.

    `transfer(params, version)` moves parameters to the sampler's devices in the sampler's layout; where it raises, what
    is in flight stays as it was. The trainer's copies are held too: they are what log-probs are recomputed with and
    what a resumed run samples with.
    """

    def __init__(self, mode: str, lag_updates: int, transfer: Callable[[Params, int], W]):
        self._schedule = (mode, lag_updates)
        self._transfer = transfer
        self._lock = threading.Lock()
        self._trainer: dict[int, Params] = {}
        self._sampler: dict[int, W] = {}

    def publish(self, params: Params, version: int) -> W | None:
        """Hand over the weights after `version` updates if any batch is sampled by them, and retire what no batch is.

        Returns the sampler's copy, or None where the schedule never uses this version.
        """
        if not lag.samples_any(*self._schedule, version):
            self.retire(version)
            return None
        weights = self._transfer(params, version)
        with self._lock:
            self._trainer[version] = params
            self._sampler[version] = weights
        self.retire(version)
        return weights

    def retire(self, update: int) -> None:
        """Drop the versions that no batch from `update` on is sampled by."""
        needed = set(lag.versions_needed(*self._schedule, update))
        with self._lock:
            for kept in (self._trainer, self._sampler):
                for version in [v for v in kept if v < update and v not in needed]:
                    del kept[version]

    def weights(self, version: int) -> W | None:
        """The sampler's copy of `version`, or None while it is not published."""
        with self._lock:
            return self._sampler.get(version)

    def trainer_params(self, version: int) -> Params:
        """The trainer's copy of a version in flight; KeyError for one that was retired or never published."""
        with self._lock:
            return self._trainer[version]

    def in_flight(self) -> dict[int, Params]:
        """The trainer's copies by version, what a checkpoint has to hold besides the state."""
        with self._lock:
            return dict(self._trainer)

"""Engines of one policy on disjoint devices, as one: they share the requests of a batch and have one version."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.stop_strings import Codec
from jaxrl_sat.sampler.waiting import Order
from jaxrl_sat.sampler.weights import FleetWeights, check_finite
from jaxrl_sat.sampler.worker import generate_on
from jaxrl_sat.types import Params, Request, Rollout


@dataclasses.dataclass(frozen=True)
class Fleet:
    """See the module. `order`: in which waiting requests are put into slots."""

    engines: tuple[RolloutEngine, ...]
    order: Order = "fifo"

    @property
    def compilations(self) -> int:
        """Programs compiled so far, by all engines."""
        return sum(sum(engine.compilations.values()) for engine in self.engines)

    def load_params(self, params: Params, version: int) -> FleetWeights:
        """What `load_checked` does, on all engines."""
        return load_checked(self.engines, params, version)

    def generate(
        self,
        weights: FleetWeights,
        requests: Sequence[Request],
        should_stop: Callable[[], bool] = lambda: False,
        temperature: float | None = None,
        codec: Codec | None = None,
        finished: Callable[[Rollout], object] = lambda _: None,
    ) -> list[Rollout]:
        """What `worker.generate_on` does. A request's tokens do not hang on which engine serves it."""
        engines = list(zip(self.engines, weights.engines, strict=True))
        options = {"order": self.order, "codec": codec, "finished": finished}
        return generate_on(engines, requests, should_stop, temperature, **options)


def load_checked(engines: Sequence[RolloutEngine], params: Params, version: int) -> FleetWeights:
    """Copy parameters to every engine. Raises `InputError`, which names one, where any is not finite."""
    loaded = FleetWeights(tuple(engine.load_params(params, version) for engine in engines))
    for weights in loaded.engines:
        check_finite(weights)
    return loaded

"""One engine at work on its slots, in a thread of its own; what it is to do it is told turn by turn."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.slots import Outcome, Slots
from jaxrl_sat.sampler.stop_strings import Codec
from jaxrl_sat.sampler.waiting import J, Taken
from jaxrl_sat.sampler.weights import WeightHolder, Weights

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Turn(Generic[J]):
    """What is done before the next dispatch: jobs put into slots, jobs in slots ended for a reason."""

    taken: Taken[J]
    ended: Mapping[J, str]


class EngineThread(threading.Thread, Generic[J]):
    """Does turns until `next_turn` gives None. What it raises itself goes to `broke`, and it ends.

    A turn that fails costs the jobs in slots; the next one starts with an empty cache.
    """

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        holder: WeightHolder,
        codec: Codec | None,
        next_turn: Callable[[EngineThread[J]], Turn[J] | None],
        settle: Callable[[list[Outcome[J]]], None],
        broke: Callable[[BaseException], None],
    ):
        super().__init__(name=name, daemon=True)
        self.engine, self.holder = engine, holder
        self.slots: Slots[J] = Slots(engine, codec)
        self.pending: Weights | None = None
        """Weights to be used once the slots have drained; until then none is filled."""
        self.busy_since: float | None = None
        """When the turn now being done began, by the monotonic clock."""
        self._next_turn, self._settle, self._broke = next_turn, settle, broke

    def run(self) -> None:
        """Work until told to end."""
        try:
            while (turn := self._next_turn(self)) is not None:
                self.busy_since = time.monotonic()
                self._do(turn)
                self.busy_since = None
                self._settle(self.slots.settled())
        except BaseException as error:  # noqa: B902 - whoever waits must be told
            log.exception("%s ended", self.name)
            self._broke(error)

    def _do(self, turn: Turn[J]) -> None:
        weights = self.holder.current
        try:
            self.slots.release(turn.ended)
            self.slots.insert(weights, turn.taken)
            self.slots.advance(weights)
        except Exception as error:
            taken = [job for job, _ in turn.taken.jobs]
            log.exception("%s: a dispatch failed with what was in its slots", self.name)
            self.slots.fail(error, taken)

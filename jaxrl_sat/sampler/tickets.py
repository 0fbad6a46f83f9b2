"""A request handed in to the sampler, and the two ways in which that goes wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

from jaxrl_sat.sampler.waiting import Job
from jaxrl_sat.types import InputError, Request, Rollout


class Busy(Exception):
    """As many requests wait as may: to be tried again later."""


class RequestFailed(Exception):
    """A request went wrong; the text says how. `request` is which."""

    def __init__(self, request: Request, text: str):
        super().__init__(text)
        self.request = request


@dataclasses.dataclass(eq=False)
class Ticket(Job):
    """A request handed in. `future` is what `result` waits for; its callbacks run in an engine's thread."""

    keep: bool = False
    deadline: float | None = None  # by the monotonic clock
    withdraw: Callable[[Ticket], object] = lambda ticket: None
    serial: int = 0
    ended: str | None = None  # why it is to end before it has finished: "cancelled", "timeout"
    future: Future[Rollout] = dataclasses.field(default_factory=Future)

    def cancel(self) -> None:
        """End it before the next dispatch, unless it has ended; its rollout is what there is by then."""
        self.withdraw(self)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> Rollout:
        """The rollout, waited for; raises `RequestFailed`, or `TimeoutError` after `timeout` seconds."""
        return self.future.result(timeout)


def text_of(error: BaseException) -> str:
    """An error in one line."""
    named = isinstance(error, InputError | RequestFailed)
    return " ".join((str(error) if named else f"{type(error).__name__}: {error}").split())

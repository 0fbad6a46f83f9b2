"""A user's reward function, called in processes of its own, so that none it hangs, kills or fills is the run's."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_sat.rewards.example import Example
from jaxrl_sat.rewards.process import Ended, Process, Workers

IN_A_ROW = 16
"""After so many responses in a row without an answer only every so manieth is asked, until there is an answer."""


@dataclasses.dataclass(frozen=True)
class Score:
    """What a reward function made of a response. `failure`: why there is no answer, for which `value` is then 0."""

    value: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failure: str = ""


class _Caller(Process):
    def __init__(self, target: str):
        # The devices are the run's.
        environment = {"JAX_PLATFORMS": "cpu"}
        super().__init__("jaxrl_sat.rewards.plugin_worker", (target,), environment, heard=True)


class PlugIn(Workers[_Caller]):
    """The function that `target` names, in up to `size` processes with `seconds` of the clock for a response.

    Any thread may call. The processes start when first needed and have the caller's working folder.
    """

    def __init__(self, target: str, size: int, seconds: float):
        super().__init__(functools.partial(_Caller, target), size)
        self.target, self._seconds = target, seconds
        self._unanswered = 0  # responses in a row
        self._counting = threading.Lock()

    def problem(self) -> str:
        """Why the function cannot be called; empty where it can. Starts a process and keeps it."""
        try:
            with self.lent() as caller:
                error = json.loads(caller.greeting()).get("error", "")
        except Ended as ended:
            return f"its process {'was not ready in time' if ended.late else 'died'}"
        except ValueError:
            return "its process wrote something else before the function was loaded"
        return error

    def __call__(self, prompt: str, response: str, example: Example) -> Score:
        """The score of a response. Never raises for what the function does."""
        with self._counting:
            turn = self._unanswered
            if turn >= IN_A_ROW and turn % IN_A_ROW:
                self._unanswered += 1
                return Score(0.0, failure=f"not asked, after {IN_A_ROW} responses in a row without an answer")
        asked = {"prompt": prompt, "response": response, "example": dataclasses.asdict(example)}
        line = json.dumps(asked, default=_plain)
        said = self._ask(line)
        with self._counting:
            self._unanswered = self._unanswered + 1 if isinstance(said, str) else 0
        if isinstance(said, str):
            return Score(0.0, failure=said)
        return Score(0.0, failure=said["error"]) if "error" in said else Score(said["value"], said["parts"])

    def _ask(self, line: str) -> dict[str, Any] | str:
        """What the function said, or why it said nothing."""
        try:
            return self.asked(lambda caller: json.loads(caller.ask(line, self._seconds)))
        except Ended as ended:
            return f"no answer in {self._seconds:g} s" if ended.late else "its process died"


def _plain(value: Any) -> Any:
    """What JSON does not know of a data set's record."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)

"""What a reward function is told beside the two texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Example:
    """The problem that a response is to, and how the response ended.

    `id` and `source` are the data set's own, the number of the problem and empty where it has none. `record` is all
    that the set has of the problem, by feature. `finish_reason`: "stop", "length" (cut off), "cancelled", "timeout".
    `num_tokens`: of the response, the stop token included.
    """

    answer: str
    id: str
    source: str
    data_set: str
    record: Mapping[str, Any]
    finish_reason: str
    num_tokens: int

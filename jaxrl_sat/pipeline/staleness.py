"""The mean staleness that a steady pipeline should show: seed 000 Part 1, SPEC 17. Plain numbers, on the host.

With q_Q = Q / B and rho = v_R / v_T the mean lag n of a token, in weight versions, is n_PQS + n_IQS:

                        rho < 1 (rollout-bound)     rho > 1 (train-bound)
    n_PQS, generating   C M_tail / B                C M_tail / (rho B)
    n_IQS, waiting      rho                         (2 q_Q + rho - 1) / (2 rho)

What a run measures: C, the responses being generated at a time; B, the responses of an update; Q, the responses its
queue may hold; v_R and v_T, tokens a second that the sampler makes and the trainer consumes while each is at work. The
model is stylised: it knows means only, and no schedule. Put it beside the measured lag, not in its place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from jaxrl_sat.types import InputError

Number = float | int
Boundary = Literal["left", "right", "max", "mean"]


@dataclasses.dataclass(frozen=True)
class MeanStaleness:
    """Mean lag before the queue and in it, in weight versions; `n_bar` is the whole."""

    n_pqs: float
    n_iqs: float

    @property
    def n_bar(self) -> float:
        return self.n_pqs + self.n_iqs


def mean_staleness(
    concurrency: Number, tail: Number, batch: Number, queue: Number, rho: Number, boundary: str = "left"
) -> MeanStaleness:
    """n_PQS and n_IQS of the table above for C, M_tail, B, Q (responses) and rho = v_R / v_T.

    At rho = 1 n_IQS jumps from 1 to q_Q, and `boundary` says which it is: the limit from the "left" or the "right",
    their "max" or their "mean". n_PQS is the same from both sides.

    Raises:
      InputError: a quantity that is not finite, negative, or 0 where it divides; an unknown boundary.
    """
    for name, value in {"concurrency": concurrency, "tail": tail, "queue": queue}.items():
        if not 0 <= value < math.inf:
            raise InputError(f"{name}: {value!r} is not a number of at least 0")
    for name, value in {"batch": batch, "rho": rho}.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name}: {value!r} is not a number above 0")
    if boundary not in get_args(Boundary):
        raise InputError(f"boundary: {boundary!r} is not one of {', '.join(map(repr, get_args(Boundary)))}")
    rollout_bound, train_bound = rho, (2 * queue / batch + rho - 1) / (2 * rho)
    at_one = {
        "left": rollout_bound,
        "right": train_bound,
        "max": max(rollout_bound, train_bound),
        "mean": (rollout_bound + train_bound) / 2,
    }
    waiting = rollout_bound if rho < 1 else train_bound if rho > 1 else at_one[boundary]
    return MeanStaleness(n_pqs=concurrency * tail / (max(rho, 1) * batch), n_iqs=float(waiting))


def m_tail(lengths_by_group: Sequence[Sequence[int]] | np.ndarray) -> float:
    """M_tail = E[max_i L_i] / E[L]: the longest response of a prompt group over the mean response, SPEC 17.

    Groups may differ in size, and one without responses is left out. 1 where every length is 0: there is no tail.

    Raises:
      InputError: no response at all.
    """
    groups = [np.asarray(group, float) for group in lengths_by_group if len(group)]
    if not groups:
        raise InputError("lengths: no response; the model needs the lengths of at least one")
    mean = float(np.mean(np.concatenate(groups)))
    return float(np.mean([group.max() for group in groups])) / mean if mean else 1.0


def measured(
    lengths_by_group: Sequence[Sequence[int]] | np.ndarray,
    generate_s: Number,
    train_s: Number,
    concurrency: Number,
    batch: Number,
    queue: Number,
) -> float:
    """The model's mean lag from what one update shows, to log beside the lag that its tokens really had.

    The same tokens took `generate_s` seconds to sample and `train_s` to train on, so rho = train_s / generate_s.
    """
    if not (0 < generate_s < math.inf and 0 < train_s < math.inf):
        raise InputError(f"seconds: {generate_s!r} to generate and {train_s!r} to train are not both above 0")
    rho = train_s / generate_s
    return mean_staleness(concurrency, m_tail(lengths_by_group), batch, queue, rho).n_bar

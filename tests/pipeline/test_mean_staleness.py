"""The mean-staleness model: both regimes, the boundary between them, the tail, and what a run measures."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_sat.pipeline.staleness import m_tail, mean_staleness, measured
from jaxrl_sat.types import InputError


def test_both_regimes_by_hand() -> None:
    """C M / B = 3 and q_Q = 3: rho 1/2 gives 3 + 1/2; rho 3/2 gives 2 + (6 + 1/2) / 3."""
    slow, fast = (mean_staleness(64, 1.5, 32, 96, rho) for rho in (0.5, 1.5))
    assert (slow.n_pqs, slow.n_iqs, slow.n_bar) == (3.0, 0.5, 3.5)
    assert (fast.n_pqs, fast.n_iqs) == (2.0, pytest.approx(6.5 / 3))


@pytest.mark.parametrize(("boundary", "want"), [("left", 1), ("right", 3), ("max", 3), ("mean", 2)])
def test_boundary_is_what_the_limits_are(boundary: str, want: float) -> None:
    at_one = mean_staleness(64, 1.5, 32, 96, 1.0, boundary)
    assert at_one.n_iqs == want and at_one.n_pqs == 3
    for side, rho in {"left": 1 - 1e-9, "right": 1 + 1e-9}.items():
        near = mean_staleness(64, 1.5, 32, 96, rho, boundary)
        assert near.n_bar == pytest.approx(mean_staleness(64, 1.5, 32, 96, 1.0, side).n_bar, rel=1e-8)


def test_a_queue_of_one_batch_has_no_jump() -> None:
    assert (
        len({mean_staleness(8, 1.0, 4, 4, 1.0, boundary).n_bar for boundary in ("left", "right", "max", "mean")}) == 1
    )


def test_tail_is_the_longest_over_the_mean() -> None:
    assert m_tail([[1, 3], [2, 2]]) == 2.5 / 2
    assert m_tail([[4], [1, 1, 6], []]) == 5 / 3  # groups differ in size, one has none
    assert m_tail(np.full((3, 5), 7)) == 1
    assert m_tail([[0, 0]]) == 1


def test_what_a_run_measures() -> None:
    """Twice as long to sample as to train: rho = 1/2."""
    lengths = [[10, 30], [20, 20]]
    want = mean_staleness(4, 1.25, 4, 8, 0.5).n_bar
    assert measured(lengths, generate_s=2.0, train_s=1.0, concurrency=4, batch=4, queue=8) == want


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("batch", {"batch": 0}),
        ("rho", {"rho": 0.0}),
        ("rho", {"rho": float("nan")}),
        ("queue", {"queue": -1}),
        ("tail", {"tail": float("inf")}),
        ("boundary", {"boundary": "middle"}),
    ],
)
def test_impossible_quantities_are_named(key: str, given: dict) -> None:
    with pytest.raises(InputError, match=key):
        mean_staleness(**({"concurrency": 1, "tail": 1.0, "batch": 1, "queue": 1, "rho": 1.0} | given))


def test_measuring_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="lengths"):
        m_tail([[], []])
    with pytest.raises(InputError, match="seconds"):
        measured([[1]], 0.0, 1.0, 1, 1, 1)

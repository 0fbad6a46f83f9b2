"""The schedule of weight versions, against a simulation of the pipeline it describes."""

import pytest

from jaxrl_sat.pipeline import lag
from jaxrl_sat.types import InputError


def simulate_interval(n: int, updates: int) -> list[int]:
    """Play the papers' pipeline: broadcast after every n updates, batch j + 1 sampled while update j runs."""
    versions = [0]
    sampler = 0
    for update in range(updates - 1):
        if update % n == 0:
            sampler = update
        versions.append(sampler)
    return versions


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_interval_equals_simulated_pipeline(n):
    assert [lag.behaviour_version("interval", n, j) for j in range(40)] == simulate_interval(n, 40)


def test_interval_eight_realises_lags_one_to_eight():
    lags = [j - lag.behaviour_version("interval", 8, j) for j in range(1, 17)]
    assert lags == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8]


def test_fixed_and_sync():
    assert [lag.behaviour_version("fixed", 3, j) for j in range(6)] == [0, 0, 0, 0, 1, 2]
    assert [lag.behaviour_version("sync", 0, j) for j in range(4)] == [0, 1, 2, 3]
    assert [lag.behaviour_version("fixed", 1, j) for j in range(9)] == [
        lag.behaviour_version("interval", 1, j) for j in range(9)
    ]


@pytest.mark.parametrize(("mode", "n"), [("sync", 0), ("fixed", 1), ("fixed", 4), ("interval", 1), ("interval", 5)])
def test_versions_needed_are_exactly_those_later_batches_use(mode, n):
    for update in range(23):
        later = {lag.behaviour_version(mode, n, j) for j in range(update, 60)}
        assert lag.versions_needed(mode, n, update) == sorted(v for v in later if v <= update)
    used = {lag.behaviour_version(mode, n, j) for j in range(60)}
    assert [v for v in range(40) if lag.samples_any(mode, n, v)] == sorted(v for v in used if v < 40)


@pytest.mark.parametrize(("mode", "n"), [("interval", 0), ("fixed", -1), ("sync", 2), ("async", 1)])
def test_impossible_settings_are_named(mode, n):
    with pytest.raises(InputError, match=r"pipeline\.(mode|lag).*allowed"):
        lag.check(mode, n)

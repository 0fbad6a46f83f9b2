"""avg@k, pass@k and their intervals: by hand, by counting subsets, and by the coverage that simulated models show."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxrl_sat.evaluation import estimates


def right(*counts: int, samples: int) -> np.ndarray:
    """A problem for each count of right responses."""
    return np.arange(samples) < np.asarray(counts)[:, None]


def test_avg_is_the_mean_over_problems() -> None:
    assert estimates.avg_at_k(right(4, 1, 0, samples=4)).value == pytest.approx((1 + 0.25 + 0) / 3)


@pytest.mark.parametrize(("count", "k"), [(0, 3), (2, 1), (2, 3), (5, 2), (6, 6), (1, 6)])
def test_pass_is_the_share_of_subsets_with_a_right_one(count: int, k: int) -> None:
    responses = right(count, samples=6)
    subsets = list(itertools.combinations(responses[0], k))
    assert estimates.solved_by(responses, k)[0] == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_all_samples_is_whether_any_is_right_and_at_one_the_average() -> None:
    responses = right(0, 3, 8, 1, samples=8)
    assert estimates.pass_at_k(responses, 8).value == 0.75
    assert estimates.pass_at_k(responses, 1) == estimates.avg_at_k(responses)
    with pytest.raises(ValueError, match="k is 9; from 1 to 8"):
        estimates.pass_at_k(responses, 9)


def test_which_k() -> None:
    assert {n: estimates.ks(n) for n in (1, 2, 6, 8)} == {1: [1], 2: [1, 2], 6: [1, 2, 4, 6], 8: [1, 2, 4, 8]}


def test_one_sample_has_wilsons_interval() -> None:
    """With one response a problem it is the textbook interval of 60 of 201, but for t and a sample's own variance."""
    found = estimates.avg_at_k(right(*[1] * 60, *[0] * 141, samples=1))
    n, p, z = 200, 60 / 201, 1.9719
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=1e-3) == found.half_width


def test_all_wrong_is_bounded_by_the_number_of_problems() -> None:
    """About 3.8 / P, however many samples: a model may be right on none of these problems and on others each time."""
    few, many = (estimates.avg_at_k(right(*[0] * 100, samples=n)) for n in (1, 64))
    assert few == many and few.value == few.low == 0 and few.high == pytest.approx(0.0379, abs=1e-3)
    assert estimates.avg_at_k(right(5, samples=8)) == estimates.Estimate(0.625, 0.0, 1.0)


@pytest.mark.parametrize("problems", [30, 200])
@pytest.mark.parametrize("beta", [(0.3, 0.7), (0.1, 1.5), (2, 2)])
def test_intervals_cover_the_truth(beta: tuple[float, float], problems: int) -> None:
    """About 95 of 100 evaluations of models of known ability have it in the interval, 89 where 30 problems are nearly
    all out of reach (mean +- t error has 87 there)."""
    rng, rounds, samples = np.random.default_rng(0), 600, 8
    truth = beta[0] / sum(beta)
    chance = rng.beta(*beta, (rounds, problems, 1))
    answers = rng.random((rounds, problems, samples)) < chance
    sure = 1 - (1 - rng.beta(*beta, 10**6)) ** 4
    for name, true, found in (
        ("avg", truth, [estimates.avg_at_k(one) for one in answers]),
        ("pass", sure.mean(), [estimates.pass_at_k(one, 4) for one in answers]),
    ):
        covered = np.mean([one.low <= true <= one.high for one in found])
        assert 0.88 <= covered <= 0.985, (name, covered)


@pytest.mark.parametrize("problems", [30, 200])
def test_differences_cover_the_truth_and_reject_in_five_percent(problems: int) -> None:
    rng, rounds, samples = np.random.default_rng(1), 400, 4
    chance = rng.beta(0.3, 0.7, (rounds, problems))
    one, other = (rng.binomial(samples, chance) / samples for _ in range(2))
    found = [estimates.difference(a, b, 1 / samples) for a, b in zip(one, other, strict=True)]
    assert 0.92 <= np.mean([d.low <= 0 <= d.high for d in found]) <= 0.98
    assert 0.02 <= np.mean([d.p <= 0.05 for d in found]) <= 0.08


def test_sign_flips_by_hand() -> None:
    assert estimates.sign_flip_p(np.array([1.0, 1, 1, 0, 1, 1, 0])) == 2 / 32
    assert estimates.sign_flip_p(np.array([0.5, -0.5, 0])) == 1.0
    assert estimates.sign_flip_p(np.zeros(4)) == 1.0
    wins = np.array([1.0] * 14 + [-1.0] * 6)
    exact = 2 * sum(len(list(itertools.combinations(range(20), k))) for k in range(7)) / 2**20
    assert estimates.sign_flip_p(wins) == pytest.approx(exact, abs=0.003)


def test_no_difference_seen_is_not_none_for_sure() -> None:
    same = estimates.difference(np.full(100, 0.5), np.full(100, 0.5), 1 / 8)
    assert (same.change, same.p) == (0, 1) and same.high == -same.low == pytest.approx(1.984 / 8 / 100, rel=1e-3)

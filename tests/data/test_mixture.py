"""Which problem stands where."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from jaxrl_sat.data import mixture

A, B = np.arange(0, 30), np.arange(30, 40)


def place_names(order, first: int, last: int) -> list[str]:
    return ["a" if order[i] < 30 else "b" for i in range(first, last)]


def test_largest_remainder() -> None:
    assert mixture.apportion(10, (1, 1, 1)) == (4, 3, 3)
    assert mixture.apportion(7, (60, 30, 10)) == (4, 2, 1)  # quotas 4.2, 2.1, 0.7
    assert mixture.apportion(0, (1, 2)) == (0, 0)


def test_proportions_are_the_decimals_of_the_weights_or_the_sizes() -> None:
    assert mixture.proportions([5, 9], [0.3, 0.7]) == (3, 7)
    assert mixture.proportions([5, 9], [2.0, 0.5]) == (4, 1)
    assert mixture.proportions([5, 9], [None, None]) == (5, 9)


@pytest.mark.parametrize("shares", [(3, 7), (1, 1, 1), (97, 2, 1), (5,), (1, 10, 100), (3, 3, 2, 2)])
@pytest.mark.parametrize("block", [1, 7, 10])
def test_updates_have_the_whole_part_of_each_share_and_in_the_long_run_all(shares: tuple[int, ...], block: int) -> None:
    total, earlier = sum(shares), (0,) * len(shares)
    for update in range(1, 2 * total + 1):
        places = mixture.before(update, block, shares)
        assert sum(places) == update * block
        for share, now, then in zip(shares, places, earlier, strict=True):
            assert now - then >= block * share // total
            assert abs(now - Fraction(update * block * share, total)) < 2
            assert update % total or now == update * block * share // total
        earlier = places


def test_every_balanced_update_has_the_sources_in_their_shares() -> None:
    order = mixture.order({"a": A, "b": B}, {"a": 0.25, "b": 0.75}, seed=3, block=8, balanced=True)
    for update in range(20):
        assert Counter(place_names(order, 8 * update, 8 * update + 8)) == {"a": 2, "b": 6}
    assert place_names(order, 0, 8) != sorted(place_names(order, 0, 8))  # in no order of theirs
    uneven = mixture.order({"a": A, "b": B}, {"a": 0.1, "b": 0.9}, seed=3, block=4, balanced=True)
    counts = [Counter(place_names(uneven, 4 * u, 4 * u + 4))["a"] for u in range(10)]
    assert set(counts) == {0, 1} and sum(counts) == 4
    sizes = mixture.order({"a": A, "b": B}, {}, seed=3, block=8, balanced=True)
    assert Counter(place_names(sizes, 0, 8)) == {"a": 6, "b": 2}


def test_an_epoch_of_the_mixture_has_the_sources_in_their_shares() -> None:
    order = mixture.order({"a": A, "b": B}, {"a": 1.0, "b": 3.0}, seed=3, block=8, balanced=False)
    for epoch in range(3):
        assert Counter(place_names(order, 40 * epoch, 40 * epoch + 40)) == {"a": 10, "b": 30}
    assert [order[i] for i in range(40)] != [order[i] for i in range(40, 80)]


@pytest.mark.parametrize("balanced", [False, True])
def test_each_problem_has_its_turn_before_any_has_its_next(balanced: bool) -> None:
    order = mixture.order({"a": A, "b": B}, {"a": 1.0, "b": 3.0}, seed=3, block=8, balanced=balanced)
    seen = Counter()
    for i in range(240):  # a: two rounds of 30, b: 18 of 10
        seen[int(order[i])] += 1
    assert {seen[i] for i in range(30)} == {2}
    assert {seen[i] for i in range(30, 40)} == {18}
    other = mixture.order({"a": A, "b": B}, {"a": 1.0, "b": 3.0}, seed=4, block=8, balanced=balanced)
    assert [order[i] for i in range(40)] != [other[i] for i in range(40)]


def test_without_weights_all_problems_are_one_set() -> None:
    one = mixture.order({"a": A, "b": B}, {}, seed=3, block=8, balanced=False)
    same = mixture.order({"all": np.arange(40)}, {"all": 1.0}, seed=3, block=8, balanced=True)
    assert sorted(one[i] for i in range(40)) == list(range(40))
    assert [one[i] for i in range(80)] == [same[i] for i in range(80)]

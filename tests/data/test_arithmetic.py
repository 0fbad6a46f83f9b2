"""The problems themselves: right answers, and splits that share no pair of operands."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jaxrl_sat.data import arithmetic


def pairs(space: arithmetic.Space) -> set[tuple[int, int]]:
    return {(min(a, b), max(a, b)) for a, b in zip(space.a.tolist(), space.b.tolist(), strict=True)}


def test_no_pair_of_operands_is_in_both_splits_over_the_whole_space():
    train, test = arithmetic.split_space("train"), arithmetic.split_space("test")
    assert not pairs(train) & pairs(test)
    assert len(train) + len(test) == len(arithmetic.space())
    assert 0.11 < len(test) / len(arithmetic.space()) < 0.14


def test_every_level_has_problems_in_both_splits():
    for split in arithmetic.SPLITS:
        space = arithmetic.split_space(split)
        assert {int(level) for level in space.level} == set(arithmetic.LEVELS)


def test_no_problem_stands_twice_and_answers_are_right():
    space = arithmetic.space()
    rows = np.random.default_rng(0).choice(len(space), 2000, replace=False)
    for row in rows:
        problem = space[int(row)]
        left, operator, right = re.fullmatch(r"(\d+)([-+*])(\d+)", problem.prompt).groups()  # pyright: ignore
        expected = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator](int(left), int(right))
        assert problem.answer == str(expected)
    codes = (space.a * 1000 + space.b) * 3 + space.operator
    assert len(np.unique(codes)) == len(space)


@pytest.mark.parametrize(
    ("a", "b", "level"), [(0, 19, 1), (20, 9, 2), (3, 99, 2), (20, 10, 3), (99, 99, 3), (100, 10, 5), (99, 999, 5)]
)
def test_levels_are_told_by_the_operands(a, b, level):
    space = arithmetic.space()
    found = space.level[(space.a == a) & (space.b == b) & (space.operator < 2)]
    assert found.tolist() == [level, level]


def test_products_are_level_four():
    space = arithmetic.space()
    products = space.take(space.operator == 2)
    assert set(products.level.tolist()) == {4}
    assert int(np.minimum(products.a, products.b).max()) == 9


def test_held_out_ignores_the_order_of_operands_and_never_changes():
    a, b = np.meshgrid(np.arange(100), np.arange(100))
    a, b = a.ravel(), b.ravel()
    assert np.array_equal(arithmetic.held_out(a, b), arithmetic.held_out(b, a))
    # Recorded once from a scalar splitmix64 in plain Python integers.
    known = [(0, 0), (3, 14), (7, 36), (47, 8), (61, 78), (305, 48)]
    assert arithmetic.held_out(*np.array(known).T).tolist() == [splitmix64(x, y) >> 61 < 1 for x, y in known]


def splitmix64(a: int, b: int) -> int:
    """The finaliser in arbitrary-precision integers."""
    full = (1 << 64) - 1
    x = ((min(a, b) << 32 | max(a, b)) + 0x9E3779B97F4A7C15) & full
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & full
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & full
    return x ^ (x >> 31)


def test_a_set_is_decided_by_its_seed():
    once, again = (list(arithmetic.problems("test", 500, 3)) for _ in range(2))
    assert once == again
    assert once != list(arithmetic.problems("test", 500, 4))
    assert len({problem.prompt for problem in once}) == len(once)


def test_a_set_keeps_the_shares_of_the_levels():
    levels = [problem.level for problem in arithmetic.problems("test", 1000, 0)]
    assert [levels.count(level) for level in arithmetic.LEVELS] == [round(1000 * share) for share in arithmetic.MIX]


def test_a_level_that_is_too_small_gives_all_it_has():
    everything = arithmetic.split_space("test")
    found = [problem for problem in arithmetic.problems("test", 100_000, 0) if problem.level == 1]
    assert len(found) == int((everything.level == 1).sum())

"""Rules of a kind, each held against numbers: intervals and their brackets, absolute values, determinants, words."""

from __future__ import annotations

import time

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sat.rewards.equivalence import equivalent
from jaxrl_sat.rewards.extract import final_answer
from jaxrl_sat.rewards.normalise import tidy
from jaxrl_sat.rewards.read import read
from jaxrl_sat.rewards.values import Value

SMALL = st.integers(-9, 9)
CLOSED = st.booleans()


@settings(max_examples=60, deadline=None)
@given(SMALL, st.integers(1, 9), CLOSED, CLOSED, CLOSED, CLOSED)
def test_brackets_turned_outward_are_round_ones(
    low: int, length: int, left: bool, right: bool, other_left: bool, other_right: bool
) -> None:
    outward = f"{'[' if left else ']'}{low}, {low + length}{']' if right else '['}"
    plain = f"{'[' if other_left else '('}{low}, {low + length}{']' if other_right else ')'}"
    same = (left, right) == (other_left, other_right)
    assert equivalent(outward, plain) == same
    rest = f"{low + 20}, {low + 30}"
    assert equivalent(f"{outward}\\cup]{rest}[", f"({rest})\\cup{plain}") == same


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), SMALL, st.integers(1, 9), CLOSED, st.integers(-1, 1))
def test_absolute_values_of_lines_are_intervals(slope: int, shift: int, radius: int, closed: bool, off: int) -> None:
    low, high = (f"\\frac{{{end}}}{{{slope}}}" for end in (-radius - shift, radius - shift + off))
    inside = f"|{slope}x+{shift}|" if shift >= 0 else f"|{slope}x-{-shift}|"
    (left, right), (below, beyond) = ("[]", ("\\le", "<")) if closed else ("()", ("<", "\\le"))
    assert equivalent(f"{inside}{below} {radius}", f"{left}{low},{high}{right}") == (off == 0)
    outer = f"(-\\infty,{low})\\cup({high},\\infty)" if closed else f"(-\\infty,{low}]\\cup[{high},\\infty)"
    assert equivalent(f"{radius}{beyond} {inside}", outer) == (off == 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(SMALL, min_size=n, max_size=n), min_size=n, max_size=n)))
def test_determinants(rows: list[list[int]]) -> None:
    body = "\\\\".join("&".join(map(str, row)) for row in rows)
    wanted = sympy.Matrix(rows).det()
    for text in (
        f"\\begin{{vmatrix}}{body}\\end{{vmatrix}}",
        f"\\det\\begin{{pmatrix}}{body}\\end{{pmatrix}}",
        f"\\left|\\begin{{matrix}}{body}\\end{{matrix}}\\right|",
    ):
        found = read(tidy(text))
        assert isinstance(found, Value) and found.expr == wanted


UNCHANGED = ["12 apples", "exactly 12", "12 in total", "12 square meters", "12 times", "$12$ left over", "about 12"]
CHANGED = """12 squared|12 factorial|half of 12|twice 12|over 12|up to 12|12 plus x|12 to the power of n
a multiple of 12|divisible by 12|12 sixths|base 12|the square root of 12|probably 12|unlikely to be 12
any number except 12|nearly 12|negative 12|minus 12|12 and a half|12 over x|wrong if 12""".replace("\n", "|").split("|")


@pytest.mark.parametrize("words", UNCHANGED)
def test_words_that_leave_a_number_as_it_is(words: str) -> None:
    assert equivalent(final_answer(f"So the answer is {words}.") or "", "12")


@pytest.mark.parametrize("words", CHANGED)
def test_words_that_make_another_number_of_one(words: str) -> None:
    assert not equivalent(final_answer(f"So the answer is {words}.") or "", "12")


@pytest.mark.parametrize(
    "text",
    "not 12|n't 12|between 11 and 12|11 to 12|11 or 12|maybe 12|at least 12|f(12|11 x 12|11 - 12".split("|"),
)
def test_a_last_number_that_is_denied_or_part_of_a_formula_is_none(text: str) -> None:
    assert final_answer(f"It is{text}" if text.startswith("n't") else f"It is {text}") is None
    assert final_answer(f"It is {text} = 7") == "7"


@pytest.mark.parametrize(
    "piece",
    [r"\over ", r"\begin{cases}", "maybe ", "5 or ", ", about ", "half of ", "</s> ", "$x$ and ", "^ ", "between 5 "],
)
def test_cost_is_linear_in_length(piece: str) -> None:
    """Each took seconds or minutes where it was quadratic."""
    text = piece * (19_000 // len(piece))
    began = time.process_time()
    final_answer(f"The answer is {text}")
    final_answer(f"{text} 5")
    tidy(text)
    tidy(f"^{' ' * 19_000}x")
    assert time.process_time() - began < 3

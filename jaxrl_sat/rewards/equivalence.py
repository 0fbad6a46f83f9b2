"""Is what was found the answer? By what the two texts mean; no rule knows which of them is the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import sympy

from jaxrl_sat.rewards import numeric
from jaxrl_sat.rewards.lexer import Unreadable
from jaxrl_sat.rewards.normalise import as_text, tidy
from jaxrl_sat.rewards.read import read
from jaxrl_sat.rewards.reals import reals, same_reals
from jaxrl_sat.rewards.values import (
    Answer,
    Choice,
    Equation,
    Group,
    Inequality,
    Matrix,
    Ratio,
    Reals,
    Value,
    Words,
)

DECIMALS = 6
"""Digits behind the point that a rounded or cut decimal of a fraction must have."""
MOST_ITEMS = 60


def equivalent(found: str, answer: str) -> bool:
    """Whether two answers mean the same. Unbounded but for the caps of reading: see `pool`."""
    found, answer = tidy(found), tidy(answer)
    by_text = as_text(found, answer)
    if by_text is not None:
        return by_text
    try:
        return same(read(found), read(answer))
    except Unreadable:
        return False


def readable(answer: str) -> bool:
    """Whether an answer is read as more than its text."""
    try:
        read(tidy(answer))
    except Unreadable:
        return False
    return True


def same(found: Answer, answer: Answer) -> bool:
    """Whether two answers that were read mean the same."""
    if isinstance(found, Choice) or isinstance(answer, Choice):
        return _same_choice(found, answer)
    if isinstance(found, Equation) or isinstance(answer, Equation):
        return _same_equation(found, answer)
    if isinstance(found, Words) or isinstance(answer, Words):
        return _same_words(found, answer)
    if isinstance(found, Value) and isinstance(answer, Value):
        return _same_value(found, answer)
    if isinstance(found, Matrix) and isinstance(answer, Matrix):
        return _same_matrix(found, answer)
    if isinstance(found, Ratio) and isinstance(answer, Ratio):
        units = found.unit is None or answer.unit is None or found.unit == answer.unit
        return units and found.parts == answer.parts
    if isinstance(found, Inequality) and isinstance(answer, Inequality):
        return _same_inequality(found, answer)
    if isinstance(found, Reals) or isinstance(answer, Reals):
        one, other = reals(found), reals(answer)
        return one is not None and other is not None and same_reals(one, other)
    if isinstance(found, Group) and isinstance(answer, Group):
        return _same_group(found, answer)
    return False


def _same_value(found: Value, answer: Value) -> bool:
    if found.unit and answer.unit and found.unit != answer.unit:
        return False
    if found.percent == answer.percent:
        return _same_number(found, answer)
    # 28% is taken for 28 as well as for 0.28, but only where the other side has no sign of its own.
    share, plain = (found, answer) if found.percent else (answer, found)
    return any(_same_number(Value(share.expr * scale), plain) for scale in (1, sympy.Rational(1, 100)))


def _same_number(found: Value, answer: Value) -> bool:
    infinite = (sympy.oo, -sympy.oo)
    if found.expr in infinite or answer.expr in infinite:
        return found.expr == answer.expr
    return numeric.same(found.expr, answer.expr) or _rounded(found, answer) or _rounded(answer, found)


def _rounded(decimal: Value, exact: Value) -> bool:
    """Whether `decimal` is a fraction without finite decimals, rounded or cut after enough of them."""
    if decimal.decimals is None or decimal.decimals < DECIMALS or not isinstance(exact.expr, sympy.Rational):
        return False
    if exact.decimals is not None or _finite(int(exact.expr.q)):
        return False
    return bool(abs(decimal.expr - exact.expr) < sympy.Rational(1, 10**decimal.decimals))


def _finite(denominator: int) -> bool:
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _same_equation(found: Answer, answer: Answer) -> bool:
    """Equations up to a factor; one whose left side is a name is also the value on its right."""
    if isinstance(found, Equation) and isinstance(answer, Equation):
        if found.name is not None and found.name == answer.name and same(found.right, answer.right):
            return True
        one, other = _difference(found), _difference(answer)
        return one is not None and other is not None and numeric.proportional(one, other)
    equation, other = (found, answer) if isinstance(found, Equation) else (answer, found)
    assert isinstance(equation, Equation)
    return equation.name is not None and same(equation.right, other)


def _difference(equation: Equation) -> sympy.Expr | None:
    if equation.left is None or not isinstance(equation.right, Value):
        return None
    if equation.right.expr in (sympy.oo, -sympy.oo):
        return None
    return equation.left - equation.right.expr


def _same_inequality(found: Inequality, answer: Inequality) -> bool:
    if len(found.differences) != len(answer.differences):
        return False
    return all(
        closed == also_closed and numeric.proportional(one, other, positive=True)
        for (one, closed), (other, also_closed) in zip(found.differences, answer.differences, strict=True)
    )


def _same_matrix(found: Matrix, answer: Matrix) -> bool:
    if [len(row) for row in found.rows] != [len(row) for row in answer.rows]:
        return False
    pairs = zip(sum(found.rows, ()), sum(answer.rows, ()), strict=True)
    return all(numeric.same(one, other) for one, other in pairs)


def _same_words(found: Answer, answer: Answer) -> bool:
    if isinstance(found, Words) and isinstance(answer, Words):
        return _plain(found.text) == _plain(answer.text) != ""
    words, other = (found, answer) if isinstance(found, Words) else (answer, found)
    assert isinstance(words, Words)
    return words.product is not None and isinstance(other, Value) and numeric.same(words.product, other.expr)


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.lower()).strip().removeprefix("the ")


def _same_choice(found: Answer, answer: Answer) -> bool:
    label, other = _label(found), _label(answer)
    if label and other:
        return label == other
    if isinstance(found, Choice) and found.meaning is not None and not isinstance(answer, Choice):
        return same(found.meaning, answer)
    return isinstance(answer, Choice) and answer.meaning is not None and same(found, answer.meaning)


def _label(answer: Answer) -> str | None:
    if isinstance(answer, Choice):
        return answer.label
    single = isinstance(answer, Value) and isinstance(answer.expr, sympy.Symbol) and answer.expr.name
    return single if single and single in "ABCDEFGHIJ" else None


def _same_group(found: Group, answer: Group) -> bool:
    if len(found.items) != len(answer.items) or len(found.items) > MOST_ITEMS:
        return False
    unordered = ("", "{}")
    if found.brackets in unordered and answer.brackets in unordered:
        return _matched(list(found.items), list(answer.items))
    # A list beside a point or vector keeps its order: x = 1, y = 2 is (1, 2).
    kinds = {found.brackets, answer.brackets}
    if len(kinds) != 1 and not (kinds == {"", "()"} and _in_order(found) and _in_order(answer)):
        return False
    return all(same(one, other) for one, other in zip(found.items, answer.items, strict=True))


def _in_order(group: Group) -> bool:
    """Whether the names that its values are given to come in alphabetical order, if there are any."""
    names = [item.name or "" for item in group.items if isinstance(item, Equation)]
    return names == sorted(names)


def _matched(found: list[Answer], answers: Sequence[Answer]) -> bool:
    """Whether each answer is found once."""
    for answer in answers:
        place = next((i for i, item in enumerate(found) if same(item, answer)), None)
        if place is None:
            return False
        found.pop(place)
    return not found

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
from jaxrl_sat.rewards.units import ratio
from jaxrl_sat.rewards.values import (
    Answer,
    Choice,
    Equation,
    Group,
    Inequality,
    Matrix,
    Ratio,
    Reals,
    Residue,
    Value,
    Words,
)

DECIMALS = 6
"""Digits behind the point that a rounded or cut decimal of a fraction must have."""
MOST_ITEMS = 60
_STATED = re.compile(
    r"(?:\\(?:lim|sum|prod|int)(?![a-zA-Z])(?:[^={}]|\{(?:[^{}]|\{[^{}]*\})*\})*+=(?=[^=]+$)"
    r"|(?=[\\|\[a-zA-Z])(?=[^=]*[a-zA-Z])(?:\\?[a-zA-Z]++|_\{?\w++\}?|\([\w,]*+\)|\^\{-1\}|[-+/|\[\]{}'()*_ ])++"
    r"=(?!\(?[-+]?0\)?$))(.+)",
    re.ASCII,
)
"""A name for what is sought, of letters without numbers that multiply them, and what it is found to be."""


def equivalent(found: str, answer: str) -> bool:
    """Whether two answers mean the same. Unbounded but for the caps of reading: see `pool`."""
    found, answer = tidy(found), tidy(answer)
    by_text = as_text(found, answer)
    if by_text is not None:
        return by_text
    try:
        return _agree(found, answer)
    except Unreadable:
        stated = _STATED.fullmatch(found)
        return stated is not None and "=" not in answer and equivalent(stated[1], answer)


def _agree(found: str, answer: str) -> bool:
    one, other = read(found), read(answer)
    if same(_only(one, other), _only(other, one)):
        return True
    if isinstance(one, Group) != isinstance(other, Group):  # 60,120 is a number, unless it stands for 60 and 120
        return same(read(found, grouped=False), read(answer, grouped=False))
    # What m + n or f(3) is found to be; the answer itself never loses its left side.
    stated = _STATED.fullmatch(found) if isinstance(one, Equation) and not isinstance(other, Equation) else None
    return stated is not None and "=" not in answer and same(read(stated[1]), other)


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
    if isinstance(found, Residue) or isinstance(answer, Residue):
        return _same_residue(found, answer)
    if isinstance(found, Equation) or isinstance(answer, Equation):
        return _same_equation(found, answer)
    if isinstance(found, Words) or isinstance(answer, Words):
        return _same_words(found, answer)
    if isinstance(found, Value) and isinstance(answer, Value):
        return _same_value(found, answer)
    if isinstance(found, Matrix) or isinstance(answer, Matrix):
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
    units = {found.unit, answer.unit}
    if None not in units and len(units) > 1 and not ("degree" in units and units & {"celsius", "fahrenheit"}):
        assert found.unit and answer.unit
        size = ratio(found.unit, answer.unit)
        return size is not None and _same_value(Value(found.expr * sympy.Rational(size), None, found.scale), answer)
    if found.scale == answer.scale:
        return _same_number(found, answer)
    # 28% is taken for 28 as well as for 0.28, but only where the other side has no sign of its own.
    scaled, plain = (found, answer) if answer.scale == 1 else (answer, found)
    if plain.scale != 1:
        return numeric.same(found.expr * found.scale, answer.expr * answer.scale)
    return any(_same_number(Value(scaled.expr * scale), plain) for scale in (1, scaled.scale))


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


def _only(answer: Answer, beside: Answer) -> Answer:
    """The one element of a set beside what is no set."""
    if isinstance(answer, Group) and answer.brackets == "{}" and len(answer.items) == 1:
        return answer if isinstance(beside, (Group, Reals)) else answer.items[0]
    return answer


def _same_residue(found: Answer, answer: Answer) -> bool:
    one, other = (side.answer if isinstance(side, Residue) else side for side in (found, answer))
    if same(one, other):
        return not (isinstance(found, Residue) and isinstance(answer, Residue)) or found.modulus == answer.modulus
    if not (isinstance(found, Residue) and isinstance(answer, Residue) and found.modulus == answer.modulus != 0):
        return False
    one, other = (side.right if isinstance(side, Equation) else side for side in (one, other))
    whole = [side.expr for side in (one, other) if isinstance(side, Value) and isinstance(side.expr, sympy.Integer)]
    return len(whole) == 2 and int(whole[0] - whole[1]) % found.modulus == 0


def _rows(answer: Answer) -> Matrix | None:
    """A matrix, also one written [[1, 2], [3, 4]]."""
    if isinstance(answer, Matrix):
        return answer
    if not isinstance(answer, Group) or answer.brackets != "[]":
        return None
    rows = [
        tuple(item.expr for item in row.items if isinstance(item, Value)) if isinstance(row, Group) else ()
        for row in answer.items
    ]
    return Matrix(tuple(rows)) if all(rows) else None


def _same_matrix(found: Answer, answer: Answer) -> bool:
    """Entry by entry; a column is also the point or vector of its entries."""
    for column, group in ((found, answer), (answer, found)):
        if isinstance(column, Matrix) and isinstance(group, Group) and group.brackets == "()":
            entries = tuple(Value(row[0]) for row in column.rows)
            return all(len(row) == 1 for row in column.rows) and _same_group(Group(entries, "()"), group)
    one, other = _rows(found), _rows(answer)
    if one is None or other is None or [len(row) for row in one.rows] != [len(row) for row in other.rows]:
        return False
    pairs = zip(sum(one.rows, ()), sum(other.rows, ()), strict=True)
    return all(numeric.same(left, right) for left, right in pairs)


def _same_words(found: Answer, answer: Answer) -> bool:
    if isinstance(found, Words) and isinstance(answer, Words):
        return _plain(found.text) == _plain(answer.text) != ""
    words, other = (found, answer) if isinstance(found, Words) else (answer, found)
    assert isinstance(words, Words)
    return words.product is not None and isinstance(other, Value) and numeric.same(words.product, other.expr)


def _plain(text: str) -> str:
    return re.sub(r"^(?:the|an?) ", "", re.sub(r"[\W_]+", " ", text.lower()).strip())


def _same_choice(found: Answer, answer: Answer) -> bool:
    label, other = _label(found), _label(answer)
    if label and other:
        meanings = [side.meaning for side in (found, answer) if isinstance(side, Choice)]
        stated = [meaning for meaning in meanings if isinstance(meaning, Value)]
        return label == other and (len(stated) < 2 or same(stated[0], stated[1]))
    if isinstance(found, Choice) and found.meaning is not None and not isinstance(answer, Choice):
        return same(found.meaning, answer)
    return isinstance(answer, Choice) and answer.meaning is not None and same(found, answer.meaning)


def _label(answer: Answer) -> str | None:
    if isinstance(answer, Choice):
        return answer.label
    single = isinstance(answer, Value) and isinstance(answer.expr, sympy.Symbol) and answer.expr.name
    return single if single and single in "ABCDEFGHIJ" else None


def _same_group(found: Group, answer: Group) -> bool:
    if max(len(found.items), len(answer.items)) > MOST_ITEMS:
        return False
    if found.brackets == answer.brackets == "{}":  # of a set it does not matter how often
        return all(
            any(same(one, other) for other in others)
            for ones, others in ((found.items, answer.items), (answer.items, found.items))
            for one in ones
        )
    if len(found.items) != len(answer.items):
        return False
    if _unordered(found) and _unordered(answer):
        return _matched(list(found.items), list(answer.items))
    # A list beside a point or vector keeps its order: x = 1, y = 2 is (1, 2).
    kinds = {found.brackets, answer.brackets}
    if len(kinds) != 1 and not (kinds == {"", "()"} and _in_order(found) and _in_order(answer)):
        return False
    return all(same(one, other) for one, other in zip(found.items, answer.items, strict=True))


def _unordered(group: Group) -> bool:
    """Lists and sets; of more than two things in square brackets, which are no interval, too."""
    return group.brackets in ("", "{}") or (group.brackets == "[]" and len(group.items) != 2)


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

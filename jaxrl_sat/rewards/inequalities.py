"""What relations with <, > and so on say: reals where one variable stands beside numbers, else signs of differences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import sympy

from jaxrl_sat.rewards import arithmetic, numeric, reals
from jaxrl_sat.rewards.arithmetic import finite
from jaxrl_sat.rewards.lexer import Unreadable
from jaxrl_sat.rewards.values import Answer, Group, Inequality, Piece

_TURNED = {"<": "<", "le": "le", ">": "<", "ge": "le"}
MOST_BARS = 3
"""Absolute values in one side; each doubles the work."""
_ZERO = numeric.MANY.mpf(10) ** -100


def inequality(sides: Sequence[sympy.Expr], operators: Sequence[str]) -> Answer:
    """Sides with relations between them. Raises `Unreadable` for several directions in one."""
    if list(operators) == ["ne"] and isinstance(sides[0], sympy.Symbol) and not sides[1].free_symbols:
        return reals.all_but(str(sides[0]), sides[1])
    if any(operator not in _TURNED for operator in operators):
        raise Unreadable("mixed relations")
    if len({operator in ("<", "le") for operator in operators}) != 1:
        raise Unreadable("mixed directions")
    if operators[0] in (">", "ge"):
        sides, operators = sides[::-1], operators[::-1]
    closed = [_TURNED[operator] == "le" for operator in operators]
    found = reals.between(sides, closed) or _with_bars(sides, closed)
    if found is not None:
        return found
    pairs = zip(sides, sides[1:], closed, strict=False)
    return Inequality(tuple((finite(high) - finite(low), equal) for low, high, equal in pairs))


def _with_bars(sides: Sequence[sympy.Expr], closed: Sequence[bool]) -> Answer | None:
    """|x - 2| < 3 and the like solved for their one variable; None for anything else."""
    names = {name for side in sides for name in side.free_symbols}
    if len(names) != 1 or not any(side.has(sympy.Abs) for side in sides):
        return None
    name = names.pop()
    found: Answer | None = None
    for low, high, equal in zip(sides, sides[1:], closed, strict=False):
        solved = _positive(finite(high) - finite(low), sympy.Symbol(str(name)), equal)
        if solved is None:
            return None
        found = solved if found is None else reals.meet(found, solved)
    return found


def _positive(difference: sympy.Expr, name: sympy.Symbol, closed: bool) -> Answer | None:
    """Where a sum of absolute values of linear terms is above zero, or zero too if `closed`; None for another sum."""
    bars = sorted(difference.atoms(sympy.Abs), key=str)
    if len(bars) > MOST_BARS:
        return None
    zeros: list[tuple[numeric.Number, sympy.Expr]] = []
    for signs in itertools.product((1, -1), repeat=len(bars)):
        line = _line(difference, name, dict(zip(bars, signs, strict=True)))
        if line is None:
            return None
        if line[0] != 0:
            zero = arithmetic.divide(-line[1], line[0])
            zeros.append((_real(zero), zero))
    zeros.sort(key=lambda entry: entry[0])
    points = [zero for i, (at, zero) in enumerate(zeros) if i == 0 or at - zeros[i - 1][0] > _ZERO]
    pieces = [Piece(point, point, True, True) for point in points if _holds(difference, name, point, closed)]
    for low, high in itertools.pairwise([-sympy.oo, *points, sympy.oo]):
        if _holds(difference, name, _inside(low, high), closed):
            pieces.append(Piece(low, high, False, False))
    return reals.ordered(pieces, str(name)) if pieces else Group((), "{}")


def _line(expr: sympy.Basic, name: sympy.Symbol, signs: dict) -> tuple[sympy.Expr, sympy.Expr] | None:
    """a and b of a x + b, with a sign for every absolute value; None where it is no such thing."""
    if isinstance(expr, sympy.Expr) and name not in expr.free_symbols:
        return sympy.Integer(0), expr
    if expr == name:
        return sympy.Integer(1), sympy.Integer(0)
    if isinstance(expr, sympy.Abs):
        line = _line(expr.args[0], name, signs)
        return None if line is None else (signs[expr] * line[0], signs[expr] * line[1])
    lines = [_line(part, name, signs) for part in expr.args]
    if isinstance(expr, sympy.Add):
        known = [line for line in lines if line is not None]
        return _sum(known) if len(known) == len(lines) else None
    if isinstance(expr, sympy.Mul):
        rest, factor = expr.as_independent(name, as_Add=False)
        line = None if factor == expr else _line(factor, name, signs)
        return None if line is None else (arithmetic.multiply(rest, line[0]), arithmetic.multiply(rest, line[1]))
    return None


def _sum(lines: Sequence[tuple[sympy.Expr, sympy.Expr]]) -> tuple[sympy.Expr, sympy.Expr]:
    total = sympy.Integer(0), sympy.Integer(0)
    for line in lines:
        total = arithmetic.add(total[0], line[0]), arithmetic.add(total[1], line[1])
    return total


def _real(expr: sympy.Expr) -> numeric.Number:
    try:
        return numeric.real(expr)
    except numeric.Undefined as error:
        raise Unreadable("end of an interval") from error


def _inside(low: sympy.Expr, high: sympy.Expr) -> sympy.Rational:
    """A fraction between two ends."""
    if low == -sympy.oo and high == sympy.oo:
        return sympy.Integer(0)
    if low == -sympy.oo or high == sympy.oo:
        end, step = (high, -1) if low == -sympy.oo else (low, 1)
        return sympy.Integer(int(_real(end)) + 2 * step)
    middle = (_real(low) + _real(high)) / 2
    return arithmetic.fraction(int(middle * 2**400), 2**400)


def _holds(difference: sympy.Expr, name: sympy.Symbol, point: sympy.Expr, closed: bool) -> bool:
    try:
        at = numeric.value(difference, {str(name): point}, numeric.MANY, True)
    except numeric.Undefined as error:
        raise Unreadable("no value") from error
    return bool(at > _ZERO) or (closed and bool(abs(at) <= _ZERO))

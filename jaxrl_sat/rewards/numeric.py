"""Are two formulas equal? By their values at fixed points to 150 digits, in a time that their size bounds.

Nothing is simplified. Two formulas that differ also differ at some of the points, short of a coincidence of a hundred
digits. In the reals a point where either is undefined or complex says nothing; a formula with i is taken over C.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import mpmath
import sympy
from mpmath.libmp import NoConvergence

from jaxrl_sat.rewards.arithmetic import fraction

FEW, MANY = mpmath.MPContext(), mpmath.MPContext()
FEW.dps, MANY.dps = 60, 150

LARGEST = 20_000
"""Bits of the magnitude of any value on the way."""
_ENOUGH, _LEAST = 5, 3

Number = Any  # mpf or mpc of either context


class Undefined(Exception):
    """No value there, or one beyond the limits."""


_FUNCTIONS: Mapping[str, str] = {
    name: name for name in "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh exp log floor".split()
} | {"ceiling": "ceil", "Abs": "fabs", "factorial": "factorial", "binomial": "binomial"}
_CONSTANTS: Mapping[sympy.Basic, Callable[[Any], Number]] = {
    sympy.pi: lambda mp: +mp.pi,
    sympy.E: lambda mp: +mp.e,
    sympy.I: lambda mp: mp.mpc(0, 1),
}


def value(expr: sympy.Basic, point: Mapping[str, sympy.Expr], mp: Any, over_reals: bool) -> Number:
    """Value of a formula at a point, in the precision of `mp`. Raises `Undefined`."""
    if isinstance(expr, sympy.Rational):
        return mp.mpf(int(expr.p)) / int(expr.q)
    if isinstance(expr, sympy.Symbol):
        return value(point[expr.name], point, mp, over_reals)
    if expr in _CONSTANTS:
        return _CONSTANTS[expr](mp)
    arguments = [value(argument, point, mp, over_reals) for argument in expr.args]
    try:
        found = _apply(expr, arguments, mp)
    except (ValueError, ZeroDivisionError, OverflowError, TypeError, NoConvergence) as error:
        raise Undefined(str(error)) from error
    if not mp.isfinite(found) or (found != 0 and abs(mp.mag(found)) > LARGEST):
        raise Undefined(str(expr.func))
    if over_reals and isinstance(found, mp.mpc):
        raise Undefined("complex")
    return found


def _apply(expr: sympy.Basic, arguments: list[Number], mp: Any) -> Number:
    if isinstance(expr, sympy.Add):
        return mp.fsum(arguments)
    if isinstance(expr, sympy.Mul):
        return mp.fprod(arguments)
    if isinstance(expr, sympy.Pow):
        base, exponent = arguments
        if base != 0 and abs(mp.mag(base)) * max(1, abs(exponent)) > LARGEST:
            raise Undefined("power")
        if not isinstance(base, mp.mpc) and base < 0 and (root := _odd_root(expr.exp)):
            return -mp.power(-base, exponent) if root.p % 2 else mp.power(-base, exponent)
        return mp.power(base, exponent)
    name = type(expr).__name__
    if name not in _FUNCTIONS:
        raise Undefined(name)
    limit = LARGEST // 2 if name in ("exp", "sinh", "cosh") else 1_000 if name in ("factorial", "binomial") else None
    if limit is not None and any(abs(argument) > limit for argument in arguments):
        raise Undefined(name)
    return getattr(mp, _FUNCTIONS[name])(*arguments)


def _odd_root(exponent: sympy.Basic) -> sympy.Rational | None:
    """p/q with q odd: the real root of a negative number exists."""
    odd = isinstance(exponent, sympy.Rational) and exponent.q > 1 and exponent.q % 2
    return exponent if odd and isinstance(exponent, sympy.Rational) else None


def same(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether two formulas have the same value, wherever both have one."""
    if left == right:
        return True
    if isinstance(left, sympy.Rational) and isinstance(right, sympy.Rational):
        return False
    return _agree(left, right, lambda a, b, point: _equal_at(a, b, point))


def close(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether two constants differ by less than a twentieth, as a number and one said to be about it do."""
    if left.free_symbols or right.free_symbols:
        return False
    try:
        one, other = value(left, {}, FEW, True), value(right, {}, FEW, True)
    except Undefined:
        return False
    return bool(abs(one - other) <= max(abs(one), abs(other)) / 20)


def proportional(left: sympy.Expr, right: sympy.Expr, positive: bool = False) -> bool:
    """Whether left = c right with a constant c, not zero; above zero if `positive`."""
    if left == 0 or right == 0:
        return False
    found: list[Number] = []

    def steady(a: sympy.Expr, b: sympy.Expr, point: Mapping[str, sympy.Rational]) -> bool:
        real = not (a.has(sympy.I) or b.has(sympy.I))
        denominator = value(b, point, MANY, real)
        if denominator == 0:
            raise Undefined("zero")
        found.append(value(a, point, MANY, real) / denominator)
        first, last = found[0], found[-1]
        if positive and not (isinstance(last, MANY.mpf) and last > 0):
            return False
        return last != 0 and abs(last - first) <= abs(first) * MANY.mpf(10) ** -50

    return _agree(left, right, steady)


def _agree(
    left: sympy.Expr,
    right: sympy.Expr,
    equal_at: Callable[[sympy.Expr, sympy.Expr, Mapping[str, sympy.Rational]], bool],
) -> bool:
    names = sorted(map(str, left.free_symbols | right.free_symbols))
    if not names:
        try:
            return equal_at(left, right, {})
        except Undefined:
            return False
    for points in (_between(names), _whole(names)):
        agreed = 0
        for point in points:
            try:
                if not equal_at(left, right, point):
                    return False
            except Undefined:
                continue
            agreed += 1
            if agreed >= _ENOUGH:
                return True
        if agreed >= _LEAST:
            return True
    return False


def _between(names: list[str]) -> list[dict[str, sympy.Rational]]:
    """Points that are no whole numbers: of either sign, then positive, then below one."""
    rng = random.Random(7)
    ranges = [(-3000, 3000)] * 6 + [(100, 4000)] * 4 + [(50, 950)] * 4
    return [{name: fraction(2 * rng.randint(*bounds) + 1, 1999) for name in names} for bounds in ranges]


def _whole(names: list[str]) -> list[dict[str, sympy.Rational]]:
    rng = random.Random(11)
    return [{name: sympy.Integer(rng.randint(1, 12)) for name in names} for _ in range(10)]


def _equal_at(left: sympy.Expr, right: sympy.Expr, point: Mapping[str, sympy.Rational]) -> bool:
    """Equal to 100 digits; or a difference that shrinks with the precision, as that of two zeros does."""
    real = not (left.has(sympy.I) or right.has(sympy.I))
    one, other = value(left, point, MANY, real), value(right, point, MANY, real)
    difference, scale = abs(one - other), max(abs(one), abs(other))
    if difference <= scale * MANY.mpf(10) ** -100:
        return True
    rough = abs(value(left, point, FEW, real) - value(right, point, FEW, real))
    return difference <= MANY.mpf(rough or FEW.mpf(10) ** -40) * MANY.mpf(10) ** -60


def real(expr: sympy.Expr) -> Number:
    """A constant as a number that sorts, infinities included. Raises `Undefined` for anything else."""
    if expr in (sympy.oo, -sympy.oo):
        return MANY.inf if expr == sympy.oo else -MANY.inf
    if expr.free_symbols:
        raise Undefined("a variable")
    return value(expr, {}, MANY, True)

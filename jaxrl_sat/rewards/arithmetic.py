"""SymPy objects built one operation at a time, none of which can grow: what would is refused or left as it stands."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from jaxrl_sat.rewards.lexer import Unreadable

BITS = 20_000
"""Bits of a number that a power or a product may have."""
LARGEST_FACTORIAL = 1_000

FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "cot": sympy.cot,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "arccot": sympy.acot,
    "arcsec": sympy.asec,
    "arccsc": sympy.acsc,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "tanh": sympy.tanh,
    "exp": sympy.exp,
    "ln": sympy.log,
    "lg": sympy.log,
    "log": sympy.log,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "abs": sympy.Abs,
    "cis": lambda angle, evaluate: sympy.cos(angle, evaluate=evaluate) + sympy.I * sympy.sin(angle, evaluate=evaluate),
}
INVERSE = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}


def fraction(above: int, below: int) -> sympy.Rational:
    """above / below, exactly. Raises `Unreadable` where `below` is zero."""
    if below == 0:
        raise Unreadable("division by zero")
    value = sympy.Rational(above, below)
    assert isinstance(value, sympy.Rational)
    return value


def call(name: str, argument: sympy.Expr) -> sympy.Expr:
    """A function of the list, not evaluated."""
    return FUNCTIONS[name](finite(argument), evaluate=False)


def finite(expr: sympy.Expr) -> sympy.Expr:
    """`expr`. Raises `Unreadable` where it is infinite or no number."""
    if expr in (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        raise Unreadable("infinite")
    return expr


def add(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """left + right."""
    return finite(finite(left) + finite(right))


def multiply(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """left * right. Raises `Unreadable` for a number of too many bits."""
    if bits(left) + bits(right) > BITS:
        raise Unreadable("digits")
    return finite(finite(left) * finite(right))


def divide(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """left / right. Raises `Unreadable` at zero."""
    if finite(right).is_zero:
        raise Unreadable("division by zero")
    return multiply(left, power(right, sympy.Integer(-1)))


def power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """base ** exponent: worked out for a whole power of a fraction, left as it stands otherwise."""
    base, exponent = finite(base), finite(exponent)
    if isinstance(exponent, sympy.Rational) and abs(exponent.p) > BITS:
        raise Unreadable("exponent")
    if not (isinstance(exponent, sympy.Integer) and isinstance(base, sympy.Rational)):
        return sympy.Pow(base, exponent, evaluate=False)
    if base == 0 and exponent <= 0:
        raise Unreadable("power of zero")
    if abs(base) != 1 and bits(base) * abs(int(exponent)) > BITS:
        raise Unreadable("exponent")
    return base**exponent


def factorial(value: sympy.Expr) -> sympy.Expr:
    """value!, worked out for a small whole number."""
    if not value.is_number:
        return sympy.factorial(value, evaluate=False)
    if not isinstance(value, sympy.Integer) or not 0 <= value <= LARGEST_FACTORIAL:
        raise Unreadable("factorial")
    return sympy.factorial(value)


def binomial(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr:
    """above choose below, worked out for small whole numbers."""
    if not (above.is_number and below.is_number):
        return sympy.binomial(above, below, evaluate=False)
    whole = isinstance(above, sympy.Integer) and isinstance(below, sympy.Integer)
    if not whole or not 0 <= below <= above <= LARGEST_FACTORIAL:
        raise Unreadable("binomial")
    return sympy.binomial(above, below)


def bits(expr: sympy.Expr) -> int:
    """Bits of numerator and denominator of a fraction, 0 for anything else."""
    return int(expr.p).bit_length() + int(expr.q).bit_length() if isinstance(expr, sympy.Rational) else 0

"""What an answer can be once it is read."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import sympy


@dataclasses.dataclass(frozen=True)
class Value:
    """A number or formula. `decimals`: digits behind the point of a plain decimal; `unit`: None where none is known.

    `scale`: what a percent sign or the word million behind it multiplies it by.
    """

    expr: sympy.Expr
    decimals: int | None = None
    scale: sympy.Rational = sympy.Integer(1)
    unit: str | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Several answers; `brackets` are "()", "[)" and so on, "{}" of a set, "" of a list."""

    items: tuple[Answer, ...]
    brackets: str


@dataclasses.dataclass(frozen=True)
class Piece:
    """The reals from `low` to `high`, infinite ones included."""

    low: sympy.Expr
    high: sympy.Expr
    low_closed: bool
    high_closed: bool


@dataclasses.dataclass(frozen=True)
class Reals:
    """Pieces in order; `name` is the variable that they are the values of, where one was given."""

    pieces: tuple[Piece, ...]
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows of equal length."""

    rows: tuple[tuple[sympy.Expr, ...], ...]


@dataclasses.dataclass(frozen=True)
class Equation:
    """left = right; `name` where the left side is no more than a name (x, f(x), AB), and then right is its value."""

    left: sympy.Expr | None
    right: Answer
    name: str | None


@dataclasses.dataclass(frozen=True)
class Inequality:
    """Every difference is above zero, or zero too where its flag says so."""

    differences: tuple[tuple[sympy.Expr, bool], ...]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """a : b : c, also a time of day."""

    parts: tuple[sympy.Expr, ...]
    unit: str | None = None


@dataclasses.dataclass(frozen=True)
class Residue:
    """What it is modulo a whole number."""

    answer: Answer
    modulus: int


@dataclasses.dataclass(frozen=True)
class Words:
    """Text; `product` is what it says where its letters are variables."""

    text: str
    product: sympy.Expr | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """A letter of a multiple choice with what it stands for."""

    label: str
    meaning: Answer | None


Answer: TypeAlias = Value | Group | Reals | Matrix | Equation | Inequality | Ratio | Residue | Words | Choice

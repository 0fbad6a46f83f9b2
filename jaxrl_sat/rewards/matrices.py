"""Rules of matrices: transposed, scaled, added, and their determinants."""

from __future__ import annotations

import sympy

from jaxrl_sat.rewards import arithmetic
from jaxrl_sat.rewards.lexer import Unreadable
from jaxrl_sat.rewards.values import Matrix

LARGEST_DETERMINANT = 4
"""Rows of a matrix whose determinant is worked out."""


def scaled(matrix: Matrix, factor: sympy.Expr) -> Matrix:
    """Every entry times a factor."""
    return Matrix(tuple(tuple(arithmetic.multiply(factor, entry) for entry in row) for row in matrix.rows))


def transposed(matrix: Matrix) -> Matrix:
    """Rows as columns."""
    return Matrix(tuple(zip(*matrix.rows, strict=True)))


def added(left: Matrix, right: Matrix) -> Matrix:
    """Entry by entry. Raises `Unreadable` where the sizes differ."""
    if [len(row) for row in left.rows] != [len(row) for row in right.rows]:
        raise Unreadable("sizes of matrices")
    rows = zip(left.rows, right.rows, strict=True)
    return Matrix(tuple(tuple(map(arithmetic.add, one, other)) for one, other in rows))


def determinant(matrix: Matrix) -> sympy.Expr:
    """By its first row. Raises `Unreadable` for a matrix that is not square, or is large."""
    size = len(matrix.rows)
    if size != len(matrix.rows[0]) or size > LARGEST_DETERMINANT:
        raise Unreadable("determinant")
    if size == 1:
        return matrix.rows[0][0]
    total: sympy.Expr = sympy.Integer(0)
    for i, entry in enumerate(matrix.rows[0]):
        rest = Matrix(tuple(row[:i] + row[i + 1 :] for row in matrix.rows[1:]))
        total = arithmetic.add(total, arithmetic.multiply((-1) ** i * entry, determinant(rest)))
    return total

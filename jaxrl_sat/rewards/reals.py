"""Sets of reals: intervals, their unions, and what inequalities of one variable with numbers say."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from jaxrl_sat.rewards import numeric
from jaxrl_sat.rewards.lexer import Unreadable
from jaxrl_sat.rewards.values import Answer, Group, Piece, Reals, Value

_LINE = Piece(-sympy.oo, sympy.oo, False, False)
_INTERVALS = ("()", "[)", "(]", "[]")


def reals(answer: Answer) -> Reals | None:
    """An answer as a set of reals, None for one that is none: a pair in brackets, a set of numbers, an interval."""
    if isinstance(answer, Reals):
        return answer
    if not isinstance(answer, Group) or not all(isinstance(item, Value) for item in answer.items):
        return None
    ends = [item.expr for item in answer.items if isinstance(item, Value)]
    if any(end.free_symbols for end in ends):
        return None
    if answer.brackets == "{}":
        return _ordered([Piece(end, end, True, True) for end in ends])
    if answer.brackets not in _INTERVALS or len(ends) != 2:
        return None
    low_closed, high_closed = answer.brackets[0] == "[", answer.brackets[1] == "]"
    return _ordered([Piece(ends[0], ends[1], low_closed, high_closed)])


def join(left: Answer, right: Answer) -> Answer:
    """left and right together. Raises `Unreadable` unless both are sets of reals, or sets of anything."""
    if isinstance(left, Group) and isinstance(right, Group) and left.brackets == right.brackets == "{}":
        return Group(left.items + right.items, "{}")
    one, other = reals(left), reals(right)
    if one is None or other is None:
        raise Unreadable("union")
    return _ordered([*one.pieces, *other.pieces])


def without(left: Answer, right: Answer) -> Answer:
    """All reals but some numbers. Raises `Unreadable` for anything else."""
    points = reals(right)
    if not isinstance(left, Reals) or left.pieces != (_LINE,) or points is None:
        raise Unreadable("difference")
    ends = [piece.low for piece in points.pieces]
    if any(piece.low != piece.high for piece in points.pieces):
        raise Unreadable("difference")
    bounds = [-sympy.oo, *ends, sympy.oo]
    return Reals(tuple(Piece(low, high, False, False) for low, high in zip(bounds, bounds[1:], strict=False)))


def union(parts: Sequence[Reals]) -> Reals:
    """What several inequalities of one variable allow together. Raises `Unreadable` for several variables."""
    names = {part.name for part in parts}
    if len(names) != 1:
        raise Unreadable("several variables")
    return _ordered([piece for part in parts for piece in part.pieces], names.pop())


def all_but(name: str, point: sympy.Expr) -> Reals:
    """name != point."""
    return Reals((Piece(-sympy.oo, point, False, False), Piece(point, sympy.oo, False, False)), name)


def field(text: str) -> Reals:
    """The real numbers. Raises `Unreadable` for other number fields."""
    if text != "field R":
        raise Unreadable(text)
    return Reals((_LINE,))


def between(sides: Sequence[sympy.Expr], closed: Sequence[bool]) -> Reals | None:
    """What low < x < high, x < high or low < x allow of x; None where the sides are not a variable and numbers."""
    variables = [i for i, side in enumerate(sides) if side.free_symbols]
    if len(variables) != 1 or len(sides) > 3 or not isinstance(sides[variables[0]], sympy.Symbol):
        return None
    place = variables[0]
    if len(sides) == 3 and place != 1:
        return None
    low, low_closed = (sides[place - 1], closed[place - 1]) if place else (-sympy.oo, False)
    high, high_closed = (sides[place + 1], closed[place]) if place + 1 < len(sides) else (sympy.oo, False)
    closed_low, closed_high = low_closed and low != -sympy.oo, high_closed and high != sympy.oo
    return _ordered([Piece(low, high, closed_low, closed_high)], str(sides[place]))


def _ordered(pieces: Sequence[Piece], name: str | None = None) -> Reals:
    """Pieces by their lower ends. Raises `Unreadable` where an end is no real number."""
    try:
        keyed = [(numeric.real(piece.low), numeric.real(piece.high), piece) for piece in pieces]
    except numeric.Undefined as error:
        raise Unreadable("end of an interval") from error
    if any(low > high for low, high, _ in keyed):
        raise Unreadable("empty interval")
    return Reals(tuple(piece for _, _, piece in sorted(keyed, key=lambda entry: entry[:2])), name)


def same_reals(left: Reals, right: Reals) -> bool:
    """Whether two sets of reals have the same pieces, of variables of the same name where both have one."""
    if left.name and right.name and left.name != right.name:
        return False
    if len(left.pieces) != len(right.pieces):
        return False
    return all(
        (one.low_closed, one.high_closed) == (other.low_closed, other.high_closed)
        and _same_end(one.low, other.low)
        and _same_end(one.high, other.high)
        for one, other in zip(left.pieces, right.pieces, strict=True)
    )


def _same_end(left: sympy.Expr, right: sympy.Expr) -> bool:
    infinite = (sympy.oo, -sympy.oo)
    return left == right if left in infinite or right in infinite else numeric.same(left, right)

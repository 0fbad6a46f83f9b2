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
    """An answer as a set of reals, None for none: an interval or several of them, a set of numbers."""
    if isinstance(answer, Reals):
        return answer
    if isinstance(answer, Group) and not answer.brackets:
        parts = [reals(item) for item in answer.items if isinstance(item, (Group, Reals))]
        pieces = [piece for part in parts if part is not None for piece in part.pieces]
        return ordered(pieces) if len(answer.items) == len(parts) > 1 and None not in parts else None
    if not isinstance(answer, Group) or not all(isinstance(item, Value) for item in answer.items):
        return None
    ends = [item.expr for item in answer.items if isinstance(item, Value)]
    if any(end.free_symbols for end in ends):
        return None
    if answer.brackets == "{}":
        return ordered([Piece(end, end, True, True) for end in ends])
    if answer.brackets not in _INTERVALS or len(ends) != 2:
        return None
    low_closed, high_closed = answer.brackets[0] == "[", answer.brackets[1] == "]"
    return ordered([Piece(ends[0], ends[1], low_closed, high_closed)])


def join(left: Answer, right: Answer) -> Answer:
    """left and right together. Raises `Unreadable` unless both are sets of reals, or sets of anything."""
    if isinstance(left, Group) and isinstance(right, Group) and left.brackets == right.brackets == "{}":
        return Group(left.items + right.items, "{}")
    one, other = reals(left), reals(right)
    if one is None or other is None:
        raise Unreadable("union")
    return ordered([*one.pieces, *other.pieces])


def meet(left: Answer, right: Answer) -> Answer:
    """What left and right have in common. Raises `Unreadable` unless both are sets of reals."""
    one, other = reals(left), reals(right)
    if one is None or other is None:
        raise Unreadable("intersection")
    return _common(one, other) or Group((), "{}")


def without(left: Answer, right: Answer) -> Answer:
    """What is in left and not in right. Raises `Unreadable` unless both are sets of reals."""
    points = reals(right)
    if points is None:
        raise Unreadable("difference")
    bounds = [(-sympy.oo, True), *((end, closed) for piece in points.pieces for end, closed in _ends(piece))]
    bounds.append((sympy.oo, True))
    rest = [
        Piece(low, high, not low_closed, not high_closed)
        for (low, low_closed), (high, high_closed) in zip(bounds[::2], bounds[1::2], strict=True)
        if low != high
    ]
    return meet(left, Reals(tuple(rest)))


def _ends(piece: Piece) -> list[tuple[sympy.Expr, bool]]:
    return [(piece.low, piece.low_closed), (piece.high, piece.high_closed)]


def _common(left: Reals, right: Reals) -> Reals | None:
    """Pieces of both, None where there are none."""
    found = []
    for one in left.pieces:
        for other in right.pieces:
            low, low_closed = max(_ends(one)[0], _ends(other)[0], key=lambda end: (numeric.real(end[0]), not end[1]))
            high, high_closed = min(_ends(one)[1], _ends(other)[1], key=lambda end: (numeric.real(end[0]), end[1]))
            span = numeric.real(high) - numeric.real(low)
            if span > 0 or (low == high and low_closed and high_closed):
                found.append(Piece(low, high, low_closed, high_closed))
    return ordered(found, left.name) if found else None


def together(parts: Sequence[Reals], either: bool) -> Reals:
    """What inequalities of one variable allow: `either` of them, else all of them if anything meets them all.

    Raises `Unreadable` for several variables.
    """
    names = {part.name for part in parts}
    if len(names) != 1:
        raise Unreadable("several variables")
    name = names.pop()
    common: Reals | None = parts[0]
    for part in parts[1:]:
        common = None if common is None else _common(common, part)
    if common is not None and not either:
        return common
    return ordered([piece for part in parts for piece in part.pieces], name)


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
    sides, closed = _isolated(sides, closed)
    variables = [i for i, side in enumerate(sides) if side.free_symbols]
    if len(variables) != 1 or len(sides) > 3 or not isinstance(sides[variables[0]], sympy.Symbol):
        return None
    place = variables[0]
    if len(sides) == 3 and place != 1:
        return None
    low, low_closed = (sides[place - 1], closed[place - 1]) if place else (-sympy.oo, False)
    high, high_closed = (sides[place + 1], closed[place]) if place + 1 < len(sides) else (sympy.oo, False)
    closed_low, closed_high = low_closed and low != -sympy.oo, high_closed and high != sympy.oo
    return ordered([Piece(low, high, closed_low, closed_high)], str(sides[place]))


def _isolated(sides: Sequence[sympy.Expr], closed: Sequence[bool]) -> tuple[Sequence[sympy.Expr], Sequence[bool]]:
    """a x + b < c solved for x where that is all there is, else as it stands."""
    names = {name for side in sides for name in side.free_symbols}
    if len(sides) != 2 or len(names) != 1 or any(isinstance(side, sympy.Symbol) for side in sides):
        return sides, closed
    name = sympy.Symbol(str(names.pop()))
    rest, term = (sides[1] - sides[0]).as_independent(name, as_Add=True)
    factor, power = term.as_independent(name, as_Add=False)
    if power != name or not isinstance(factor, sympy.Rational):
        return sides, closed
    bound = -rest / factor
    return ([bound, name] if factor > 0 else [name, bound]), closed


def ordered(pieces: Sequence[Piece], name: str | None = None) -> Reals:
    """Pieces by their lower ends. Raises `Unreadable` where an end is no real number."""
    try:
        keyed = [(numeric.real(piece.low), numeric.real(piece.high), piece) for piece in pieces]
    except numeric.Undefined as error:
        raise Unreadable("end of an interval") from error
    if any(low > high for low, high, _ in keyed):
        raise Unreadable("empty interval")
    merged: list[tuple[numeric.Number, Piece]] = []
    for low, high, piece in sorted(keyed, key=lambda entry: (*entry[:2], not entry[2].low_closed)):
        if merged and _overlap(merged[-1], low, piece):
            far, last = merged[-1]
            if high < far or (high == far and last.high_closed):
                far_end, closed = last.high, last.high_closed
            else:
                far_end, closed = piece.high, piece.high_closed
            low_closed = last.low_closed or (low == numeric.real(last.low) and piece.low_closed)
            merged[-1] = (max(far, high), Piece(last.low, far_end, low_closed, closed))
        else:
            merged.append((high, piece))
    return Reals(tuple(piece for _, piece in merged), name)


def _overlap(before: tuple[numeric.Number, Piece], low: numeric.Number, piece: Piece) -> bool:
    """Whether a piece begins inside the one before it, or where that ends with the point between them in one."""
    far, last = before
    return low < far or (low == far and (last.high_closed or piece.low_closed))


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

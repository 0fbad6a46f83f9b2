"""Tidy text of an answer to what it means: values, lists, sets, intervals, matrices, equations, inequalities, words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import sympy

from jaxrl_sat.rewards import numeric, reals
from jaxrl_sat.rewards.arithmetic import finite
from jaxrl_sat.rewards.formula import Formulas
from jaxrl_sat.rewards.lexer import FUNCTIONS, Token, Unreadable, tokens
from jaxrl_sat.rewards.normalise import LONGEST
from jaxrl_sat.rewards.units import unit
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

_LETTERS = re.compile(r"[a-zA-Z]{2,}(?:[ '-]+[a-zA-Z]{2,})*\.?")
_CHOICE = re.compile(
    r"(?:\\text(?:bf|rm|it)?\{\s*)?(?:\(([A-J])\)|([A-J])[.):])\}?[\s.:]*(.*?)\}?|"
    r"\\text(?:bf|rm|it)?\{\s*([A-J])\s*\}[\s.:]+(.+)",
    re.DOTALL,
)
_FUNCTION_NAME = re.compile(r"[a-zA-Z](?:'|\^\{-1\})?\([a-z](?:,[a-z])*\)")
_DECIMAL = re.compile(r"[-+]?\d*\.(\d+)", re.ASCII)
_OPENS = {"(": (")", "]"), "[": (")", "]"), "{": ("}",), "\\{": ("\\}",), "langle": ("rangle",)}
_BRACKETS = (("(", "[", "{", "\\{", "langle"), (")", "]", "}", "\\}", "rangle"))
_RELATIONS = ("=", "<", ">", "le", "ge", "ne", "in")
_TURNED = {"<": "<", "le": "le", ">": "<", "ge": "le"}


def read(text: str) -> Answer:
    """What a tidy answer says. Raises `Unreadable`."""
    if len(text) > LONGEST:
        raise Unreadable("length")
    if choice := _CHOICE.fullmatch(text):
        label, rest = choice[1] or choice[2] or choice[4], choice[3] or choice[5]
        if rest and not re.search(r"\([A-J]\)", rest):
            return Choice(label, _readable(rest))
    if _LETTERS.fullmatch(text) and text not in FUNCTIONS and text not in ("pi", "infty", "infinity"):
        return _letters(text)
    found = tokens(text)
    if found and all(token.kind == "word" for token in found):
        return Words(" ".join(token.text for token in found))
    if not any(token.kind in ("pm", "mp") for token in found):
        return _Reader(list(found), 1).answer()
    signs = [_Reader(list(found), sign).answer() for sign in (1, -1)]
    items = [item for one in signs for item in (one.items if isinstance(one, Group) and not one.brackets else (one,))]
    return Group(tuple(items), "")


def _readable(text: str) -> Answer | None:
    try:
        return read(text)
    except Unreadable:
        return None


def _letters(text: str) -> Answer:
    """Letters alone are words; up to three small ones may also be variables side by side."""
    if re.search(r"\b(?:or|and)\b", text):
        raise Unreadable("several words")
    if len(text) > 3 or not text.islower():
        return Words(text)
    return Words(text, Formulas([Token("name", letter) for letter in text], 1).sum())


class _Reader(Formulas):
    """The rules above a formula: lists, brackets with several things in them, relations, units."""

    def __init__(self, found: list[Token], sign: int):
        super().__init__(found, sign)
        self._conditions = 0

    def answer(self) -> Answer:
        """All of the text."""
        items = [self.relation()]
        while self.accept(",", ";"):
            while self.accept(",", ";"):
                pass
            items.append(self.relation())
        if self.next.kind != "end":
            raise Unreadable(self.next.text)
        if len(items) == 1:
            return items[0]
        if all(isinstance(item, Reals) and item.name for item in items):
            return reals.union([item for item in items if isinstance(item, Reals)])
        return Group(tuple(items), "")

    def relation(self) -> Answer:
        """One side, or sides with =, <, and so on between them."""
        sides, operators = [self._named_side()], []
        while operator := self.accept(*_RELATIONS):
            operators.append(operator)
            sides.append(self.side())
        if not operators:
            return sides[0]
        if operators == ["in"]:
            name = _name_of(sides[0])
            if name is None:
                raise Unreadable("in")
            return dataclasses.replace(sides[1], name=name) if isinstance(sides[1], Reals) else sides[1]
        if set(operators) == {"="}:
            return _equation(sides)
        return _inequality([_expr(side) for side in sides], operators)

    def _named_side(self) -> Answer:
        """A side, or as words one that is a mere name and stands before =: f(x), words."""
        ahead = [self.after(i) for i in range(8)]
        for length, token in enumerate(ahead):
            if token.kind == "=":
                text = "".join(token.text for token in ahead[:length])
                if ahead[0].kind == "word" or _FUNCTION_NAME.fullmatch(text):
                    self.place += length
                    return Words(text)
                break
        return self.side()

    def side(self) -> Answer:
        """A value, a group of brackets, a matrix, sets joined, words."""
        found = self._joined()
        while operator := self.accept("cup", "setminus"):
            join: Callable[[Answer, Answer], Answer] = reals.join if operator == "cup" else reals.without
            found = join(found, self._joined())
        return found

    def _joined(self) -> Answer:
        token = self.next
        if token.kind == "word":
            return Words(self._tail())
        if token.kind == "matrix":
            return self._matrix()
        if token.text == "emptyset":
            self.take()
            return Group((), "{}")
        if token.kind.startswith("field"):
            return reals.field(self.take().text)
        if token.text == "\\{" or self._several():
            with self.deeper():
                return self._group()
        return self._value()

    def _several(self) -> bool:
        """Whether the next is a bracket with a comma in it, and not inside a further one."""
        depth = 0
        for token in self.tokens[self.place :]:
            if token.kind not in ("word", "name"):
                depth += (token.text in _BRACKETS[0]) - (token.text in _BRACKETS[1])
            if depth <= 0:
                return False
            if depth == 1 and token.kind in (",", ";"):
                return True
        return False

    def _group(self) -> Answer:
        """Several things in brackets, or a set."""
        opening = self.take().text
        self._bars = self._conditions = int(opening == "\\{")
        items = [] if self.next.text in _OPENS[opening] else [self.relation()]
        self._bars = self._conditions = 0
        if items and opening == "\\{" and self.accept("|", ":"):
            condition = self.relation()
            self.expect("\\}")
            return condition
        while items and self.accept(",", ";"):
            items.append(self.relation())
        closing = self.accept(*_OPENS[opening])
        if closing is None:
            raise Unreadable("bracket")
        brackets = {"{": "{}", "\\{": "{}", "langle": "()"}.get(opening, opening + closing)
        return Group(tuple(items), brackets)

    def _matrix(self) -> Answer:
        self.take()
        rows: list[tuple[sympy.Expr, ...]] = []
        while True:
            row = [finite(self.sum())]
            while self.accept("&"):
                row.append(finite(self.sum()))
            rows.append(tuple(row))
            ended = self.accept("\\\\") is None
            if ended or self.next.kind == "matrix":
                break
        if self.take() != Token("matrix", "end") or len({len(row) for row in rows}) != 1:
            raise Unreadable("matrix")
        return Matrix(tuple(rows))

    def _value(self) -> Answer:
        begin = self.place
        expr = self.sum()
        spelled = "".join(token.text for token in self.tokens[begin : self.place])
        if self.next.kind == ":" and not self._conditions:
            parts = [expr]
            while self.accept(":"):
                parts.append(self.sum())
            return Ratio(tuple(parts), unit(self._tail()))
        percent = self.accept("%") is not None
        degree = self.tokens[self.place - 1].text == "degree"
        decimals = _DECIMAL.fullmatch(spelled)
        named = unit(self._tail()) if not degree else self._degree()
        return Value(expr, len(decimals[1]) if decimals else None, percent, named)

    def _degree(self) -> str:
        if self.next.kind == "name" and self.next.text in ("C", "F"):
            self.take()
        return "degree" if self._tail() in ("", "C", "F") else "other"

    def _tail(self) -> str:
        """Words behind a value, with the powers of units."""
        text = ""
        while self.next.kind == "word" or (text and self.next.text in ("^", "/", ".", "-", "(", ")", "'")):
            text += (" " if self.next.kind == "word" and text[-1:].isalnum() else "") + self.take().text
            if text.endswith("^"):
                text += self._token_argument()
        return text


def _name_of(side: Answer) -> str | None:
    """The name that a side is no more than, None for any other side."""
    if isinstance(side, Words):
        return side.text
    if isinstance(side, Value) and not side.percent:
        factors = sympy.Mul.make_args(side.expr)
        if all(isinstance(factor, sympy.Symbol) for factor in factors):
            return "".join(sorted(map(str, factors)))
    return None


def _expr(side: Answer) -> sympy.Expr:
    if not isinstance(side, Value):
        raise Unreadable("side of a relation")
    return side.expr / 100 if side.percent else side.expr


def _equation(sides: list[Answer]) -> Answer:
    """a = b, or a chain whose members must all have the value of the last; of numbers, that value."""
    name = _name_of(sides[0])
    values = sides[1:] if name is not None else sides
    last = values[-1]
    if len(values) > 1 and not (name is None and len(values) == 2 and _expr_of_variables(values)):
        if not all(numeric.same(_expr(value), _expr(last)) for value in values[:-1]):
            raise Unreadable("unequal")
        return Equation(None, last, name) if name is not None else last
    left = sides[0].expr if isinstance(sides[0], Value) else None
    return Equation(left, last, name)


def _expr_of_variables(values: list[Answer]) -> bool:
    return any(_expr(value).free_symbols for value in values)


def _inequality(sides: list[sympy.Expr], operators: list[str]) -> Answer:
    """Values of one variable between numbers as reals, anything else as differences above zero."""
    if operators == ["ne"] and isinstance(sides[0], sympy.Symbol) and not sides[1].free_symbols:
        return reals.all_but(str(sides[0]), sides[1])
    if any(operator not in _TURNED for operator in operators):
        raise Unreadable("mixed relations")
    if len({operator in ("<", "le") for operator in operators}) != 1:
        raise Unreadable("mixed directions")
    if operators[0] in (">", "ge"):
        sides, operators = sides[::-1], operators[::-1]
    closed = [_TURNED[operator] == "le" for operator in operators]
    found = reals.between(sides, closed)
    if found is not None:
        return found
    pairs = zip(sides, sides[1:], closed, strict=False)
    return Inequality(tuple((finite(high) - finite(low), equal) for low, high, equal in pairs))

"""Tidy text of an answer to what it means: values, lists, sets, intervals, matrices, equations, inequalities, words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import sympy

from jaxrl_sat.rewards import arithmetic, numeric, reals
from jaxrl_sat.rewards.formula import Formulas
from jaxrl_sat.rewards.inequalities import inequality
from jaxrl_sat.rewards.lexer import FUNCTIONS, Token, Unreadable, tokens
from jaxrl_sat.rewards.matrices import added, scaled
from jaxrl_sat.rewards.normalise import LONGEST
from jaxrl_sat.rewards.units import SCALES, ratio, unit
from jaxrl_sat.rewards.values import (
    Answer,
    Choice,
    Equation,
    Group,
    Matrix,
    Ratio,
    Reals,
    Residue,
    Value,
    Words,
)
from jaxrl_sat.rewards.wording import open_tail

_LETTERS = re.compile(r"[a-zA-Z]{2,}(?:[ '-]+[a-zA-Z]{2,})*\.?")
_CHOICE = re.compile(
    r"(?:\\text(?:bf|rm|it)?\{\s*)?(?:\(([A-J])\)|([A-J])[.):])\}?[\s.:]*(.*?)\}?|"
    r"\\text(?:bf|rm|it)?\{\s*([A-J])\s*\}[\s.:]+(.+)",
    re.DOTALL,
)
_RESIDUE = re.compile(
    r"(.+?)\(?(?:\\[pb]?mod(?![a-zA-Z])|\\text\{ ?\(?mod ?\}|(?<![a-zA-Z])mod(?![a-zA-Z])) ?\{?([1-9]\d{0,11})\}?\)?"
)
_NAMED_BASE = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASE = re.compile(
    rf"(-?)(?:\\text\{{|\\mathrm\{{|\\overline\{{)?\(?((?=[A-Z]*[0-9])[0-9A-Z]{{1,400}}+)\)?\}}?"
    rf"(?:_(?:\{{|\\text\{{|\{{\\(?:text|mathrm)\{{|\{{\()?(?:base ?)?|(?:\\text)?[({{ ]*base ?)\}}?"
    rf"(\d{{1,2}}|{'|'.join(_NAMED_BASE)})[)}}]*"
)
_HEXADECIMAL = re.compile(r"\(?(?:\\text\{|\\mathrm\{)?([A-F]{2,400})\}?\)?_\{16\}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_FUNCTION_NAME = re.compile(r"[a-zA-Z](?:'|\^\{-1\})?\([a-z](?:,[a-z])*\)")
_DECIMAL = re.compile(r"[-+]?\d*\.(\d+)", re.ASCII)
_OPENS = {"(": (")", "]"), "[": (")", "]"), "{": ("}",), "\\{": ("\\}",), "langle": ("rangle",)}
_BRACKETS = (("(", "[", "{", "\\{", "langle"), (")", "]", "}", "\\}", "rangle"))
_RELATIONS = ("=", "<", ">", "le", "ge", "ne", "in", "approx")
_SEPARATORS = (",", ";", "and")
_JOINS: Mapping[str, Callable[[Answer, Answer], Answer]] = {
    "cup": reals.join,
    "cap": reals.meet,
    "setminus": reals.without,
}


def read(text: str, grouped: bool = True) -> Answer:
    """What a tidy answer says; 1,234 is one number if `grouped`. Raises `Unreadable`."""
    if len(text) > LONGEST:
        raise Unreadable("length")
    if "\\$" in text:
        found = read(text.replace("\\$", ""), grouped)
        return dataclasses.replace(found, unit=found.unit or "dollar") if isinstance(found, Value) else found
    if _DATE.fullmatch(text):
        return Words(text)
    if hexadecimal := _HEXADECIMAL.fullmatch(text):
        return Value(sympy.Integer(int(hexadecimal[1], 16)))
    if base := _BASE.fullmatch(text):
        return Value(_in_base(*base.groups()))
    if residue := _RESIDUE.fullmatch(text):
        return Residue(read(residue[1], grouped), int(residue[2]))
    if choice := _CHOICE.fullmatch(text):
        label, rest = choice[1] or choice[2] or choice[4], choice[3] or choice[5]
        if rest and not re.search(r"\([A-J]\)", rest):
            return Choice(label, _readable(rest))
    if _LETTERS.fullmatch(text) and text not in FUNCTIONS and text not in ("pi", "inf", "infty", "infinity"):
        return _letters(text)
    found = tokens(text, grouped)
    if found and all(token.kind == "word" for token in found):
        return Words(" ".join(token.text for token in found))
    if not any(token.kind in ("pm", "mp") for token in found):
        return _Reader(list(found), 1).answer()
    plus, minus = (_Reader(list(found), sign).answer() for sign in (1, -1))
    if isinstance(plus, Reals) and any(token.kind == "ne" for token in found):
        return reals.meet(plus, minus)
    brackets = plus.brackets if isinstance(plus, Group) else ""
    if brackets not in ("", "{}"):
        return Group((plus, minus), "")
    pairs = zip(*(one.items if isinstance(one, Group) else (one,) for one in (plus, minus)), strict=True)
    return Group(tuple(item for pair in pairs for item in dict.fromkeys(pair)), brackets)


def _in_base(sign: str, digits: str, base: str) -> sympy.Integer:
    """A whole number written in a base of 2 to 36."""
    radix = _NAMED_BASE.get(base) or int(base)
    if not 2 <= radix <= 36 or any(int(digit, 36) >= radix for digit in digits):
        raise Unreadable("base")
    return sympy.Integer(int(sign + digits, radix))


def _readable(text: str) -> Answer | None:
    try:
        return read(text)
    except Unreadable:
        return None


def _letters(text: str) -> Answer:
    """Letters alone are words; up to three small ones may also be variables side by side."""
    if re.search(r"\b(?:or|and)\b", text):
        raise Unreadable("several words")
    if not text.islower() or any(len(part) > 3 for part in re.split("[ -]", text)) or re.search("[ '.]", text):
        return Words(text)
    found = [Token("-" if letter == "-" else "name", letter) for letter in text]
    return Words(text, Formulas(found, 1).sum())


class _Reader(Formulas):
    """The rules above a formula: lists, brackets with several things in them, relations, units."""

    def __init__(self, found: list[Token], sign: int):
        super().__init__(found, sign)
        self._conditions = 0

    def answer(self) -> Answer:
        """All of the text."""
        items, separators = [self.relation()], []
        while separator := self.accept(*_SEPARATORS):
            while further := self.accept(*_SEPARATORS):
                separator = further
            separators.append(separator)
            items.append(self.relation())
        if self.next.kind != "end":
            raise Unreadable(self.next.text)
        if len(items) == 1:
            return items[0]
        if excluded := self._excluded(items):
            return excluded
        if separators == ["and"] and (compound := _compound(*items)):
            return compound
        if all(isinstance(item, Reals) and item.name for item in items):
            return reals.together([item for item in items if isinstance(item, Reals)], set(separators) == {";"})
        return Group(tuple(items), "")

    def _excluded(self, items: list[Answer]) -> Answer | None:
        """x != 1, 2: neither of them."""
        found, points = items[0], [item.expr for item in items[1:] if isinstance(item, Value)]
        excludes = [token.kind for token in self.tokens].count("ne") == 1
        if not excludes or not isinstance(found, Reals) or not found.name or len(points) != len(items) - 1:
            return None
        both: Answer = found
        for point in points:
            both = reals.meet(both, reals.all_but(found.name, point))
        return both

    def relation(self) -> Answer:
        """One side, or sides with =, <, and so on between them."""
        sides, operators = [self._named_side()], []
        while operator := self.accept(*_RELATIONS):
            operators.append(operator)
            sides.append(self.side())
        if "approx" in operators:
            place = operators.index("approx")
            if not all(numeric.close(_expr(sides[place]), _expr(side)) for side in sides[place + 1 :]):
                if place or _name_of(sides[0]) is None:
                    raise Unreadable("approximation")
                operators[0], place = "=", 1
            sides, operators = sides[: place + 1], operators[:place]
        if not operators:
            return sides[0]
        if operators == ["in"]:
            name = _name_of(sides[0])
            if name is None:
                raise Unreadable("in")
            return dataclasses.replace(sides[1], name=name) if isinstance(sides[1], Reals) else sides[1]
        if set(operators) == {"="}:
            return _equation(sides)
        return inequality([_expr(side) for side in sides], operators)

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
        if name := self._applied():
            return Value(sympy.Symbol(name))
        found = self._joined()
        while True:
            if operator := self.accept(*_JOINS):
                found = _JOINS[operator](found, self._joined())
            elif isinstance(found, Reals) and self.next.kind == "-" and self.after(1).text == "\\{":
                self.take()
                found = reals.without(found, self._joined())
            elif isinstance(found, Matrix) and self.next.kind in ("+", "-"):
                sign = sympy.Integer(-1 if self.take().kind == "-" else 1)
                other = self._joined()
                if not isinstance(other, Matrix):
                    raise Unreadable("matrix expected")
                found = added(found, scaled(other, sign))
            else:
                return found

    def _applied(self) -> str | None:
        """f(x) beside a relation, taken as one name."""
        ahead = [self.after(i) for i in range(5)]
        text = "".join(token.text for token in ahead[:4])
        ends = ahead[4].kind == "end" or ahead[4].kind in _RELATIONS
        if not (ends and re.fullmatch(r"[fgh]\([a-z]\)", text) and any(t.kind in _RELATIONS for t in self.tokens)):
            return None
        self.place += 4
        return text

    def _joined(self) -> Answer:
        token = self.next
        if token.kind == "word":
            return Words(self._tail())
        if token.kind in ("+", "-") and self.after(1).kind == "matrix":
            self.take()
            return scaled(self.matrix(), sympy.Integer(-1 if token.kind == "-" else 1))
        if token.kind == "matrix":
            return self.matrix()
        if token.kind in ("(", "[") and self.after(1).kind == "matrix":
            self.take()
            found = self.matrix()
            self.expect({"(": ")", "[": "]"}[token.kind])
            return found
        if token.kind == "name" and token.text.isupper() and self.after(1).kind == "(":
            self.take()  # the name of a point
            if self._several():
                return self._group()
            self.place -= 1
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
            if depth == 1 and token.kind in _SEPARATORS:
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
        while items and self.accept(*_SEPARATORS):
            items.append(self.relation())
        closing = self.accept(*_OPENS[opening])
        if closing is None:
            raise Unreadable("bracket")
        brackets = {"{": "{}", "\\{": "{}", "langle": "()"}.get(opening, opening + closing)
        entries = [item.expr for item in items if isinstance(item, Value)]
        if brackets in ("()", "[]") and len(entries) == len(items) and self.transposition():
            return Matrix(tuple((entry,) for entry in entries))
        return Group(tuple(items), brackets)

    def _value(self) -> Answer:
        begin = self.place
        expr = self.sum()
        spelled = "".join(token.text for token in self.tokens[begin : self.place])
        if self.next.kind == ":" and not self._conditions:
            parts = [expr]
            while self.accept(":"):
                parts.append(self.sum())
            return Ratio(tuple(parts), unit(self._tail()))
        if self.next.kind == "matrix":
            return scaled(self.matrix(), expr)
        scale = arithmetic.fraction(1, 100) if self.accept("%") else sympy.Integer(1)
        decimals = _DECIMAL.fullmatch(spelled)
        places = len(decimals[1]) if decimals else None
        if self.tokens[self.place - 1].text == "degree":
            return Value(expr, places, scale, self._degree())
        words = self._tail().removesuffix(" and")
        first, _, rest = words.partition(" ")
        if first in SCALES:
            scale, words = sympy.Integer(SCALES[first]), rest
        if open_tail(words):
            raise Unreadable(words)
        value = Value(expr, places, scale, unit(words))
        if not value.unit or self.next.kind != "number":
            return value
        compound = _compound(value, self._value())
        if compound is None:
            raise Unreadable("two values")
        return compound

    def _degree(self) -> str:
        if self.next.text in ("C", "F"):
            return {"C": "celsius", "F": "fahrenheit"}[self.take().text]
        return "degree" if unit(self._tail()) is None else "other"

    def _tail(self) -> str:
        """Words behind a value, with the powers of units."""
        text = ""
        while self.next.kind == "word" or (text and self.next.text in ("^", "/", ".", "-", "(", ")", "'")):
            text += (" " if self.next.kind == "word" and text[-1:].isalnum() else "") + self.take().text
            if text.endswith("^"):
                text += self._token_argument()
        return text


def _compound(value: Answer, more: Answer) -> Value | None:
    """2 hours 30 minutes, in hours; None where the second is of no smaller unit of the same kind."""
    if not isinstance(value, Value) or not isinstance(more, Value) or not value.unit or not more.unit:
        return None
    size = ratio(more.unit, value.unit)
    if size is None or size >= 1:
        return None
    return Value(value.expr + more.expr * sympy.Rational(size), unit=value.unit)


def _name_of(side: Answer) -> str | None:
    """The name that a side is no more than, None for any other side."""
    if isinstance(side, Words):
        return side.text
    if isinstance(side, Value) and side.scale == 1:
        factors = sympy.Mul.make_args(side.expr)
        if all(isinstance(factor, sympy.Symbol) for factor in factors):
            return "".join(sorted(map(str, factors)))
    return None


def _expr(side: Answer) -> sympy.Expr:
    if not isinstance(side, Value):
        raise Unreadable("side of a relation")
    return side.expr * side.scale


def _equation(sides: list[Answer]) -> Answer:
    """a = b, or a chain whose members must all have the value of the last; of numbers, that value."""
    first = sides[0]
    if isinstance(first, Group) and len(sides) == 2:
        names = [_name_of(item) for item in first.items]
        if None in names or names != sorted(map(str, names)):
            raise Unreadable("names")
        return sides[1]
    name = _name_of(first)
    if name is None and len(sides) == 2 and _name_of(sides[1]) and not _expr(first).free_symbols:
        sides, name = sides[::-1], _name_of(sides[1])
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

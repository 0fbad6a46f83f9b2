"""Formulas: tokens to one SymPy object, by recursive descent over a language of our own. No text is evaluated."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import sympy

from jaxrl_sat.rewards import arithmetic
from jaxrl_sat.rewards.lexer import FUNCTIONS, Token, Unreadable
from jaxrl_sat.rewards.matrices import determinant, transposed
from jaxrl_sat.rewards.values import Matrix

DEEPEST = 40
"""Brackets, fractions, roots and exponents inside each other."""

_CLOSES = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil"}
_CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo}
_FACTOR_OPERATORS = ("(", "{", "[")
_REPEATED = re.compile(r"(\d)\1\1+$|(\d{2,12}?)\2+$")
_NO_FACTOR = ("rfloor", "rceil", "langle", "rangle", "emptyset", "infty")


class Formulas:
    """A place in a list of tokens, and the rules of a formula. `sign` is what plus-minus stands for in this reading."""

    def __init__(self, tokens: list[Token], sign: int):
        self.tokens, self.sign = tokens, sign
        self.place = self._depth = 0
        self._bars = self._arguments = 0

    @property
    def next(self) -> Token:
        return self.tokens[self.place] if self.place < len(self.tokens) else Token("end", "")

    def after(self, ahead: int) -> Token:
        """The token that many places behind the next."""
        return self.tokens[self.place + ahead] if self.place + ahead < len(self.tokens) else Token("end", "")

    def take(self) -> Token:
        token = self.next
        self.place += 1
        return token

    def accept(self, *texts: str) -> str | None:
        """The next token's text if it is an operator or command of these, which is then taken."""
        if self.next.kind in ("number", "name", "word", "end") or self.next.text not in texts:
            return None
        return self.take().text

    def expect(self, text: str) -> None:
        if self.accept(text) is None:
            raise Unreadable(f"{text} expected")

    def sum(self) -> sympy.Expr:
        """Terms added, subtracted, or both by plus-minus."""
        value = self.term(self._sign_of(self.accept("+", "-", "pm", "mp") or "+"))
        while operator := self.accept("+", "-", "pm", "mp"):
            value = arithmetic.add(value, self.term(self._sign_of(operator)))
        return value

    def _sign_of(self, operator: str) -> int:
        return {"+": 1, "-": -1, "pm": self.sign, "mp": -self.sign}[operator]

    def term(self, sign: int = 1) -> sympy.Expr:
        """Factors multiplied, by a sign or side by side, and divided, from left to right."""
        value = self.signed_factor()
        while True:
            if self.accept("*"):
                value = arithmetic.multiply(value, self.signed_factor())
            elif self.accept("/"):
                value = arithmetic.divide(value, self.signed_factor())
            elif self._factor_follows():
                value = arithmetic.multiply(value, self.factor())
            else:
                return -value if sign < 0 else value

    def signed_factor(self) -> sympy.Expr:
        sign = self._sign_of(self.accept("+", "-") or "+")
        return sign * self.factor()

    def _factor_follows(self) -> bool:
        token = self.next
        if token.kind == "number":
            return self.tokens[self.place - 1].kind not in ("number", "repeating")
        if token.kind == "command":
            return token.text not in _NO_FACTOR
        return token.kind == "name" or token.text in _FACTOR_OPERATORS or (token.text == "|" and not self._bars)

    def factor(self) -> sympy.Expr:
        """A thing with what stands behind it: factorials, then a power."""
        value = self.thing()
        while True:
            if self.accept("!"):
                value = arithmetic.factorial(value)
            elif self.accept("degree"):
                value = arithmetic.multiply(value, sympy.pi / 180) if self._arguments else value
            elif self.accept("^"):
                return self._factorials(arithmetic.power(value, self.exponent()))
            else:
                return value

    def _factorials(self, value: sympy.Expr) -> sympy.Expr:
        while self.accept("!"):
            value = arithmetic.factorial(value)
        return value

    def exponent(self) -> sympy.Expr:
        """What stands behind ^: in braces, or a signed factor (which takes powers of its own first)."""
        with self.deeper():
            return self.signed_factor()

    @contextlib.contextmanager
    def deeper(self) -> Iterator[None]:
        """One level further in. Raises `Unreadable` at too many."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise Unreadable("depth")
        yield
        self._depth -= 1

    def thing(self) -> sympy.Expr:
        """A number, a name, a bracket, a command with its arguments."""
        with self.deeper():
            return self._thing(self.take())

    def _thing(self, token: Token) -> sympy.Expr:
        if token.kind == "number":
            return self._number(token)
        if token.kind == "repeating":
            return repeating(token.text)
        if token.kind == "name":
            return self._name(token)
        if token.kind == "command":
            return self._command(token.text)
        if token.text in ("(", "[", "{"):
            return self._until(_CLOSES[token.text])
        if token.text == "|" and self.next.kind == "matrix":
            value = determinant(self.matrix())
            self.expect("|")
            return value
        if token.text == "|":
            self._bars += 1
            value = arithmetic.call("abs", self._until("|"))
            self._bars -= 1
            return value
        raise Unreadable(token.text or "end")

    def _until(self, closing: str) -> sympy.Expr:
        bars = self._bars
        self._bars = bars if closing == "|" else 0
        value = self.sum()
        self._bars = bars
        self.expect(closing)
        return value

    def _number(self, token: Token) -> sympy.Expr:
        value = decimal(token.text)
        if self.next.text == "_" and self.next.kind == "_":
            return self._in_base(token.text)
        if not token.text.isdigit():
            return value
        fraction = self._plain_fraction()
        if fraction is None:
            return value
        if not 0 < fraction < 1:
            raise Unreadable("mixed number")
        return value + fraction

    def _plain_fraction(self) -> sympy.Rational | None:
        """The fraction of a mixed number, taken: \\frac{1}{2} or, behind a space, 1/2."""
        ahead = [self.after(i) for i in range(7)]
        texts = [token.text for token in ahead]
        if ahead[0].kind == "number" and ahead[0].spaced and texts[1] == "/" and ahead[2].kind == "number":
            above, below, used = texts[0], texts[2], 3
        elif ahead[0].kind == "command" and texts[0] == "frac":
            if [texts[1], texts[3], texts[4], texts[6]] == ["{", "}", "{", "}"]:
                above, below, used = texts[2], texts[5], 7
            elif ahead[1].kind == "number" and len(texts[1]) == 2:
                above, below, used = texts[1][0], texts[1][1], 2
            elif len(texts[1]) == 1 and [texts[2], texts[4]] == ["{", "}"]:
                above, below, used = texts[1], texts[3], 5
            elif ahead[2].kind == "number" and len(texts[1]) == len(texts[2]) == 1:
                above, below, used = texts[1], texts[2], 3
            else:
                return None
        else:
            return None
        if not (above.isdigit() and below.isdigit()) or int(below) == 0 or self.after(used).text == "^":
            return None
        self.place += used
        return arithmetic.fraction(int(above), int(below))

    def _in_base(self, digits: str) -> sympy.Expr:
        self.take()
        base = self._token_argument()
        if not base.isdigit() or not 2 <= int(base) <= 36 or not digits.isdigit():
            raise Unreadable("base")
        if any(int(digit) >= int(base) for digit in digits):
            raise Unreadable("digit of base")
        return sympy.Integer(int(digits, int(base)))

    def _token_argument(self) -> str:
        """Text of a subscript: one token, or plain tokens in braces."""
        if not self.accept("{"):
            token = self.take()
            if token.kind not in ("number", "name", "word"):
                raise Unreadable("subscript")
            return token.text
        text = ""
        while not self.accept("}"):
            token = self.take()
            if token.kind not in ("number", "name", "word") and token.text not in ("+", "-", ","):
                raise Unreadable("subscript")
            text += token.text
        return text

    def _name(self, token: Token) -> sympy.Expr:
        if self.next.kind == "_":
            self.take()
            return sympy.Symbol(f"{token.text}_{self._token_argument()}")
        return {"i": sympy.I, "e": sympy.E}.get(token.text) or sympy.Symbol(token.text)

    def _command(self, name: str) -> sympy.Expr:
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name == "frac":
            above = self.argument(single_digit=True)
            return arithmetic.divide(above, self.argument(single_digit=True))
        if name == "binom":
            above = self.argument(single_digit=True)
            return arithmetic.binomial(above, self.argument(single_digit=True))
        if name == "sqrt":
            degree = self._until("]") if self.accept("[") else sympy.Integer(2)
            return arithmetic.power(self.argument(), arithmetic.divide(sympy.Integer(1), degree))
        if name in ("lfloor", "lceil"):
            return arithmetic.call({"lfloor": "floor", "lceil": "ceil"}[name], self._until(_CLOSES[name]))
        if name == "det":
            return self._determinant()
        if name == "overline":
            return self._overlined()
        if name in FUNCTIONS:
            return self._function(name)
        raise Unreadable(name)

    def _overlined(self) -> sympy.Expr:
        """The conjugate of a number with i, otherwise a name."""
        begin = self.place
        text = self._token_argument()
        if "i" not in text or re.fullmatch(r"[-+\d.i]+", text) is None:
            return sympy.Symbol(f"overline_{text}")
        self.place = begin
        conjugate = self.argument().xreplace({sympy.I: -sympy.I})
        assert isinstance(conjugate, sympy.Expr)
        return conjugate

    def matrix(self) -> Matrix:
        """Rows between \\begin and \\end, and a T behind them."""
        self.take()
        rows: list[tuple[sympy.Expr, ...]] = []
        while True:
            row = [arithmetic.finite(self.sum())]
            while self.accept("&"):
                row.append(arithmetic.finite(self.sum()))
            rows.append(tuple(row))
            ended = self.accept("\\\\") is None
            if ended or self.next.kind == "matrix":
                break
        if self.take() != Token("matrix", "end") or len({len(row) for row in rows}) != 1:
            raise Unreadable("matrix")
        return transposed(Matrix(tuple(rows))) if self.transposition() else Matrix(tuple(rows))

    def transposition(self) -> bool:
        """Whether ^T follows, which is then taken."""
        ahead = [self.after(i).text for i in range(4)]
        length = 2 if ahead[:2] == ["^", "T"] else 4 if ahead == ["^", "{", "T", "}"] else 0
        self.place += length
        return length > 0

    def _determinant(self) -> sympy.Expr:
        """Of the matrix that follows, also in brackets."""
        closing = _CLOSES[self.take().text] if self.next.text in ("(", "[", "{") else None
        value = determinant(self.matrix()) if self.next.kind == "matrix" else None
        if value is None:
            raise Unreadable("determinant")
        if closing:
            self.expect(closing)
        return value

    def argument(self, single_digit: bool = False) -> sympy.Expr:
        """What TeX takes as an argument: braces, or one thing; of a number one digit where `single_digit`."""
        token = self.next
        if single_digit and token.kind == "number" and token.text.isdigit():
            rest = token.text[1:]
            self.tokens[self.place : self.place + 1] = [Token("number", text) for text in (token.text[0], rest) if text]
            return decimal(self.take().text)
        if token.kind == "number":
            return decimal(self.take().text)
        return self.thing()

    def _function(self, name: str) -> sympy.Expr:
        base = power = None
        while operator := self.accept("_", "^"):
            if operator == "_":
                base = self.argument(single_digit=self._nothing_behind())
            else:
                power = self.exponent()
        self._arguments += 1
        argument = self.argument() if self.next.text in _FACTOR_OPERATORS else self._bare_argument()
        self._arguments -= 1
        if power == -1 and name in arithmetic.INVERSE:
            return arithmetic.call(arithmetic.INVERSE[name], argument)
        value = arithmetic.call(name, argument)
        if name == "lg":
            base = sympy.Integer(10)
        if base is not None:
            if name not in ("log", "lg"):
                raise Unreadable("subscript")
            value = arithmetic.divide(value, arithmetic.call("log", base))
        return value if power is None else arithmetic.power(value, power)

    def _nothing_behind(self) -> bool:
        """Whether the next is the last of its term: of \\log_39 the 9 is no part of the base."""
        place = self.place
        self.place += 1
        follows = self._factor_follows() or self.next.kind in ("number", "^")
        self.place = place
        return not follows

    def _bare_argument(self) -> sympy.Expr:
        """Of a function without brackets: factors side by side, up to a sign or another function."""
        value = self.factor()
        while self._factor_follows() and self.next.text not in FUNCTIONS - {"sqrt"}:
            value = arithmetic.multiply(value, self.factor())
        return arithmetic.divide(value, self.factor()) if self.accept("/") else value


def decimal(text: str) -> sympy.Rational:
    """An exact fraction of a plain number, a decimal or 1.2e-3."""
    digits, _, exponent = text.lower().partition("e")
    whole, _, fraction = digits.partition(".")
    power = int(exponent or 0) - len(fraction)
    return arithmetic.fraction(int(f"{whole or '0'}{fraction}") * 10 ** max(power, 0), 10 ** max(-power, 0))


def repeating(text: str) -> sympy.Rational:
    """0.1\\overline{6} or 0.1(6), exactly."""
    head, _, tail = text.replace("(", "\\").partition("\\")
    whole, _, fixed = head.partition(".")
    period = "".join(filter(str.isdigit, tail))
    if not period:  # 0.1666\ldots
        cut = _REPEATED.search(fixed)
        if cut is None:
            raise Unreadable("no period")
        fixed, period = fixed[: cut.start()], cut[1] or cut[2]
    nines = 10 ** len(period) - 1
    return arithmetic.fraction(int(f"{whole or '0'}{fixed}") * nines + int(period), nines * 10 ** len(fixed))

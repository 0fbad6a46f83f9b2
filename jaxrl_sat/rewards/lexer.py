"""Tidy text of an answer to tokens. What is not on the lists here is refused, quotes and underscored names among it."""

from __future__ import annotations

import contextlib
import dataclasses
import re

from jaxrl_sat.rewards.units import is_symbol, unit

MOST_TOKENS = 600
DIGITS = 400
"""Digits of one number."""

FUNCTIONS = frozenset(
    """sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh cis log ln lg exp sqrt floor
    ceil abs""".split()
)
GREEK = frozenset(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell""".split()
)
COMMANDS = FUNCTIONS | frozenset(
    "frac binom pi infty emptyset lfloor rfloor lceil rceil langle rangle overline det".split()
)
OPERATORS = frozenset("le ge ne in cup cap setminus pm mp degree mid lt gt approx".split())


class Unreadable(Exception):
    """Text that is no answer in the language read here, or is beyond one of its limits."""


@dataclasses.dataclass(frozen=True)
class Token:
    """kind: number, repeating, name, word, command, matrix, or operator, whose text is then the operator itself."""

    kind: str
    text: str
    spaced: bool = False


_FONT = "text|mbox|textbf|textit|textrm|textnormal|texttt|mathrm|mathbf|mathit|mathsf|operatorname"
_TOKEN = re.compile(
    rf"""(?P<space>\s+)
    |\\(?:{_FONT})\s*\{{(?P<text>[^{{}}]*)\}}
    |\\begin\{{(?P<begin>[pbBvs]?(?:small)?matrix|array)\}}(?:\{{[lcr|]*\}})?
    |\\end\{{(?P<end>[pbBvs]?(?:small)?matrix|array)\}}
    |(?P<row>\\\\)(?:\[[^\]]*\])?
    |\\(?P<brace>[{{}}])
    |\\mathbb\s*\{{?(?P<field>[RZNQC])\}}?
    |(?P<repeating>\d*\.\d*(?:\\(?:overline|bar)\s*(?:\{{\d+\}}|\d)|\(\d+\)|(?<=\d)\\ldots))
    |(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?![\d.a-zA-Z]))?)
    |\\(?P<command>[a-zA-Z]+)
    |(?P<letters>[a-zA-Z]+)
    |(?P<operator>\*\*|[-+*/^_!%'|()\[\]{{}},;:=<>&])
    """,
    re.VERBOSE | re.ASCII,
)
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?![\d,])(?:\.\d+)?", re.ASCII)
_BEFORE_OPENING = ("cup", "cap", "setminus", "in", "=", ",", ";", "and", "(", "\\{")
_AFTER_CLOSING = ("cup", "cap", "setminus", ",", ";", "and", ")", "\\}")
_SEPARATORS = {"or": ";", "and": "and", "to": ":"}
_PLAIN_WORDS = {"pi": "pi", "infinity": "infty", "inf": "infty", "infty": "infty"}


def tokens(text: str, grouped: bool = True) -> list[Token]:
    """Tokens of a tidy text; 1,234 is one number if `grouped`. Raises `Unreadable` for what is in no answer."""
    found: list[Token] = []
    place, depth, spaced = 0, 0, False
    while place < len(text):
        match = (_GROUPED.match(text, place) if grouped and depth == 0 else None) or _TOKEN.match(text, place)
        if match is None or len(found) > MOST_TOKENS:
            raise Unreadable(text[place : place + 20])
        place = match.end()
        if match.re is _GROUPED:
            new = [Token("number", match.group().replace(",", ""))]
        elif match.lastgroup == "space":
            spaced = True
            continue
        else:
            new = _read(match, found, spaced)
        if new and spaced:
            new[0] = dataclasses.replace(new[0], spaced=True)
        for token in new:
            if token.kind not in ("word", "name"):
                depth += {"(": 1, "[": 1, "\\{": 1, ")": -1, "]": -1, "\\}": -1}.get(token.text, 0)
        found += new
        spaced = False
    return _outward(found)


def _outward(found: list[Token]) -> list[Token]:
    """Brackets of open ends turned outward, as in ]1,2[, as round ones: where a thing would begin, or has ended."""
    texts = ["", *("" if token.kind in ("number", "name", "word") else token.text for token in found), ""]
    if "," not in texts and ";" not in texts:
        return found
    turned = list(found)
    for i, token in enumerate(found):
        if token.kind == "]" and (i == 0 or texts[i] in _BEFORE_OPENING):
            turned[i] = Token("(", "(")
        elif token.kind == "[" and (i == len(found) - 1 or texts[i + 2] in _AFTER_CLOSING):
            turned[i] = Token(")", ")")
    return turned


def _read(match: re.Match[str], before: list[Token], spaced: bool) -> list[Token]:
    kind = match.lastgroup or ""
    text = match.group(kind)
    if kind in ("number", "repeating"):
        if sum(map(str.isdigit, text)) > DIGITS:
            raise Unreadable("digits")
        return [Token(kind, text)]
    if kind == "text":
        return _words(text, bool(before) and (before[-1].kind == "number" or before[-1].text in "})degree"))
    if kind == "command":
        return [_command(text)]
    if kind == "letters":
        return _letters(text, before, spaced)
    if kind in ("begin", "end"):
        return [*([Token("command", "det")] if text == "vmatrix" and kind == "begin" else []), Token("matrix", kind)]
    named = {"row": "\\\\", "brace": "\\" + text, "field": f"field {text}", "operator": "^" if text == "**" else text}
    return [Token(named[kind], named[kind])]


def _command(text: str) -> Token:
    if text in COMMANDS:
        return Token("command", text)
    if text in OPERATORS:
        operator = {"lt": "<", "gt": ">", "mid": "|"}.get(text, text)
        return Token(operator, operator)
    if text in GREEK:
        return Token("name", text)
    raise Unreadable(f"\\{text}")


def _words(text: str, after_value: bool = False) -> list[Token]:
    """What stands in \\text{...}: a separator, a formula after all, or words; one letter is a unit behind a value."""
    plain = text.strip(" ,;.")
    if plain in _SEPARATORS:
        return [Token(_SEPARATORS[plain], _SEPARATORS[plain])]
    if not plain:
        return [Token(";", ";")] if "," in text else []
    if after_value and len(plain) == 1 and is_symbol(plain):
        return [Token("word", plain)]
    if plain.lower() in ("empty set", "the empty set"):
        return [Token("command", "emptyset")]
    if plain.lower() in _PLAIN_WORDS:
        return [Token("command", _PLAIN_WORDS[plain.lower()])]
    if re.fullmatch(r"\(?[a-zA-Z]\)?", plain) or not re.search("[a-zA-Z]", plain):
        return tokens(plain)
    if plain in FUNCTIONS or plain == "det":
        return [Token("command", plain)]
    if plain[0].isdigit():
        with contextlib.suppress(Unreadable):
            return tokens(plain)
    if not re.fullmatch(r"[\w\s.,'()/^-]*", plain, re.ASCII):
        raise Unreadable(plain[:20])
    parts = [part.strip() for part in plain.split(",")]
    if len(parts) == 1 or not all(parts):
        return [Token("word", plain)]
    return [token for part in parts for token in (Token(",", ","), *_words(part))][1:]


def _letters(text: str, before: list[Token], spaced: bool) -> list[Token]:
    """Letters outside \\text: a function, a separator, a unit, a word, or names multiplied."""
    if text in FUNCTIONS:
        return [Token("command", text)]
    if text in _SEPARATORS and text != "to":
        return [Token(_SEPARATORS[text], _SEPARATORS[text])]
    if text in _PLAIN_WORDS:
        return [Token("command", _PLAIN_WORDS[text])]
    after_value = bool(before) and (before[-1].kind in ("number", "word", "name") or before[-1].text in "})]%pi")
    if len(text) >= 4 or (len(text) >= 2 and after_value and spaced and (unit(text) or before[-1].kind == "word")):
        return [Token("word", text)]
    if len(text) >= 2 and after_value and unit(text) and before[-1].kind == "number":
        return [Token("word", text)]
    if len(text) >= 2 and text.isupper():
        return [Token("name", text)]
    return [Token("name", letter) for letter in text]

"""Spelling that changes no value, taken away (Hendrycks), and what two answers say as text alone."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 2_000
"""Characters of an answer that is read as mathematics; a longer one can only be equal as text."""

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u2217": "*",
        "\u00d7": "*",
        "\u00b7": "*",
        "\u22c5": "*",
        "\u00f7": "/",
        "\u2044": "/",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "\u2018": "'",
        "\u2019": "'",
        "\u2248": "",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u2260": "\\ne ",
        "\u2208": "\\in ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
        "\u2205": "\\emptyset ",
        "\u00b1": "\\pm ",
        "\u2213": "\\mp ",
        "\u221a": "\\sqrt ",
        "\u00b0": "^\\circ ",
        "\u00bd": "\\frac{1}{2}",
        "\u2153": "\\frac{1}{3}",
        "\u2154": "\\frac{2}{3}",
        "\u00bc": "\\frac{1}{4}",
        "\u00be": "\\frac{3}{4}",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u211d": "\\mathbb{R}",
        "\u03b1": "\\alpha ",
        "\u03b2": "\\beta ",
        "\u03b8": "\\theta ",
        "\u03bb": "\\lambda ",
        "\u20ac": "",
        "\u00a3": "",
    }
)
_RULES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\phantom\s*(?:\{[^{}]*\}|.)", " "),
        (r"\\(?:left|right)(?![a-zA-Z])\.?", ""),
        (r"\\(?:[bB]ig{1,2}[lrm]?|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])", ""),
        (r"(?<=\d)(?:\{,\}|,\\!|\\!,|,\\,|\\[,;: ]|,~|~)(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\(?:[,;:! ]|q?quad\b|hspace\{[^{}]*\})|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:cdot|times|ast)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\(?:approx|simeq)(?![a-zA-Z])", ""),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\[lr]vert(?![a-zA-Z])|\\[lr]?Vert(?![a-zA-Z])", "|"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degrees?(?![a-zA-Z])", r"\\degree "),
        (r"(?<![a-zA-Z])([ap])\.\s?m\b\.?", r"\1m"),
        (r"\\%", "%"),
        (r"\\?\$|(?<!\\)\\[()\[\]]", ""),
        (r"\s+", " "),
        (r"(?<=[^a-zA-Z0-9]) (?!(?<=, )\d{3}(?!\d))| (?=[^a-zA-Z0-9\\.])", ""),
        (r"(?<=[\d}]) (?=\\)", ""),
    )
]
_BOX = re.compile(r"\\(?:boxed|fbox)\{(.*)\}", re.DOTALL)
_FRACTION = re.compile(r"([-+]?\d{1,40})/(\d{1,40})", re.ASCII)
_LITERAL = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?", re.ASCII)


def tidy(text: str) -> str:
    """`text` without spacing, sizes and styles, its symbols spelled in one way; a space stays where words need it."""
    text = text.translate(_CHARACTERS)
    for pattern, by in _RULES:
        text = pattern.sub(by, text)
    text = trimmed(text)
    box = _BOX.fullmatch(text)
    return trimmed(box.group(1)) if box else text


def trimmed(text: str, also: str = "") -> str:
    """`text` without white space, punctuation and `also` at its ends; a point before a digit stays."""
    return text.rstrip(" \t\r\n.,;:" + also).lstrip(" \t\r\n,;:" + also)


def literal(text: str) -> str | None:
    """A whole number or decimal of plain digits in its shortest spelling, whatever its length; None for other text."""
    match = _LITERAL.fullmatch(text)
    if match is None:
        return None
    sign, whole, fraction = match.groups()
    if not whole and not fraction:
        return None
    whole, fraction = whole.replace(",", "").lstrip("0") or "0", (fraction or "").rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if sign == "-" and value != "0" else value


def _exactly(text: str) -> Fraction | str | None:
    """A plain number, or a plain fraction of such, in a form that is equal where the value is."""
    if match := _FRACTION.fullmatch(text):
        return Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
    plain = literal(text)
    return Fraction(plain) if plain is not None and len(plain) <= 80 else plain


def as_text(found: str, answer: str) -> bool | None:
    """Whether two tidy answers are the same where their text alone says so, None where they must be read."""
    if found == answer:
        return bool(answer)
    if not found or not answer or max(len(found), len(answer)) > LONGEST:
        mine, other = literal(found), literal(answer)
        return mine is not None and mine == other
    mine, other = _exactly(found), _exactly(answer)
    return None if mine is None or other is None else mine == other

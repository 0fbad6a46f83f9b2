"""Spelling that changes no value, taken away (Hendrycks), and what two answers say as text alone."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

LONGEST = 2_000
"""Characters of an answer that is read as mathematics; a longer one can only be equal as text."""

_SYMBOLS = {
    "-": "\u2212\u2013\ufe63\u2010\u2011",
    "*": "\u2217\u00d7\u00b7\u22c5\u2219",
    "/": "\u00f7\u2044\u2215",
    " ": "\u00a0\u2009\u202f\u2007\u3000",
    "'": "\u2018\u2019\u2032",
    "|": "\u2223",
    "": "\u200b\u200c\u200d\u2060\u2061\u2062\ufeff\u20ac\u00a3\u00a5\u20b9",
    "\\text{ cents}": "\u00a2",
    "^\\circ ": "\u00b0\u00ba",
    "\\approx ": "\u2248",
    "\\equiv ": "\u2261",
    "\\infty ": "\u221e",
    "\\le ": "\u2264\u2a7d",
    "\\ge ": "\u2265\u2a7e",
    "\\ne ": "\u2260",
    "\\in ": "\u2208",
    "\\cup ": "\u222a",
    "\\cap ": "\u2229",
    "\\setminus ": "\u2216",
    "\\emptyset ": "\u2205",
    "\\pm ": "\u00b1",
    "\\mp ": "\u2213",
    "\\sqrt ": "\u221a",
    "\\sqrt[3]": "\u221b",
    "\\sqrt[4]": "\u221c",
    "\\angle ": "\u2220",
    "\\langle ": "\u27e8",
    "\\rangle ": "\u27e9",
    "\\lfloor ": "\u230a",
    "\\rfloor ": "\u230b",
    "\\ldots ": "\u2026",
    "\\mathbb{R}": "\u211d",
    "\\mathbb{Z}": "\u2124",
    "\\alpha ": "\u03b1",
    "\\beta ": "\u03b2",
    "\\gamma ": "\u03b3",
    "\\theta ": "\u03b8",
    "\\lambda ": "\u03bb",
    "\\mu ": "\u03bc\u00b5",
    "\\pi ": "\u03c0",
    "\\sigma ": "\u03c3",
    "\\varphi ": "\u03c6",
    "\\omega ": "\u03c9",
}
_PLAIN = {code: unicodedata.normalize("NFKC", chr(code)) for code in (*range(0x1D400, 0x1D800), *range(0xFF01, 0xFF5F))}
"""Letters and digits of mathematical alphabets and of full width, in ASCII or Greek."""
_FRACTIONS = {
    code: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", chr(code)).split("\u2044"))
    for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))
}
_CHARACTERS = {ord(sign): by for by, signs in _SYMBOLS.items() for sign in signs} | _FRACTIONS
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f"
_LOWERED = "\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089"
_FONT = "text(?:bf|it|rm|sf|tt|normal)?|mbox|math(?:bf|it|rm|sf|tt)|operatorname"
_SIZES = "tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|rm|sf|tt|em|bfseries|hfill|displaystyle|textstyle"


def _script(mark: str, signs: str) -> Callable[[re.Match[str]], str]:
    digits = str.maketrans(signs, "0123456789+-n"[: len(signs)])
    return lambda match: f"{mark}{{{match.group().translate(digits)}}}"


def _without_lead(match: re.Match[str]) -> str:
    return match[1] if match[1] and not match[2] else ""


def _equations(match: re.Match[str]) -> str:
    """Rows that are an equation each, as a list; anything else stays."""
    rows = [row.replace("&", "").strip(" ,.;") for row in match["rows"].split("\\\\")]
    rows = [row for row in rows if row]
    stated = all(re.fullmatch(r"[^=<>,;]*=[^=<>,;]*", row) and "\\text" not in row for row in rows)
    return ", ".join(rows) if rows and stated else match.group()


_OPENED, _ENDED = r"(?i:\\text(?:bf|rm|it)?\{\s*)?(?i:", r")\s*\}?\s*"
_Rule: TypeAlias = tuple[str, str | Callable[[re.Match[str]], str]]
_STYLE: tuple[_Rule, ...] = (
    (f"[{_RAISED}]+", _script("^", _RAISED)),
    (f"[{_LOWERED}]+", _script("_", _LOWERED)),
    (r"\\phantom\s*(?:\{[^{}]*\}|.)", " "),
    (r"\\(?:left|right)(?![a-zA-Z])\.?", ""),
    (rf"\\(?:[bB]ig{{1,2}}[lrm]?|limits|nolimits|{_SIZES})(?![a-zA-Z])", ""),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\(?:boldsymbol|bm|pmb|underline|ensuremath|mathord)(?![a-zA-Z])", ""),
    (r"(?<=\d)(?:\{,\}|\\!,\\!|,\\!\s*|\\!,|,\\,|\\[,;: ]|,~|~)(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\(?:[,;:! ]|q?quad\b|hspace\{[^{}]*\})|~", " "),
    (rf"\\(?:{_FONT})\s*\{{\s*(\\(?:{_FONT})\s*\{{[^{{}}]*\}})\s*\}}", r"\1"),
    (r"\\(?:mathbf|mathit|mathrm|mathsf|textbf)\s*(?=\{[^{}]*[\\{])", ""),
    (r"\\cr(?![a-zA-Z])", r"\\\\"),
)
_ENVIRONMENT = r"cases|aligned|align\*?|gathered|split"
_NAMES: tuple[_Rule, ...] = (
    (rf"\\begin\{{({_ENVIRONMENT})\}}(?P<rows>[\s\S]{{0,500}}?)\\end\{{\1\}}", _equations),
    (r"^\s*\\\{\s*+\\begin\{array\}\{[lcr|]*\}(?P<rows>[\s\S]{0,500}?)\\end\{array\}\s*$", _equations),
    (r"\\not ?=|\\not ?\\ne(?![a-zA-Z])", r"\\ne "),
    (r"\\(?:backslash|smallsetminus)(?![a-zA-Z])", r"\\setminus "),
    (r"\\(?:lor|vee)(?![a-zA-Z])", r"\\text{ or }"),
    (r"\\(?:land|wedge)(?![a-zA-Z])", r"\\text{ and }"),
    (r"\\cbrt(?![a-zA-Z])", r"\\sqrt[3]"),
    (r"\\(?:(arc)?tg(?![a-zA-Z])|operatorname\{(arc)?tg\})", r"\\\1\2tan"),
    (r"\\(?:(arc)?co?tg(?![a-zA-Z])|operatorname\{(arc)?co?tg\})", r"\\\1\2cot"),
    (r"\^\s*+\{?\s*\\(?:top(?![a-zA-Z])|intercal(?![a-zA-Z])|(?:mathsf|mathrm|text)\{T\})\s*\}?", "^T"),
    (r"\\mathbb\s*\{?R\}?\s*(?:\^\{?\+\}?|_\{>0\})", r"(0,\\infty)"),
    (r"\\mathbb\s*\{?R\}?\s*(?:\^\{?-\}?|_\{<0\})", r"(-\\infty,0)"),
    (r"\\(?:[dtc]|nice|s)frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"^([^{}]{0,200})\\over(?![a-zA-Z])([^{}]{0,200})$", r"\\frac{\1}{\2}"),
    (r"^([^{}]{0,200})\\choose(?![a-zA-Z])([^{}]{0,200})$", r"\\binom{\1}{\2}"),
    (r"(?<=\d)\{(\\frac\{\d+\}\{\d+\})\}", r"\1"),
    (r"\\surd(?![a-zA-Z])", r"\\sqrt"),
    (r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=", r"\\le "),
    (r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:cdot|times|ast)(?![a-zA-Z])", "*"),
    (r"\\div(?![a-zA-Z])", "/"),
    (r"\\simeq(?![a-zA-Z])", r"\\approx"),
    (r"^\s*\\approx(?![a-zA-Z])", ""),
    (r"\\equiv(?![a-zA-Z])", "="),
    (r"\\colon(?![a-zA-Z])", ":"),
    (rf"^\s*{_OPENED}(?:the )?(?:set of )?(?:all )?(?:real numbers|reals)\.?{_ENDED}$", r"\\mathbb{R}"),
    (
        rf"^\s*{_OPENED}all (?:real numbers|reals),? (?:except|other than|but|excluding)(?: for)?)\s*\}}?\s*"
        r"(?:[a-z]\s*=\s*)?([^{}a-zA-Z]+|-?\\frac\{\d+\}\{\d+\})$",
        r"\\mathbb{R}\\setminus\\{\1\\}",
    ),
    (r"^\s*\{(\s*[a-z]\s*+(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\||:|\\mid)[^{}]*)\}\s*$", r"\\{\1\\}"),
    (r"\+/-", r"\\pm "),
    (r"\\(?:dots[cbo]?|cdots|ldots)(?![a-zA-Z])|\.\.\.+", r"\\ldots "),
    (r"(?<=[.\d])\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?", r"\\overline{\1\2\3}"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\[lr]vert(?![a-zA-Z])|\\[lr]?Vert(?![a-zA-Z])", "|"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degrees?(?![a-zA-Z])|(?<=\d)\^\{?o\}?(?![a-zA-Z])", r"\\degree "),
    (r"\\(?:text|textrm|mbox|mathrm)\s*\{\s*deg(?:ree)?s?\.?\s*\}(?!\s*[a-zA-Z])", r"\\degree "),
    (r"\\degree\s+([CF])(?![a-zA-Z])", r"\\degree \\text{\1}"),
    (r"\^\s*+\{?\s*\\text\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?", ""),
)
_SIGNS: tuple[_Rule, ...] = (
    (r"(?<![a-zA-Z])([ap])\.\s?m\b\.?", r"\1m"),
    (r"\\%", "%"),
    (r"(?<!\\)\$|(?<!\\)\\[()\[\]]|\\pounds(?![a-zA-Z])", ""),
    (r"\\text\s*\{\s*\\\$\s*\}", r"\\$"),
    (r"\s+", " "),
    (r"(?<!\\)(?<!\\ )(?:\\\\ ?)++$", ""),
    (r"^ ?(?:\\text ?\{ ?)?(?:USD|EUR|GBP|INR|Rs\.?) ?\}? ?(?=\d)", ""),
    (
        r"(?i)^ ?(\\text(?:bf|rm)?\{ ?)?(?:the )?(?:final |correct )?(?:answer|option|choice)\b"
        r"(?: is)? ?:? ?(\} ?)?(?=[^}])",
        _without_lead,
    ),
    (r"(?<![\d.,_])\d{1,3}(?: \d{3})+(?![\d.,/]| ?/)", lambda match: match.group().replace(" ", "")),
    (r"(?<=\d)'(?=\d{3}(?!\d))", ""),
    (r"(?<=\d) ?x ?(?=10\^)", "*"),
    (r"(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup "),
    (r"(?<=[^a-zA-Z0-9]) (?!(?<=, )\d{3}(?!\d))| (?=[^a-zA-Z0-9\\.])", ""),
    (r"(?<=[\d}]) (?=\\)", ""),
)
_RULES = [(re.compile(pattern), by) for pattern, by in (*_STYLE, *_NAMES, *_SIGNS)]
_WRAPPED = re.compile(rf"\\(?:{_FONT})\s*\{{ ?([^{{}}]*?) ?\}}")
_BOX = re.compile(r"\\(?:boxed|fbox)\{(.*)\}", re.DOTALL)
_FRACTION = re.compile(r"([-+]?\d{1,40})/(\d{1,40})", re.ASCII)
_LITERAL = re.compile(r"([-+]?)([1-9]\d{0,2}(?:,\d{3})+|\d*)(?:\.(\d*))?", re.ASCII)


def tidy(text: str) -> str:
    """`text` without spacing, sizes and styles, its symbols spelled in one way; a space stays where words need it."""
    text = text.translate(_PLAIN).translate(_CHARACTERS)
    for pattern, by in _RULES:
        text = pattern.sub(by, text)
    text = trimmed(text, "`")
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
    if found == answer or _WRAPPED.sub(r"\1", found) == _WRAPPED.sub(r"\1", answer):
        return bool(answer)
    found, answer = found.replace("\\$", ""), answer.replace("\\$", "")
    if not found or not answer or max(len(found), len(answer)) > LONGEST:
        mine, other = literal(found), literal(answer)
        return mine is not None and mine == other
    mine, other = _exactly(found), _exactly(answer)
    return None if mine is None or other is None else mine == other

"""Reference answers written in other ways that keep their value, by what their text shows; no verifier is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from jaxrl_sat.types import InputError

_INTEGER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d*\.\d+")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_OPERATOR = re.compile(r"(?<![\\{(\[^,=<>+*/ -])([+=<>]|(?<!e)-)(?![\d.]*\})")


def boxed(text: str) -> str:
    """A response that ends with the answer in a box."""
    return f"Therefore the result is $\\boxed{{{text}}}$."


def rewrites(answer: str) -> Iterator[tuple[str, str]]:
    """Name of each way that fits the answer's type, and the response."""
    for name, rewrite in _WAYS.items():
        text = rewrite(answer)
        if text is not None and (text != answer or name == "boxed"):
            yield name, boxed(text)
    yield "in a sentence", f"Adding up, the answer is ${answer.strip().strip('$')}$."
    yield "behind a thought", f"<think>Is it \\boxed{{0}} or 1?</think>It is {boxed(answer)}"


def _decimal(answer: str) -> str | None:
    value = number(answer)
    if value is None or value.denominator == 1 or _DECIMAL.fullmatch(answer):
        return None
    for places in range(1, 9):
        if (value * 10**places).denominator == 1:
            return f"{float(value):.{places}f}"
    return None


def _thousands(answer: str) -> str | None:
    return f"{int(answer):,}" if _INTEGER.fullmatch(answer) and abs(int(answer)) >= 1000 else None


def _thousands_tex(answer: str) -> str | None:
    grouped = _thousands(answer)
    return grouped.replace(",", "{,}") if grouped else None


def _sign(answer: str) -> str | None:
    if match := _FRACTION.fullmatch(answer):
        return (
            f"\\frac{{{int(match[2]) * -1}}}{{-{match[3]}}}" if not match[1] else f"\\frac{{-{match[2]}}}{{{match[3]}}}"
        )
    return f"+{answer}" if _INTEGER.fullmatch(answer) and not answer.startswith("-") else None


def _list(answer: str) -> str | None:
    parts = [part.strip() for part in answer.split(",")]
    plain = len(parts) > 1 and not re.search(r"[()\[\]{}\\]|\d,\d{3}", answer)
    return ", ".join(reversed(parts)) if plain else None


_WAYS: dict[str, Callable[[str], str | None]] = {
    "boxed": lambda answer: answer,
    "spaced": lambda answer: "\\; " + _OPERATOR.sub(r" \1 ", answer) + " \\,",
    "dfrac": lambda answer: re.sub(r"\\frac(?![a-zA-Z])", r"\\dfrac", answer) if "\\frac" in answer else None,
    "left and right": lambda answer: re.sub(r"^\((.*)\)$", r"\\left( \1 \\right)", answer),
    "decimal": _decimal,
    "unit": lambda answer: f"{answer}\\text{{ units}}" if _INTEGER.fullmatch(answer) or number(answer) else None,
    "thousands": _thousands,
    "thousands {,}": _thousands_tex,
    "sign": _sign,
    "reversed list": _list,
    "brackets of a matrix": lambda answer: answer.replace("pmatrix", "bmatrix"),
    "named": lambda answer: f"x = {answer}" if number(answer) is not None and "=" not in answer else None,
    "degrees": lambda answer: re.sub(r"\^\{?\\circ\}?$", r" \\text{ degrees}", answer),
}


def number(answer: str) -> Fraction | None:
    """The value of a plain number, fraction, sum of money or percentage, None for any other text."""
    plain = re.sub(r"\\[!,;]|[ $]|\\\$|\\(?:text|mbox)\{[^{}]*\}|^[a-zA-Z]\s*=", "", answer)
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+", plain):
        plain = plain.replace(",", "")
    if match := _FRACTION.fullmatch(plain):
        return Fraction(int(match[1] + match[2]), int(match[3])) if int(match[3]) else None
    if match := re.fullmatch(r"(-?\d+)/(\d+)", plain):
        return Fraction(int(match[1]), int(match[2]))
    return Fraction(plain) if _INTEGER.fullmatch(plain) or _DECIMAL.fullmatch(plain) else None


def differ(one: str, other: str) -> bool:
    """Whether two reference answers are of different value: as numbers, else as text without spacing and style."""
    values = number(one), number(other)
    if None not in values:
        return values[0] != values[1]
    return _bare(one) != _bare(other)


def _bare(text: str) -> str:
    return re.sub(r"\\(?:left|right|!|,|;|text|mbox|\$)|[\s{}$]|\.$|\\%|\^\\circ", "", text.replace("dfrac", "frac"))


def gold(data: Path) -> dict[str, list[tuple[str, str]]]:
    """(solution or "", reference answer) of GSM8K and MATH under a folder. Raises `InputError` where they are not."""
    found = {"GSM8K": [], "MATH": []}
    for file in sorted(data.glob("gsm8k/*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            solution = json.loads(line)["answer"]
            found["GSM8K"].append((solution, solution.rpartition("####")[2].strip()))
    for file in sorted(data.glob("math/*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        found["MATH"] += [("", row["answer"]) for row in rows if row["answer"]]
    missing = [name for name, rows in found.items() if not rows]
    if missing:
        raise InputError(f"--data={data}: no {missing[0]}; allowed: a folder with gsm8k/*.jsonl and math/*.json")
    return found


def pairs(rows: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """(way, response, answer) that are right, and that are wrong: the answer of the next problem that differs."""
    right, wrong = [], []
    for i, (solution, answer) in enumerate(rows):
        right += [(way, response, answer) for way, response in rewrites(answer)]
        if solution:
            right.append(("whole solution", solution, answer))
        following = rows[(i + 1) % len(rows)][1]
        if differ(following, answer):
            wrong.append(("next answer", boxed(following), answer))
    return right, wrong

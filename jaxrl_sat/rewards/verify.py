"""Extract the final answer of a response and compare it, as text: nothing is evaluated, cost is linear in length."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

_TAIL = 20_000
"""Characters from the end that are looked at; a final answer stands at the end."""
_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKER = re.compile(r"####|\banswer\s{0,8}(?:is|:|=)", re.IGNORECASE)
# An integer of plain digits, or with thousands in groups of three. Neither half of 12.5, of 3/4 or of 46-2 is one.
_NUMBER = re.compile(
    r"(?<![\w.,/^\\])(?<![\d)][-+*])(?:(?<![\d)])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?![\w^/]|[.,*+-]\d)", re.ASCII
)
_SENTENCE = re.compile(r"\n|\.\s")
_INTEGER = re.compile(r"([-+]?)0*(\d+)", re.ASCII)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+", re.ASCII)
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-"})


def verify(response: str, answer: str) -> bool:
    """Whether the final answer of `response` is `answer`. Never raises.

    The final answer is the last \\boxed{...}; without one the sentence behind the last "####" or "Answer:", or the one
    number in it; without that the last number of the text. Integers compare by value whatever their length; anything
    else as text with white space removed.
    """
    if not isinstance(response, str) or not isinstance(answer, str):
        return False
    wanted = _normalise(answer)
    found = final_answer(response)
    return bool(wanted) and found is not None and _normalise(found) == wanted


def score(responses: Sequence[str], answers: Sequence[str]) -> Float[np.ndarray, " n"]:
    """Reward of each response, float32 [N]: 1 for the right final answer, else 0."""
    return np.array([verify(r, a) for r, a in zip(responses, answers, strict=True)], np.float32)


def final_answer(response: str) -> str | None:
    """The text of the final answer, None where there is none."""
    text = response[-_TAIL:].translate(_MINUS)
    boxed = [match.end() for match in _BOXED.finditer(text)]
    if boxed:
        return _balanced(text, boxed[-1])
    markers = [match.end() for match in _MARKER.finditer(text)]
    if markers:
        sentence = _SENTENCE.split(text[markers[-1] :].lstrip(), maxsplit=1)[0]
        numbers = _NUMBER.findall(sentence)
        return numbers[0] if len(numbers) == 1 else sentence.strip(" \t\r.$*:`")
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _balanced(text: str, start: int) -> str | None:
    """What stands between the open brace before `start` and the one that closes it; None if none does."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[start : match.start()]
    return None


def _normalise(text: str) -> str:
    """Integers as their shortest spelling, anything else as text without white space."""
    text = "".join(text.translate(_MINUS).split()).strip("$")
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    integer = _INTEGER.fullmatch(text)
    if integer is None:
        return text
    sign, digits = integer.groups()
    return ("-" if sign == "-" and digits != "0" else "") + digits

"""Words beside a number: those that leave the answer open or deny it, and those that make another number of it."""

from __future__ import annotations

import re

HEDGES = frozenset(
    """or either not maybe perhaps possibly probably likely unlikely might could between less more greater fewer than
    least most never cannot if unless except but wrong incorrect""".split()
)
"""One of these in a sentence, and it states no number."""
SCALE = re.compile(r"\s+(?:hundred|thousand|million|billion|trillion|dozen)\b", re.IGNORECASE)
"""Behind a number, a part of it."""
_OPEN_TAIL = re.compile(
    r"\b(?:"
    + "|".join(sorted(HEDGES - {"more", "less", "fewer", "greater"}))
    + r"|squared|cubed|factorial|plus|minus|halves"
    r"|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s)\b"
    r"|^(?:and a half|over [a-z]\b|to the\b|times [a-z]\b)",
    re.IGNORECASE,
)
_NUMBER = r"\s+[$(]?-?\.?\d"
_CHANGED = re.compile(
    r"\b(?:multiples?|factors?|divisors?|powers?|root|cube|square|half|third|quarter|reciprocal|inverse|opposite) of"
    + _NUMBER
    + rf"|\b(?:twice|double|triple|half|over|under|above|below|beyond|nearly|almost|up to|base|to the){_NUMBER}"
    rf"|\b(?:divisible|divided|multiplied|increased|decreased|reduced) by{_NUMBER}"
    r"|\d\s+(?:halves|thirds|quarters|fourths|(?:fif|six|seven|eigh|nin|ten)ths)\b"
    r"|\d\s+(?:squared|cubed|factorial|plus|minus|to the|and a half|over [a-z]\b|times [a-z]\b)"
    r"|\b(?:percent|than) of? ?[a-z]\b",
    re.IGNORECASE,
)
_REFUSED_BEFORE = re.compile(
    r"(?:\b(?:\w*n['\u2019]t|\w*n['\u2019]t be|not|cannot be|not be|maybe|perhaps|possibly|probably|either|might be"
    r"|could be|less than|more than|fewer than|greater than|at least|at most|nearly|almost|over|under|up to)\s+"
    r"(?:about\s+|equal to\s+)?"
    r"|\d\s+(?:to|or)\s+|\bbetween\s+[-$]?[\d.,]+(?:\s+\w+)?\s+and\s+|[a-zA-Z]\(\s*"
    r"|(?<![a-zA-Z.,])(?:[\d)]|[a-z])\s+[-+*/\u00d7\u00f7x]\s+)[$]?$",
    re.IGNORECASE,
)


def changed(sentence: str) -> bool:
    """Whether words make another number of the one in a sentence: 5 squared, half of 5, over 5."""
    return _CHANGED.search(sentence) is not None


def refused_before(text: str) -> bool:
    """Whether what stands right before a number denies it, leaves it open or makes a part of a formula of it."""
    return _REFUSED_BEFORE.search(text[-60:]) is not None


def open_tail(words: str) -> bool:
    """Whether words behind a number are no unit but take it back, leave it open or change it."""
    return _OPEN_TAIL.search(words.strip()) is not None

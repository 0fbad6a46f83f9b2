"""Where the final answer of a response stands. Text alone: cost is linear in length and nothing is read as mathematics.

What follows the last </think> counts, and of that the first of these conventions that is used at all:

1. the last \\boxed{...} (\\fbox{...}, \\boxed 42): not closed, or one of several side by side, it is no answer;
2. the line behind the last "####";
3. the sentence behind the last "Answer:" or "answer is";
4. what the last <answer>...</answer> holds;
5. the last **bold** that is a number or a formula;
6. the last number, or the last $formula$ where it stands behind that.
"""

from __future__ import annotations

import re

from jaxrl_sat.rewards.normalise import trimmed
from jaxrl_sat.rewards.wording import HEDGES, SCALE, changed, refused_before

TAIL = 20_000
"""Characters from the end that are looked at; a final answer stands at the end."""
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-"})

_BRACE = re.compile(r"\\{1,2}(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(
    r"\\boxed(?:[ \t]+|(?=\d|\\[dt]?frac))((?:[-+]?[\d.]|\\[a-zA-Z])[^$\n]{0,200}|[A-J]\b(?![ \t]*\w))", re.ASCII
)
_PLACEHOLDER = re.compile(r"(?:\s|\.|\\l?c?dots\b|\\;|\\,|~)*")
_BETWEEN = re.compile(
    r"(?:[\s,;.$/|~&()]|\\[,;:!()\[\]]|\\q?quad|\b(?:and|or|maybe|perhaps|possibly|alternatively|otherwise)\b|\\text\{[\s,]*(?:and|or)?[\s,]*\}|\b[a-z]\s*=)*"
)
_ANSWER = re.compile(
    r"\b(?:answer[\s*_]{0,8}(?:(?P<denied>isn.t\b|(?:could|might|may|can|cannot|can.t)\s+(?:not\s+)?be\b)|is\b|:|=)"
    r"|(?:option|choice) is\b)[\s*_:]{0,8}",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"\n|\.\s(?![^{}\n]{0,80}\})|</answer>")
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")
_LABEL = re.compile(r"\s*\(?\d{1,2}[.):]\s*")
"""The number of a point in a list."""
_DISPLAY = r"\$\$([^$]{1,400})\$\$"
_MATH = re.compile(_DISPLAY + r"|\$([^$\n]{1,400})\$|\\\(([^\n]{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL)
# A number of plain digits: neither half of 3/4/5, of 46-2, of 2*23 or of x46 is one.
_NUMBER = re.compile(
    r"(?<![\w.,/^\\{_])(?<![\d)][-+*])(?:(?<![\d)])[-+])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|\.\d+)(?:\\?%)?(?![\w^/(\\]|[.,*+-]\d)",
    re.ASCII,
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf)\s*\{[^{}]*\}")
_WORD = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}")
_FORMULA_WORDS = frozenset("sqrt sin cos tan cot sec csc log ln exp pi frac infinity inf mod".split())
_QUANTITY = re.compile(r"[-+]?\\?[$€£]?[-+]?[\d.,/]*\d\s*\\?%?(?:\s+[a-zA-Z][\w^]*){0,3}|[^a-zA-Z]*", re.ASCII)
_REASON = re.compile(
    r",?\s(?:because|since)\b.*|,?\s\((?!(?:" + "|".join(HEDGES) + r"|and)\b)[a-z]{2}[^()]*\).*|(?<=\d)!$"
    r"|(?<=[\d$)}\]%]),?\s\(?(?:which is |that is |i\.e\.,? )?(?:approximately|roughly|about)\s.*",
    re.DOTALL,
)
_NEGATIVE = re.compile(r"\b(?:negative|minus)\s+(?=[\d.])", re.IGNORECASE)
_END = re.compile(r"(?:\s*(?:</s>|<\|[\w ]{1,40}\|>|<eos>|<end_of_turn>))+\s*$")
"""Marks of the end of a text that a tokenizer left in."""
_CALL = re.compile(r"[a-zA-Z_]{2,}\(")
_AND = re.compile(r"\s*+(?:,\s*+(?:(?:and|or)\s++)?|(?:and|or)\s++)(?:[a-z]\s*+=\s*+)?")
_EQUATION = re.compile(r"[a-zA-Z]\s*=\s*[^=]+")
_EDGES = '$*_`"\u201c\u201d'


def final_answer(response: str) -> str | None:
    """The text of the final answer, None where there is none, or one that is not closed or hedged."""
    thought = response.rfind("</think>")
    if response.rfind("<think>") > thought:
        return None
    response = response.rstrip()
    response = response[:-200] + _END.sub("", response[-200:])
    start = max(thought + len("</think>") if thought >= 0 else 0, len(response) - TAIL)
    text = response[start:].translate(_MINUS)
    for find in (_boxed, _hashes, _said, _tagged, _bold, _last_number):
        found = find(text)
        if found is not None:
            return found.strip() or None
    return None


def boxes_of(text: str) -> list[tuple[int, int, int]] | None:
    """The outermost boxes: where the command, the content and the closing brace are. None where one is not closed."""
    opened: list[tuple[int, int]] = []  # where a box's command and its content start, or (-1, -1) for a mere brace
    boxes: list[tuple[int, int, int]] = []
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{" and opened:
            opened.append((-1, -1))
        elif len(token) > 2 and token.endswith("{"):
            opened.append(match.span())
        elif token == "}" and opened:
            begin, content = opened.pop()
            if begin >= 0:
                while boxes and boxes[-1][0] > begin:
                    boxes.pop()
                boxes.append((begin, content, match.start()))
    return None if any(begin >= 0 for begin, _ in opened) else boxes


def is_placeholder(content: str) -> bool:
    """Whether a box is only mentioned: it is empty or holds dots."""
    return _PLACEHOLDER.fullmatch(content) is not None


# Each of these gives None where its convention is not used, and "" where it is used and there is no answer.


def _boxed(text: str) -> str | None:
    boxes = boxes_of(text)
    if boxes is None:
        return ""
    seen = bool(boxes)
    boxes = [box for box in boxes if not is_placeholder(text[box[1] : box[2]])]
    bare = list(_BARE_BOX.finditer(text))
    if bare and (not boxes or bare[-1].start() > boxes[-1][0]):
        return trimmed(bare[-1].group(1), _EDGES)
    if not boxes:
        return "" if seen else None
    return "" if _side_by_side(text, boxes) else text[boxes[-1][1] : boxes[-1][2]]


def _side_by_side(text: str, boxes: list[tuple[int, int, int]]) -> bool:
    """Whether the last box is one of a row of boxes that do not say the same."""
    for (_, left, left_end), (right_begin, right, right_end) in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if not _BETWEEN.fullmatch(text, left_end + 1, right_begin):
            return False
        if text[left:left_end].split() != text[right:right_end].split():
            return True
    return False


def _hashes(text: str) -> str | None:
    place = text.rfind("####")
    if place < 0:
        return None
    line, _, rest = text[place + 4 :].strip().partition("\n")
    # Four hashes are also a heading in Markdown: of words, with text below it.
    if rest.strip() and re.match(r"\s*[a-zA-Z*]", line):
        return None
    return _stated(line)


def _said(text: str) -> str | None:
    last = None
    for last in _ANSWER.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if last is None or last["denied"]:
        return None if last is None else ""
    rest = text[last.end() :].lstrip(" \t\r\n}")
    if display := re.match(_DISPLAY + r"|\\\[(.{1,400}?)\\\]", rest, re.DOTALL):
        return _content(display)
    return _stated(_SENTENCE.split(rest, maxsplit=1)[0])


def _tagged(text: str) -> str | None:
    begin, end = text.rfind("<answer>"), text.rfind("</answer>")
    if begin < 0:
        return None
    return _stated(text[begin + len("<answer>") : end]) if end > begin else ""


def _bold(text: str) -> str | None:
    for content in reversed(_BOLD.findall(text)):
        if _LABEL.fullmatch(content):
            continue
        content = trimmed(content, _EDGES)
        if any(map(str.isdigit, content)) and (_QUANTITY.fullmatch(content) or _EQUATION.fullmatch(content)):
            return content
    return None


def _last_number(text: str) -> str | None:
    number = None
    row: list[re.Match[str]] = []  # the last formula, and those that it is listed with
    for number in _NUMBER.finditer(text):  # noqa: B007
        pass
    for match in _MATH.finditer(text):
        if not _prose(_content(match)):
            row = [*row, match] if row and _AND.fullmatch(text, row[-1].end(), match.start()) else [match]
    if row and (number is None or row[-1].end() >= number.end()):
        return ", ".join(map(_content, row))
    if number is None:
        return None
    return "" if refused_before(text[max(0, number.start() - 60) : number.start()]) else _scaled(text, number)


def _scaled(text: str, number: re.Match[str]) -> str:
    """The number with the word million behind it, if it is there."""
    scale = SCALE.match(text, number.end())
    return number.group() + (scale.group() if scale else "")


def _stated(sentence: str) -> str:
    """The answer in a sentence: its one formula, or its one number where the rest is prose without a hedge, or all."""
    sentence = _NEGATIVE.sub("-", _REASON.sub("", trimmed(sentence, "*_`")))
    if re.fullmatch(r"'[^']*'", sentence):
        sentence = sentence[1:-1]
    formulas = [match for match in _MATH.finditer(sentence) if not _prose(_content(match))]
    outside = _MATH.sub(" ", sentence) if formulas else sentence
    words = {word.lower() for word in _WORD.findall(outside)}
    if words & HEDGES or changed(outside):
        return sentence
    if len(formulas) == 1 and not any(map(str.isdigit, outside)):
        return _content(formulas[0])
    numbers = list(_NUMBER.finditer(sentence))
    if len(numbers) == 1 and words and not words & _FORMULA_WORDS and not _CALL.search(sentence):
        return _scaled(sentence, numbers[0])
    return trimmed(sentence, _EDGES)


def _content(match: re.Match[str]) -> str:
    return trimmed(next(group for group in match.groups() if group is not None), _EDGES)


def _prose(text: str) -> bool:
    """Whether it is words rather than a formula, in which letters stand side by side, and words in \\text."""
    words = [word for word in _WORD.findall(_TEXT.sub("", text)) if word.lower() not in _FORMULA_WORDS]
    return len(words) > 2 or any(len(word) > 3 for word in words)

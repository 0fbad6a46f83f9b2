"""From a row as its file has it to a problem: where prompt, answer and id stand, and what stands around them.

    dapo     prompt (messages), reward_model.ground_truth, extra_info.index; or problem, answer, id
    dolci    prompt or messages, ground_truth
    gsm8k    question, answer behind the last ####
    math     problem, answer or the last \\boxed of solution, unique_id
    aime     problem, answer or expected_answer, id
    plain    prompt, answer, id

A dot stands before a field within a column.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_sat.data.records import Unusable
from jaxrl_sat.rewards.extract import TAIL, final_answer


class Unrecognised(Exception):
    """No schema fits the columns of a file."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One problem: what the user is asked, what the verifier compares with, and the id its file gives it ("": none)."""

    prompt: str
    answer: str
    id: str


def _as_it_stands(text: str) -> str:
    return text


def _behind_hashes(text: str) -> str:
    _, mark, answer = text.rpartition("####")
    return answer if mark else ""


def _last_box(text: str) -> str:
    return (final_answer(text) or "") if "\\boxed" in text else ""


@dataclasses.dataclass(frozen=True)
class Form:
    """One form of a schema: the columns of prompt, answer and id, dots for fields within; how an answer is found."""

    schemas: tuple[str, ...]
    prompt: str
    answer: str
    id: str = "id"
    extract: Callable[[str], str] = _as_it_stands

    def fits(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row has the columns."""
        return all(column.split(".")[0] in fields for column in (self.prompt, self.answer))

    def read(self, fields: Mapping[str, Any]) -> Example:
        """The problem in a row. Raises `Unusable` where there is none."""
        prompt = without_wrapper(_prompt(_at(fields, self.prompt)))
        answer = self.extract(_answer(_at(fields, self.answer))).strip()
        found = _at(fields, self.id)
        example = Example(prompt, answer, "" if _missing(found) else str(found))
        if not example.prompt:
            raise Unusable("no prompt")
        if not answer:
            raise Unusable("no answer")
        if len(answer) > TAIL:
            raise Unusable(f"answer over {TAIL} characters")
        try:
            f"{example.prompt}{example.answer}{example.id}".encode()
        except UnicodeEncodeError as error:
            raise Unusable("text that is not Unicode") from error
        return example


FORMS = (
    Form(("dapo",), "prompt", "reward_model.ground_truth", "extra_info.index"),
    Form(("dolci",), "prompt", "ground_truth"),
    Form(("dolci",), "messages", "ground_truth"),
    Form(("gsm8k",), "question", "answer", extract=_behind_hashes),
    Form(("aime",), "problem", "expected_answer"),
    Form(("math",), "problem", "answer", "unique_id"),
    Form(("math",), "problem", "solution", "unique_id", _last_box),
    Form(("aime", "dapo"), "problem", "answer"),
    Form(("plain",), "prompt", "answer"),
)
"""A file's form is the first that its first rows fit."""
SCHEMAS = tuple(dict.fromkeys(schema for form in FORMS for schema in form.schemas))
COLUMNS = frozenset(column.split(".")[0] for form in FORMS for column in (form.prompt, form.answer, form.id))


def recognise(fields: Mapping[str, Any], schema: str | None) -> Form:
    """The form of a row, of `schema` where one is named. Raises `Unrecognised` with the columns there are."""
    forms = [form for form in FORMS if schema is None or schema in form.schemas]
    for form in forms:
        # A MATH file without unique_id numbers its problems as others do.
        if form.fits(fields):
            return dataclasses.replace(form, id="id") if _missing(_at(fields, form.id)) else form
    wanted = "; ".join(dict.fromkeys(f"{form.prompt} and {form.answer}" for form in forms))
    raise Unrecognised(f"has the columns {', '.join(fields) or '(none)'}; allowed: {wanted}")


WRAPPERS = (
    (re.compile(r"\s*user:\s", re.IGNORECASE), ""),
    (
        re.compile(
            r"\s*Solve the following math problem step by step\. The last line of your response should be of the form "
            r"Answer: \$?Answer \(without quotes\) where \$?Answer is the answer to the problem\."
        ),
        'Remember to put your answer on its own line after "Answer:".',
    ),
)
"""What some sets write before and behind a problem: the role of the speaker; DAPO's instructions."""


def without_wrapper(prompt: str) -> str:
    """The problem alone."""
    for before, behind in WRAPPERS:
        if match := before.match(prompt):
            prompt = prompt[match.end() :].strip().removesuffix(behind)
    return prompt.strip()


_RAISED, _LOWERED = "([⁰¹²³⁴-⁹⁺⁻ⁿ]+)", "([₀-₉₊₋]+)"
_LOOKS = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|limits|quad|qquad)(?![a-z])|\\[,;!: ()\[\]]|\$|~"), " "),
    (re.compile(r"[.,;:?](?!\d)"), " "),
    (re.compile(r"(?<=\d)\s+(?=\d+\s*/\s*\d)"), "&"),  # 1 1/2 is not 11/2
    (re.compile(r"\s+"), ""),
)


def identity(problem: str) -> bytes:
    """What two copies of a problem share, 16 bytes.

    A hash of the text in Unicode's compatibility form, without case, space, dollars and other marks of mathematics,
    LaTeX's spacing and sizes, and punctuation that no digit follows. What changes a number or a sign is left: powers,
    indices, a factorial, the gap in a mixed number.
    """
    for digits, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        problem = re.sub(digits, rf"{mark}\1", problem)
    text = unicodedata.normalize("NFKC", problem).casefold()
    for pattern, by in _LOOKS:
        text = pattern.sub(by, text)
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def _at(fields: Any, path: str) -> Any:
    """The value at a path of names with dots between; None where there is none."""
    for name in path.split("."):
        fields = fields.get(name) if isinstance(fields, Mapping) else None
    return fields


def _missing(value: Any) -> bool:
    """Whether a cell is empty: of pandas, NaN too."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _prompt(value: Any) -> str:
    """The text of a prompt, or of the one message, the user's, that it is."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        messages = [message for message in value if isinstance(message, Mapping)]
        if len(messages) != 1 or messages[0].get("role") != "user":
            raise Unusable("prompt that is not one message of the user")
        value = messages[0].get("content")
    if value is not None and not isinstance(value, str):
        raise Unusable("prompt that is not text")
    return value or ""


def _answer(value: Any) -> str:
    """An answer as text: a string, a number, or a list of one."""
    if isinstance(value, list | tuple):
        if len(value) > 1:
            raise Unusable("several answers")
        return _answer(value[0]) if value else ""
    if _missing(value):
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value in (math.inf, -math.inf):
        raise Unusable("answer that is neither text nor a number")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

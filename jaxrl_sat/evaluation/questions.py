"""The problems of an evaluation: prepared sets and plain files, rendered for one model."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxrl_sat.data import arithmetic, catalogue
from jaxrl_sat.data.loader import PromptLoader
from jaxrl_sat.data.prepare import read_examples
from jaxrl_sat.data.tokenizer import Template, Tokenizer
from jaxrl_sat.paths import user_path
from jaxrl_sat.types import InputError, Prompt

KEY = "--data"
ANY_LENGTH = 1 << 30


@dataclasses.dataclass(frozen=True)
class Question:
    """One problem: its id in its set, its text before any template, and the prompt that the model reads."""

    id: str
    problem: str
    prompt: Prompt


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """The problems of one set, in order. `checksum` is of ids, problems and answers, whatever model they are for."""

    name: str
    questions: tuple[Question, ...]

    @property
    def checksum(self) -> str:
        """SHA-256, the first 16 digits."""
        content = [(one.id, one.problem, one.prompt.answer) for one in self.questions]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is asked of each set: the first `limit` (None: all) of a split, in a template."""

    split: str
    template: Template
    limit: int | None


def read_sets(paths: Sequence[str], selection: Selection, tokenizer: Tokenizer, longest: int) -> list[QuestionSet]:
    """The sets that `paths` name, each a prepared set's folder, `arithmetic`, or a file of problems.

    Raises `InputError` for one that cannot be read or has no problems, for two of one name, for ids that stand twice
    and for a prompt of more than `longest` tokens.
    """
    sets = [_read(path, selection, tokenizer) for path in paths]
    catalogue.check_names([one.name for one in sets], KEY)
    for one in sets:
        _check(one, longest)
    return sets


def _read(path: str, selection: Selection, tokenizer: Tokenizer) -> QuestionSet:
    file = user_path(KEY, path)
    if path != arithmetic.NAME and file.is_file():
        return QuestionSet(file.stem, tuple(itertools.islice(_of_file(file, selection, tokenizer), selection.limit)))
    if path != arithmetic.NAME and not file.exists():
        allowed = f"{arithmetic.NAME}, the folder of a prepared set, or a file of problems"
        raise InputError(f"{KEY}: {path!r} does not exist; allowed: {allowed}")
    name = catalogue.read_data_set(path, KEY).name
    loader = PromptLoader(path, selection.split, tokenizer, 0, 1, ANY_LENGTH, key=KEY, template=selection.template)
    prompts = loader.eval_prompts(len(loader) if selection.limit is None else selection.limit)
    return QuestionSet(name, tuple(Question(one.problem_id, str(one.record["prompt"]), one) for one in prompts))


def _of_file(file: Path, selection: Selection, tokenizer: Tokenizer) -> Iterator[Question]:
    for index, example in enumerate(read_examples(file, split=selection.split)):
        text = tokenizer.asked(example.prompt, selection.template)
        tokens = np.asarray(tokenizer.encode(text), np.int32)
        yield Question(example.id or str(index), example.prompt, Prompt(index, text, example.answer, tokens))


def _check(one: QuestionSet, longest: int) -> None:
    if not one.questions:
        raise InputError(f"{KEY}: {one.name} has no problems; allowed: one or more")
    [(commonest, count)] = collections.Counter(question.id for question in one.questions).most_common(1)
    if count > 1:
        raise InputError(f"{KEY}: {one.name} has {count} problems with the id {commonest!r}; allowed: ids that differ")
    for question in one.questions:
        length = len(question.prompt.tokens)
        if not 0 < length <= longest:
            raise InputError(
                f"{KEY}: problem {question.id} of {one.name} has {length} tokens; allowed: 1 to {longest}, "
                "the model's positions less --max-tokens"
            )

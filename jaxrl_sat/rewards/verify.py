"""Rewards of responses: final answers found, compared as text here, and read as mathematics by a pool of workers."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from jaxrl_sat.rewards.extract import TAIL, final_answer
from jaxrl_sat.rewards.normalise import LONGEST, as_text, literal, tidy
from jaxrl_sat.rewards.pool import Outcome, Pool


def verify(response: str, answer: str) -> bool:
    """Whether the final answer of `response` is `answer`. Never raises, never executes text; at most 5 s and 512 MiB.

    `extract` says where the final answer is looked for. Numbers are compared exactly, whatever their length; formulas,
    sets, intervals and so on by what they mean (docs/verifier.md). May be called from any thread.
    """
    return outcome(response, answer) is Outcome.RIGHT


def outcome(response: str, answer: str) -> Outcome:
    """What became of one response; `verify` says whether it is right."""
    case = _case(response, answer)
    return case if isinstance(case, Outcome) else shared_pool().ask(*case)


def score(responses: Sequence[str], answers: Sequence[str]) -> Float[np.ndarray, " n"]:
    """Reward of each response, float32 [N]: 1 for the right final answer, else 0."""
    return np.array([outcome is Outcome.RIGHT for outcome in outcomes(responses, answers)], np.float32)


def outcomes(
    responses: Sequence[str],
    answers: Sequence[str],
    progress: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> list[Outcome]:
    """What became of each response, N of N. Raises `ValueError` where there are not as many answers.

    Equal cases are decided once, and those that text alone decides without a worker. `progress` is told, in any thread,
    how many of the others are done; once `stop` is set the rest are left `Outcome.OPEN`.
    """
    cases = [_case(response, answer) for response, answer in zip(responses, answers, strict=True)]
    asked = list(dict.fromkeys(case for case in cases if not isinstance(case, Outcome)))
    found = dict(zip(asked, shared_pool().map(asked, progress, stop) if asked else [], strict=True))
    return [case if isinstance(case, Outcome) else found[case] for case in cases]


def readable(answers: Sequence[str]) -> list[bool]:
    """Of each reference answer, whether it is read as mathematics or words; any other matches its own text alone."""
    asked = [("readable", "", answer) for answer in answers if len(answer) <= LONGEST]
    found = dict(zip(asked, shared_pool().map(asked), strict=True))
    return [found.get(("readable", "", answer)) is Outcome.RIGHT for answer in answers]


def shared_pool() -> Pool:
    """The pool of this process, made when first asked for and closed when the process ends."""
    return _pool_of(os.getpid())


@functools.cache
def _pool_of(process: int) -> Pool:
    pool = Pool()
    atexit.register(pool.close)
    return pool


def _case(response: str, answer: str) -> Outcome | tuple[str, str, str]:
    """The outcome where text alone gives it, otherwise the case for a worker."""
    if not isinstance(response, str) or not isinstance(answer, str):
        return Outcome.WRONG
    found = final_answer(response)
    if found is None or len(answer) > TAIL:
        return Outcome.WRONG
    if (wanted := literal(answer.strip())) is not None and (said := literal(found)) is not None:
        return Outcome.RIGHT if said == wanted else Outcome.WRONG
    found, answer = tidy(found), tidy(answer)
    equal = as_text(found, answer)
    if equal is None:
        return ("same", found, answer)
    return Outcome.RIGHT if equal else Outcome.WRONG

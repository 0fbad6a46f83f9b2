"""Problems to results: each asked so many times, answers judged as problems finish."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_sat import rewards
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.evaluation.folder import Result
from jaxrl_sat.evaluation.questions import Question
from jaxrl_sat.rewards import Outcome
from jaxrl_sat.sampler import SamplerService
from jaxrl_sat.types import Request, Rollout


def finished_groups(
    service: SamplerService, requests: Sequence[Sequence[Request]], ahead: int
) -> Iterator[tuple[int, list[Rollout]]]:
    """Each group's place in `requests` with its rollouts in the order of its requests, as groups finish.

    Requests for `ahead` responses or more are in the service at any time, so that no slot waits for another group.
    """
    to_come = iter(enumerate(requests))
    place = {id(request): (i, j) for i, group in enumerate(requests) for j, request in enumerate(group)}
    open_groups: dict[int, dict[int, Rollout]] = {}
    under_way = 0
    while True:
        while under_way < ahead and (entered := next(to_come, None)):
            service.submit_all(entered[1], keep=True)
            open_groups[entered[0]] = {}
            under_way += len(entered[1])
        if not under_way:
            return
        rollout = service.take()
        under_way -= 1
        group, sample = place[id(rollout.request)]
        open_groups[group][sample] = rollout
        if len(open_groups[group]) == len(requests[group]):
            done = open_groups.pop(group)
            yield group, [done[i] for i in range(len(done))]


def judged(
    question: Question, rollouts: Sequence[Rollout], tokenizer: Tokenizer, stops: Sequence[str], keep: bool
) -> Result:
    """What became of a problem; a response ends before the first of `stops`. `keep`: the texts too."""
    texts = [_until(tokenizer.decode(rollout.tokens), stops) for rollout in rollouts]
    outcomes = rewards.outcomes(texts, [question.prompt.answer] * len(texts))
    return Result(
        id=question.id,
        problem=question.problem,
        answer=question.prompt.answer,
        right=[outcome is Outcome.RIGHT for outcome in outcomes],
        tokens_mean=float(np.mean([len(rollout.tokens) for rollout in rollouts])),
        truncated=sum(rollout.finish_reason == "length" for rollout in rollouts),
        unjudged=sum(outcome in (Outcome.TIMED_OUT, Outcome.DIED) for outcome in outcomes),
        responses=texts if keep else None,
    )


def _until(text: str, stops: Sequence[str]) -> str:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def by_group(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that stand together and have one group number, together."""
    return [list(group) for _, group in itertools.groupby(requests, key=lambda request: request.group)]

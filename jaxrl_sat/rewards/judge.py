"""Rewards of rollouts, worked out in threads beside the sampler, so that no update waits for what could be done before.

Each response is judged on its own, by every reward function of the run in turn; nothing hangs on the order.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from jaxtyping import Float

from jaxrl_sat.rewards.example import Example
from jaxrl_sat.rewards.format import well_formed
from jaxrl_sat.rewards.functions import KEY, RewardFunction
from jaxrl_sat.rewards.plugin import PlugIn, Score
from jaxrl_sat.rewards.pool import Outcome
from jaxrl_sat.rewards.verify import outcome
from jaxrl_sat.types import InputError, Request, Rollout

POLL_SECONDS = 0.2
"""How often whoever waits for rewards looks whether it was asked to stop."""

Function = Callable[[str, str, Example], Score]


@dataclasses.dataclass(frozen=True)
class Judged:
    """What became of the responses of a batch, in their order.

    `rewards`: sums of the functions' scores by their weights. `scores`: by function, not weighted. `failures`: of the
    users' functions that gave some responses no score, how many, and why the first. `seconds`: of work, all threads'.
    """

    rewards: Float[np.ndarray, " N"]
    scores: Mapping[str, Float[np.ndarray, " N"]]
    metrics: Mapping[str, float]
    failures: Mapping[str, tuple[int, str]]
    seconds: float


class Judge:
    """The reward functions of a run. `decode` turns a response's tokens into text; `data_set` names the training set.

    Users' functions run in `workers` processes each, with `seconds` for a response. `close` ends them. Raises
    `InputError` for one that cannot be called.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        decode: Callable[[np.ndarray], str],
        data_set: str,
        workers: int,
        seconds: float,
    ):
        self._weights = {function.name: function.weight for function in functions}
        self._decode, self._data_set = decode, data_set
        self._plug_ins = {f.name: PlugIn(f.target, workers, seconds) for f in functions if f.target}
        _check(self._plug_ins)
        own: dict[str, Function] = {"math": _math, "format": _format}
        self._functions = {name: self._plug_ins.get(name) or own[name] for name in self._weights}
        threads = min(8, os.cpu_count() or 1) + workers * len(self._plug_ins)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="judge")
        self._expected: dict[int, Request] = {}
        self._begun: dict[int, tuple[Rollout, Future[tuple[list[Score], float]]]] = {}

    def expect(self, requests: list[Request]) -> list[Request]:
        """The requests themselves, whose rollouts `begin` takes from now on, and no others'."""
        self._expected = {id(request): request for request in requests}
        return requests

    def begin(self, rollout: Rollout) -> None:
        """Start to judge a rollout of an expected request. Returns at once; may be called from any thread."""
        if id(rollout.request) in self._expected:
            self._begun[id(rollout)] = (rollout, self._threads.submit(self._judge, rollout))

    def finish(self, rollouts: Sequence[Rollout], should_stop: Callable[[], bool] = lambda: False) -> Judged | None:
        """What became of rollouts that were begun, waited for; None if `should_stop()` turns true first."""
        futures = [self._begun[id(rollout)][1] for rollout in rollouts]
        waiting: set[Future[tuple[list[Score], float]]] = set(futures)
        while waiting:
            waiting = concurrent.futures.wait(waiting, POLL_SECONDS).not_done
            if waiting and should_stop():
                return None
        for rollout in rollouts:
            del self._begun[id(rollout)]
        found = [future.result() for future in futures]
        by_function = {name: [scores[i] for scores, _ in found] for i, name in enumerate(self._weights)}
        failed = _failures({name: by_function[name] for name in self._plug_ins})
        rewards, metrics = _summed(self._weights, by_function)
        scores = {name: np.array([s.value for s in one], np.float32) for name, one in by_function.items()}
        return Judged(rewards, scores, metrics, failed, sum(seconds for _, seconds in found))

    def close(self) -> None:
        """End the processes and drop what has been begun. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for plug_in in self._plug_ins.values():
            plug_in.close()
        self._threads.shutdown()

    def _judge(self, rollout: Rollout) -> tuple[list[Score], float]:
        began = time.perf_counter()
        prompt = rollout.request.prompt
        response = self._decode(rollout.tokens)
        example = Example(
            answer=prompt.answer,
            id=prompt.problem_id or str(prompt.id),
            source=prompt.source,
            data_set=self._data_set,
            record=prompt.record,
            finish_reason=rollout.finish_reason,
            num_tokens=len(rollout.tokens),
        )
        scores = [function(prompt.text, response, example) for function in self._functions.values()]
        return scores, time.perf_counter() - began


def _math(prompt: str, response: str, example: Example) -> Score:
    """1 for the right final answer: `jaxrl_sat.rewards.verify`."""
    del prompt
    found = outcome(response, example.answer)
    failure = "" if found in (Outcome.RIGHT, Outcome.WRONG) else f"the verifier {found.value}"
    return Score(float(found is Outcome.RIGHT), failure=failure)


def _format(prompt: str, response: str, example: Example) -> Score:
    """1 for the form that `jaxrl_sat.rewards.format` states."""
    del example
    return Score(float(well_formed(prompt, response)))


def check(functions: Sequence[RewardFunction], seconds: float) -> None:
    """`InputError` for a user's function that cannot be called: each is loaded in a process of its own, and let go."""
    plug_ins = {f.name: PlugIn(f.target, 1, seconds) for f in functions if f.target}
    _check(plug_ins)
    for plug_in in plug_ins.values():
        plug_in.close()


def _check(plug_ins: Mapping[str, PlugIn]) -> None:
    for name, plug_in in plug_ins.items():
        if problem := plug_in.problem():
            for one in plug_ins.values():
                one.close()
            allowed = "a function of (prompt, response, example)"
            raise InputError(f"{KEY}: {name} of {plug_in.target} cannot be used ({problem}); allowed: {allowed}")


def _summed(
    weights: Mapping[str, float], by_function: Mapping[str, list[Score]]
) -> tuple[Float[np.ndarray, " N"], dict[str, float]]:
    """Rewards and metrics. A part that a response has no score for counts as 0 in its mean, as it does in the sum."""
    values = {name: np.array([score.value for score in scores]) for name, scores in by_function.items()}
    rewards = np.sum([weight * values[name] for name, weight in weights.items()], axis=0).astype(np.float32)
    metrics = {"reward/mean": float(rewards.mean())}
    for name, scores in by_function.items():
        metrics[f"reward/{name}"] = float(values[name].mean())
        for part in dict.fromkeys(part for score in scores for part in score.parts):
            metrics[f"reward/{name}/{part}"] = float(np.mean([score.parts.get(part, 0.0) for score in scores]))
        metrics[f"reward/{name}/failed"] = sum(bool(score.failure) for score in scores)
    return rewards, metrics


def _failures(by_function: Mapping[str, list[Score]]) -> dict[str, tuple[int, str]]:
    reasons = {name: [score.failure for score in scores if score.failure] for name, scores in by_function.items()}
    return {name: (len(each), each[0]) for name, each in reasons.items() if each}

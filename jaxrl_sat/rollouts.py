"""What is made of a batch of rollouts on the host: advantages, the groups that train, metrics, and words to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxrl_sat.config import RunConfig
from jaxrl_sat.config import prompts_asked as asked
from jaxrl_sat.objectives import ADVANTAGES, overlong_shaping
from jaxrl_sat.pipeline import lag
from jaxrl_sat.pipeline.staleness import measured as measured_staleness
from jaxrl_sat.rewards.judge import Judged
from jaxrl_sat.rewards.selection import Selection, with_signal
from jaxrl_sat.types import Rollout


def groups_of(rollouts: Sequence[Rollout]) -> Int[np.ndarray, " N"]:
    """The number of each rollout's group."""
    return np.asarray([rollout.request.group for rollout in rollouts], np.int32)


def overlong(config: RunConfig, rollouts: Sequence[Rollout]) -> Float[np.ndarray, " N"]:
    """What is added to each reward for the response's length in tokens, float32, 0 or less."""
    lengths = jnp.asarray([len(rollout.tokens) for rollout in rollouts], jnp.int32)
    limits = (config.sampler.max_response_tokens, config.rewards.overlong_buffer, config.rewards.overlong_penalty)
    return np.asarray(overlong_shaping(lengths, *limits))


def advantages(
    config: RunConfig, rollouts: Sequence[Rollout], rewards: Float[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """A number a response: its reward, less what it lost by being overlong, against its group's. float32."""
    rewarded = jnp.asarray(rewards) + jnp.asarray(overlong(config, rollouts))
    form = ADVANTAGES[config.loss.advantage]
    return np.asarray(form(rewarded, jnp.asarray(groups_of(rollouts)), asked(config)))


def selection(config: RunConfig, rollouts: Sequence[Rollout], rewards: Float[np.ndarray, " N"]) -> Selection | None:
    """The responses that an update uses under dynamic sampling; None where it uses all."""
    if not config.data.dynamic_sampling:
        return None
    return with_signal(rewards, groups_of(rollouts), config.data.prompts_per_update)


def batch_metrics(
    config: RunConfig, rollouts: Sequence[Rollout], judged: Judged, selected: Selection | None, seconds: float
) -> dict[str, float]:
    """Rewards, length, truncation and sampling speed of all responses of a batch that took `seconds` to sample."""
    lengths = np.asarray([len(rollout.tokens) for rollout in rollouts])
    values = dict(judged.metrics) | {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/truncated": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        "rollout/tokens_per_s": float(lengths.sum() / seconds),
    }
    if config.rewards.overlong_buffer:
        values["reward/overlong"] = float(overlong(config, rollouts).mean())
    if selected is not None:
        values["rollout/groups_used"] = selected.groups_used
        values["rollout/groups_dropped"] = selected.groups_dropped
        values["rollout/groups_spare"] = selected.groups_spare
    return values


def modelled_lag(config: RunConfig, rollouts: Sequence[Rollout], generate_s: float, train_s: float) -> float:
    """The mean lag that the papers' model gives a free-running pipeline of these rates and lengths: SPEC 17."""
    groups: dict[int, list[int]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.request.group, []).append(len(rollout.tokens))
    queue = lag.batches_ahead(config.pipeline.mode, config.pipeline.lag) * len(rollouts)
    slots = config.sampler.engines * config.sampler.slots
    return measured_staleness(list(groups.values()), generate_s, train_s, slots, len(rollouts), queue)


def readable(
    rollouts: Sequence[Rollout],
    decode: Callable[[np.ndarray], str],
    step: int,
    judged: Judged,
    advantage: Float[np.ndarray, " N"],
) -> list[dict[str, Any]]:
    """Responses in words, with what was made of them; `rollouts` may be the first of those judged."""
    return [
        {
            "prompt": rollout.request.prompt.text,
            "response": decode(rollout.tokens),
            "answer": rollout.request.prompt.answer,
            "reward": float(judged.rewards[i]),
            "rewards": {name: float(scores[i]) for name, scores in judged.scores.items()},
            "advantage": float(advantage[i]),
            "behaviour_logp": round(float(rollout.logp.sum()), 4),
            "lag": [step - 1 - int(rollout.versions.max()), step - 1 - int(rollout.versions.min())],
            "finish_reason": rollout.finish_reason,
        }
        for i, rollout in enumerate(rollouts)
    ]

"""What a run is: all its keys, validated once, and what follows from them. The only reader of ConfigDict.

The keys and the rule of each stand in `jaxrl_sat.config_sections`; rules between keys stand at the end.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Annotated, Any

from ml_collections import ConfigDict

from jaxrl_sat import schema
from jaxrl_sat.config_sections import (
    Checkpoint,
    Count,
    Data,
    Eval,
    Learner,
    Log,
    Loss,
    Mesh,
    ModelSource,
    Objective,
    Optimizer,
    Pipeline,
    Rewards,
    Sampler,
)
from jaxrl_sat.objectives.policy_loss import PolicyLoss, needs_first_pass, needs_recomputed, needs_topk
from jaxrl_sat.objectives.recipes import RECIPES
from jaxrl_sat.pipeline import lag
from jaxrl_sat.rewards import functions
from jaxrl_sat.schema import Range
from jaxrl_sat.types import InputError, Records

PRESETS = ("cpu", "gpu", "tpu", "tpu_4b", "tpu_8b")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A whole run. Made by `from_config_dict` alone, so that what exists has been validated."""

    seed: Annotated[int, Range(0, 2**32 - 1)]
    updates: Count
    recipe: str
    model: ModelSource
    data: Data
    sampler: Sampler
    pipeline: Pipeline
    objective: Objective
    rewards: Rewards
    loss: Loss
    optimizer: Optimizer
    learner: Learner
    mesh: Mesh
    eval: Eval
    checkpoint: Checkpoint
    log: Log


def make_objective(config: RunConfig) -> PolicyLoss:
    """The policy loss that `recipe` names, with this run's parameters.

    The constant length L of "seq-mean-token-sum-norm" is the longest response allowed, as in Dr. GRPO.
    """
    try:
        made = RECIPES[config.recipe](**_set(config.objective))
    except InputError as error:
        raise InputError(f"objective.{error}") from error
    norm = float(config.sampler.max_response_tokens)
    return dataclasses.replace(made, reduce=dataclasses.replace(made.reduce, norm=norm))


def records_read(config: RunConfig, objective: PolicyLoss) -> Records:
    """Which of the sampler's records this run's learner needs."""
    return Records(
        topk=needs_topk(objective) or config.log.direction_every > 0,
        nucleus=config.learner.replay_top_p and config.sampler.top_p < 1,
    )


def recomputes(config: RunConfig, objective: PolicyLoss) -> bool:
    """Whether log-probs are recomputed at the sampling weights: the objective needs them, or the sampler scores."""
    return config.sampler.score or needs_recomputed(objective)


def extra_forwards(config: RunConfig, objective: PolicyLoss, analysed: bool) -> dict[str, int]:
    """Forward passes beside the gradient's own, by what asks for them, of an update, analysed for direction or not."""
    return {
        "reference policy": int(config.loss.kl_coef > 0),
        "reference scale of the whole update": int(needs_first_pass(objective)),
        "log-probs at the sampling weights": int(recomputes(config, objective)),
        "direction analysis": 2 * analysed,
    }


def prompts_asked(config: RunConfig) -> int:
    """The prompts that are asked for an update, of which it uses data.prompts_per_update at most."""
    return math.ceil(round(config.data.prompts_per_update * config.data.oversample, 6))


def eval_paths(config: RunConfig) -> tuple[list[str], str]:
    """The data sets that evaluations ask, and the key that names them."""
    given = [path.strip() for path in config.eval.path.split(",") if path.strip()]
    return (given, "eval.path") if given else ([config.data.path], "data.path")


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain nested dicts, as config.json holds them; parameters that the recipe does not have are left out."""
    return dataclasses.asdict(config) | {"objective": _set(config.objective)}


# ------------------------------------------------------------------------------------------------ validation


def from_config_dict(config: ConfigDict) -> RunConfig:
    """The run that `config` describes. Raises `InputError` for the first key or value that cannot be used."""
    tree = config.to_dict()
    _check_paths(tree)
    run = schema.build(RunConfig, tree)
    run = dataclasses.replace(run, objective=_resolve(run.recipe, run.objective))
    _check_together(run)
    make_objective(run)
    return run


def _check_paths(tree: Mapping[str, Any]) -> None:
    """One line for both of the folders that a preset leaves to the user."""
    wanted = {"model": "a Hugging Face checkpoint folder", "data": "a prepared data set folder"}
    lacking = [name for name in wanted if isinstance(tree.get(name), Mapping) and not tree[name].get("path", "-")]
    if lacking:
        flags = " and ".join(f"--config.{name}.path=DIR ({wanted[name]})" for name in lacking)
        keys = " and ".join(f"{name}.path" for name in lacking)
        raise InputError(f"{keys}: not given, and this preset has no default; allowed: {flags}")


def _set(objective: Objective) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(objective).items() if value is not None}


def _resolve(recipe: str, given: Objective) -> Objective:
    """The recipe's own values where `given` sets none. Raises `InputError` for what the recipe does not take."""
    if recipe not in RECIPES:
        raise InputError(f"recipe: {recipe!r}; allowed: {', '.join(sorted(RECIPES))}")
    takes = inspect.signature(RECIPES[recipe]).parameters
    for key, value in _set(given).items():
        if key not in takes:
            but = f"recipe {recipe!r} takes no {key}"
            raise InputError(f"objective.{key}: {value!r}, but {but}; allowed: {', '.join(takes)}")
    hints = dict(schema.flat_keys(Objective))
    defaults = {key: parameter.default for key, parameter in takes.items() if parameter.default is not None}
    own = {key: schema.plain(hints[key])[0](default) for key, default in defaults.items()}
    return schema.build(Objective, own | _set(given), "objective.")


def _check_together(run: RunConfig) -> None:
    lag.check(run.pipeline.mode, run.pipeline.lag)
    if run.optimizer.master_copy and run.model.dtype == "float32":
        raise InputError(
            "optimizer.master_copy: True with model.dtype 'float32', which it would only double; "
            "allowed: False, or model.dtype 'bfloat16'"
        )
    longest = run.data.max_prompt_tokens + run.sampler.max_response_tokens
    if run.learner.row_tokens < longest:
        raise InputError(
            f"learner.row_tokens: {run.learner.row_tokens}; allowed: {longest} or more "
            "(data.max_prompt_tokens + sampler.max_response_tokens, since a response never crosses rows)"
        )
    axes, chunk, kept = run.mesh.trainer, run.sampler.prefill_chunk, run.sampler.prefix_cache_bytes
    shards = axes.data * axes.fsdp * axes.expert
    if run.learner.microbatch_rows % shards:
        raise InputError(
            f"learner.microbatch_rows: {run.learner.microbatch_rows}; allowed: a multiple of {shards} "
            "(mesh.trainer.data x fsdp x expert, over which rows are spread)"
        )
    if run.learner.row_tokens % axes.context:
        raise InputError(
            f"learner.row_tokens: {run.learner.row_tokens}; allowed: a multiple of {axes.context} "
            "(mesh.trainer.context, over which a row is spread)"
        )
    _check_rewards(run)
    if chunk and (chunk < 16 or chunk & (chunk - 1)):
        allowed = "0, which reads prompts whole, or powers of two from 16"
        raise InputError(f"sampler.prefill_chunk: {chunk}; allowed: {allowed}")
    if kept and not chunk:
        raise InputError(f"sampler.prefix_cache_bytes: {kept}; allowed: 0 where sampler.prefill_chunk is 0")
    if run.sampler.slots % run.mesh.sampler.data:
        allowed = f"a multiple of {run.mesh.sampler.data} (mesh.sampler.data, over which slots are spread)"
        raise InputError(f"sampler.slots: {run.sampler.slots}; allowed: {allowed}")


def _check_rewards(run: RunConfig) -> None:
    functions.parse(run.rewards.functions)
    if run.rewards.overlong_buffer > run.sampler.max_response_tokens:
        raise InputError(
            f"rewards.overlong_buffer: {run.rewards.overlong_buffer}; allowed: at most "
            f"{run.sampler.max_response_tokens} (sampler.max_response_tokens, of which it is the end)"
        )
    if run.data.oversample > 1 and not run.data.dynamic_sampling:
        allowed = "1, or data.dynamic_sampling=true, which has a use for more"
        raise InputError(f"data.oversample: {run.data.oversample}; allowed: {allowed}")

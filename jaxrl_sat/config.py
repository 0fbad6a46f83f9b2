"""What a run is: every key with its type and what it may be, validated once. The only reader of ConfigDict.

A key's annotation is its whole rule (see `jaxrl_sat.schema`); rules between keys stand at the end.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from ml_collections import ConfigDict

from jaxrl_sat import schema
from jaxrl_sat.objectives.corrections import Trainer as KPopTrainer
from jaxrl_sat.objectives.kl import KlKind, KlLevel
from jaxrl_sat.objectives.policy_loss import PolicyLoss, needs_first_pass, needs_recomputed, needs_topk
from jaxrl_sat.objectives.radii import Scope
from jaxrl_sat.objectives.ratio import Denominator, GradMode
from jaxrl_sat.objectives.recipes import RECIPES
from jaxrl_sat.objectives.reduce import Aggregation
from jaxrl_sat.pipeline import lag
from jaxrl_sat.schema import Range
from jaxrl_sat.types import InputError, Numerics, Records

PRESETS = ("cpu", "gpu", "tpu", "tpu_4b", "tpu_8b")

Count = Annotated[int, Range(1, 10**6)]
CountOrNever = Annotated[int, Range(0, 10**6)]  # 0: never
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Decay = Annotated[float, Range(0, 1, below=True)]
Dtype = Literal["float32", "bfloat16"]
CacheDtype = Literal["float32", "bfloat16", "int8"]
Advantage = Literal["group", "centred", "rloo"]


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """`path`: "embedded" or a Hugging Face checkpoint folder. `dtype`: of the trainer's parameters.

    `excess_precision`: the compiler may leave out roundings to bfloat16 where that is faster, here in the sampler's
    programs and there in the trainer's; without it both round alike.
    """

    path: str
    dtype: Dtype
    excess_precision: bool


@dataclasses.dataclass(frozen=True)
class Data:
    """`path`: "arithmetic" or the folder of a prepared TFDS set. A prompt longer than the limit ends the run."""

    path: str
    prompts_per_update: Count
    max_prompt_tokens: Count


@dataclasses.dataclass(frozen=True)
class Sampler:
    """`engines`: so many, each on devices of its own, share the requests of a batch (serving has --workers).

    `slots`: responses that each decodes at once. `order`: a free slot is the oldest request's, or its that has most or
    fewest tokens, prompt and room for a response together. `topk`: log-probs recorded a token, at most the vocabulary.
    `top_p`: probability that the words drawn from have together (1: all words); evaluations have it too, at their own
    temperature. `nucleus`: most words it may take, at most the vocabulary; all of them are recorded with the token.
    `dtype`: of its weights, cast at the handover; `cache_dtype`: of its keys and values. `quantise`: what its layers
    multiply in, weights quantised once, at the handover. `score`: log-probs at the sampling weights are computed there,
    by the trainer's forward pass, before the update takes the batch; else by the trainer, where the objective needs
    them. `steps_per_dispatch`: tokens that each slot is sampled before the host looks at them. `prefill_chunk`: tokens
    of the pieces that longer prompts are read in; 0 reads each whole. `prefix_cache_bytes`: of pieces kept for prompts
    that begin with the same text, until the weights change, or beyond that with `keep_cache_at_swap`.
    `recompute_prompt_cache`: where weights change under way, what was read by others is read again.
    """

    group_size: Annotated[int, Range(2, 4096)]  # a group of one has no baseline: every advantage would be 0
    temperature: Positive
    top_p: Annotated[float, Range(0, 1, above=True)]
    nucleus: Count
    max_response_tokens: Annotated[int, Range(2, 10**6)]
    topk: Count
    engines: Annotated[int, Range(1, 1024)]
    slots: Count
    order: Literal["fifo", "longest", "shortest"]
    dtype: Dtype
    cache_dtype: CacheDtype
    quantise: Numerics
    score: bool
    steps_per_dispatch: Count
    prefill_chunk: CountOrNever
    prefix_cache_bytes: Annotated[int, Range(0, 2**50)]
    keep_cache_at_swap: bool
    recompute_prompt_cache: bool


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Which weights sample which batch: see `jaxrl_sat.pipeline.lag`."""

    mode: Literal["sync", "fixed", "interval"]
    lag: Annotated[int, Range(0, 1000)]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The recipe's parameters. None is a parameter that the recipe does not have."""

    eps_low: Annotated[float, Range(0, 1)] | None = None
    eps_high: NotNegative | None = None
    aggregation: Aggregation | None = None
    denominator: Denominator | None = None
    quantile: Annotated[float, Range(0, 1, above=True)] | None = None
    exponent: Positive | None = None
    q_floor: NotNegative | None = None
    scope: Scope | None = None
    grad_mode: GradMode | None = None
    cap: Annotated[float, Range(1)] | None = None
    cap_low: Annotated[float, Range(0, 1)] | None = None
    alpha: Annotated[float, Range(0, 1)] | None = None
    beta: Annotated[float, Range(1)] | None = None
    phi: NotNegative | None = None
    trainer: KPopTrainer | None = None
    zero_one: bool | None = None
    delta: Positive | None = None
    delta_high: Positive | None = None
    include_sampled: bool | None = None


@dataclasses.dataclass(frozen=True)
class Loss:
    """Advantages, and what stands beside the policy loss.

    `overlong_buffer`: over the last so many tokens of max_response_tokens the reward falls by up to `overlong_penalty`.
    `load_balance_coef`, `router_z_coef`: of the router's losses, for models with experts.
    """

    advantage: Advantage
    overlong_buffer: Annotated[int, Range(0, 10**6)]
    overlong_penalty: NotNegative
    kl_coef: NotNegative
    kl_kind: KlKind
    kl_level: KlLevel
    entropy_coef: NotNegative
    load_balance_coef: NotNegative
    router_z_coef: NotNegative


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam at a constant rate behind a clip of the gradient's global L2 norm.

    `master_copy`: update a float32 copy of bfloat16 parameters, which are then its rounding.
    """

    learning_rate: Positive
    b1: Decay
    b2: Decay
    eps: Positive
    max_grad_norm: Positive
    master_copy: bool


@dataclasses.dataclass(frozen=True)
class Learner:
    """Rows of `row_tokens` tokens, `microbatch_rows` at a time over all devices.

    `replay`: route as the sampler did. `replay_top_p`: renormalise log-probs on the nucleus it drew from. `remat`: what
    of each layer waits for the backward pass: "products", its input and all matrix products; "layer", its input alone;
    "offload", its input in the memory of the host. `quantise`: what layers multiply in, forward and backward.
    """

    row_tokens: Count
    microbatch_rows: Count
    replay: bool
    replay_top_p: bool
    remat: Literal["products", "layer", "offload"]
    quantise: Numerics


@dataclasses.dataclass(frozen=True)
class TrainerAxes:
    """Devices along each axis of the trainer's mesh.

    Rows are spread over data, fsdp and expert, and each row over context; fsdp, expert and context hold parts of the
    state, data holds copies; experts live on expert, heads and the width of layers on tensor.
    """

    data: Count
    fsdp: Count
    expert: Count
    context: Count
    tensor: Count


@dataclasses.dataclass(frozen=True)
class SamplerAxes:
    """Devices along each axis of the sampler's mesh."""

    data: Count
    expert: Count
    tensor: Count


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The two meshes; `jaxrl_sat.mesh` lays them over the devices."""

    trainer: TrainerAxes
    sampler: SamplerAxes


@dataclasses.dataclass(frozen=True)
class Eval:
    """avg@samples on the first `problems` of each set's test split every `every` updates (0: never).

    `path`: the sets, folders with commas between; empty for the one that `data.path` names.
    """

    path: str
    every: CountOrNever
    samples: Count
    problems: Count
    temperature: NotNegative


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint every `every` updates (0: only the last), the newest `keep` kept."""

    every: CountOrNever
    keep: Count


@dataclasses.dataclass(frozen=True)
class Log:
    """`rollouts` readable responses every `rollouts_every` updates (0: never).

    Every `direction_every` updates (0: never) the update's effect on the tokens' divergence is measured against what
    the ratio and the predictive mask foresaw, by two more forward passes.
    """

    rollouts_every: CountOrNever
    rollouts: Count
    direction_every: CountOrNever
    tensorboard: bool


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
    if run.loss.overlong_buffer > run.sampler.max_response_tokens:
        raise InputError(
            f"loss.overlong_buffer: {run.loss.overlong_buffer}; allowed: at most {run.sampler.max_response_tokens} "
            "(sampler.max_response_tokens, of which it is the end)"
        )
    if chunk and (chunk < 16 or chunk & (chunk - 1)):
        allowed = "0, which reads prompts whole, or powers of two from 16"
        raise InputError(f"sampler.prefill_chunk: {chunk}; allowed: {allowed}")
    if kept and not chunk:
        raise InputError(f"sampler.prefix_cache_bytes: {kept}; allowed: 0 where sampler.prefill_chunk is 0")
    if run.sampler.slots % run.mesh.sampler.data:
        allowed = f"a multiple of {run.mesh.sampler.data} (mesh.sampler.data, over which slots are spread)"
        raise InputError(f"sampler.slots: {run.sampler.slots}; allowed: {allowed}")

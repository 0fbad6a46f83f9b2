"""The groups of keys of a run: every key with its type and what it may be.

A key's annotation is its whole rule (see `jaxrl_sat.schema`); rules between keys stand in `jaxrl_sat.config`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl_sat.objectives.corrections import Trainer as KPopTrainer
from jaxrl_sat.objectives.kl import KlKind, KlLevel
from jaxrl_sat.objectives.radii import Scope
from jaxrl_sat.objectives.ratio import Denominator, GradMode
from jaxrl_sat.objectives.reduce import Aggregation
from jaxrl_sat.schema import Range
from jaxrl_sat.types import Numerics

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
    """`path`: "arithmetic" or the folder of a prepared TFDS set. A prompt longer than the limit ends the run.

    `template`: "chat", a prompt is the user's message in the tokenizer's template; "none", it is read as it stands.
    `balanced`: every update has the set's sources in the shares of their weights; else they have them in the long run.
    `workers`: processes that read ahead (0: none). `dynamic_sampling`: groups whose rewards are all equal are left out
    of the update; `oversample` times as many prompts are asked then, and the first with unequal rewards used.
    """

    path: str
    prompts_per_update: Count
    max_prompt_tokens: Count
    template: Literal["chat", "none"]
    balanced: bool
    workers: Annotated[int, Range(0, 64)]
    dynamic_sampling: bool
    oversample: Annotated[float, Range(1, 64)]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """`engines`: so many, each on devices of its own, share the requests of a batch (serving has --workers).

    `slots`: responses that each decodes at once. `order`: a free slot is the oldest request's, or its that has most or
    fewest tokens, prompt and room for a response together. `topk`: log-probs recorded a token, at most the vocabulary.
    `top_p`: probability that the words drawn from have together (1: all words); evaluations have it too, at their own
    temperature. `nucleus`: most words it may take, at most the vocabulary; all of them are recorded with the token.
    `stop_string`: text that ends a response, beside the model's own end; empty for none.
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
    stop_string: str
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
class Rewards:
    """What a response is worth (docs/rewards.md).

    `functions`: names with their weights, as in "math=1,format=0.1,my_package.rewards:brief=0.5". A user's runs in
    `workers` processes, for up to `timeout` seconds a response; where it fails, `on_failure` says whether the response
    gets 0 for it or the run stops. Over the last `overlong_buffer` tokens of max_response_tokens the reward falls by up
    to `overlong_penalty`.
    """

    functions: str
    workers: Annotated[int, Range(1, 256)]
    timeout: Positive
    on_failure: Literal["zero", "stop"]
    overlong_buffer: Annotated[int, Range(0, 10**6)]
    overlong_penalty: NotNegative


@dataclasses.dataclass(frozen=True)
class Loss:
    """Advantages, and what stands beside the policy loss.

    `load_balance_coef`, `router_z_coef`: of the router's losses, for models with experts.
    """

    advantage: Advantage
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

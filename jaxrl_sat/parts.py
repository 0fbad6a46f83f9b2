"""The parts of a run, each made from its configuration; what puts them to work is `jaxrl_sat.train` and its like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_sat import config as config_lib
from jaxrl_sat import mesh, model, optim, sampler, sources
from jaxrl_sat.config import RunConfig
from jaxrl_sat.data import packing
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.learner import Learner
from jaxrl_sat.objectives import PolicyLoss
from jaxrl_sat.pipeline.handoff import WeightStore
from jaxrl_sat.scorer import Scorer
from jaxrl_sat.step import StepSettings
from jaxrl_sat.types import Batch, InputError, Params, Rollout, SamplingParams


def load_tokenizer(config: RunConfig, model_config: model.ModelConfig) -> Tokenizer:
    """The tokenizer beside the model; `InputError` where it has words that the model does not know."""
    return tokenizer_of(config.model.path, model_config)


def tokenizer_of(path: str, model_config: model.ModelConfig, key: str = "model.path") -> Tokenizer:
    """`load_tokenizer` of the model at `path`, which `key` gave."""
    folder = sources.model_folder(path)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise InputError(
            f"{key}: the tokenizer in {folder} has {tokenizer.vocab_size} words; "
            f"allowed: {model_config.vocab_size} or fewer, the model's vocab_size"
        )
    return tokenizer


def make_learner(config: RunConfig, model_config: model.ModelConfig, meshes: mesh.Meshes) -> Learner:
    """The train step of a configuration, sharded over the trainer's mesh."""
    objective = config_lib.make_objective(config)
    settings = StepSettings(
        model=model_config,
        objective=objective,
        kl_coef=config.loss.kl_coef,
        kl_kind=config.loss.kl_kind,
        kl_level=config.loss.kl_level,
        entropy_coef=config.loss.entropy_coef,
        load_balance_coef=config.loss.load_balance_coef,
        router_z_coef=config.loss.router_z_coef,
        temperature=config.sampler.temperature,
        microbatch_rows=config.learner.microbatch_rows,
        num_segments=packing.segments_per_row(config.learner.row_tokens),
        replay=config.learner.replay,
        recomputed=config_lib.recomputes(config, objective),
        execution=model.Execution(
            layout=meshes.trainer_layout,
            remat=config.learner.remat,
            numerics=config.learner.quantise,
            excess_precision=config.model.excess_precision,
            router_sums=config.loss.load_balance_coef > 0 or config.loss.router_z_coef > 0,
            max_segments=packing.segments_per_row(config.learner.row_tokens) + 1,
        ),
    )
    optimizer = optim.make_optimizer(**dataclasses.asdict(config.optimizer))
    return Learner(settings, optimizer)


def make_engine(
    config: RunConfig,
    model_config: model.ModelConfig,
    meshes: mesh.Meshes,
    stop_ids: tuple[int, ...],
    tokenizer: Tokenizer | None = None,
    restricted: bool = False,
) -> sampler.RolloutEngine:
    """The sampling engine of a configuration on the sampler's mesh.

    `tokenizer`: for JetStream's text requests. `restricted`: requests may have a top-p or top-k of their own.
    """
    drawing = config.sampler
    sampling = SamplingParams(
        drawing.temperature,
        drawing.max_response_tokens,
        stop_ids,
        drawing.top_p,
        drawing.nucleus,
        stop_strings=(drawing.stop_string,) if drawing.stop_string else (),
    )
    return sampler.RolloutEngine(
        config=model_config,
        layout=meshes.sampler_layout,
        slots=config.sampler.slots,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.sampler.max_response_tokens,
        sampling=sampling,
        topk=min(config.sampler.topk, model_config.vocab_size),
        dtype=config.sampler.dtype,
        cache_dtype=config.sampler.cache_dtype,
        numerics=config.sampler.quantise,
        tokenizer=tokenizer,
        restricted=restricted,
        steps_per_dispatch=config.sampler.steps_per_dispatch,
        prefill_chunk=config.sampler.prefill_chunk,
        prefix_cache_bytes=config.sampler.prefix_cache_bytes,
        keep_cache_at_swap=config.sampler.keep_cache_at_swap,
        recompute_prompt_cache=config.sampler.recompute_prompt_cache,
        excess_precision=config.model.excess_precision,
    )


def make_fleet(
    config: RunConfig, model_config: model.ModelConfig, meshes: mesh.Meshes, stop_ids: tuple[int, ...]
) -> sampler.Fleet:
    """All sampling engines of a configuration, each on its mesh."""
    engines = tuple(make_engine(config, model_config, one, stop_ids) for one in meshes.of_engines)
    return sampler.Fleet(engines, config.sampler.order)


def packed_rows(config: RunConfig, objective: PolicyLoss, rollouts: Sequence[Rollout], advantage: np.ndarray) -> Batch:
    """The rollouts in rows; which row each is in does not hang on its advantage."""
    records = config_lib.records_read(config, objective)
    return packing.pack(rollouts, advantage, config.learner.row_tokens, config.learner.microbatch_rows, records)


def relaid(config: RunConfig, logp: np.ndarray, rollouts: Sequence[Rollout], used: np.ndarray, rows: int) -> np.ndarray:
    """`logp` of the packed rows of all `rollouts` as it stands in the `rows` packed rows of those `used`, else 0."""
    where = _response_places(config, rollouts)
    laid = np.zeros((rows, config.learner.row_tokens), logp.dtype)
    for index, place in zip(used.tolist(), _response_places(config, [rollouts[i] for i in used]), strict=True):
        laid[place] = logp[where[index]]
    return laid


def _response_places(config: RunConfig, rollouts: Sequence[Rollout]) -> list[tuple[int, slice]]:
    """The row and the positions in it of each response's tokens, as `packing.pack` lays them."""
    prompts = [len(rollout.request.prompt.tokens) for rollout in rollouts]
    lengths = [prompt + len(rollout.tokens) for prompt, rollout in zip(prompts, rollouts, strict=True)]
    row_tokens = config.learner.row_tokens
    places: dict[int, tuple[int, slice]] = {}
    for row, members in enumerate(packing.place(lengths, row_tokens, packing.segments_per_row(row_tokens))):
        start = 0
        for index in members:
            places[index] = (row, slice(start + prompts[index], start + lengths[index]))
            start += lengths[index]
    return [places[index] for index in range(len(rollouts))]


def sampled_by(store: WeightStore[sampler.FleetWeights], packed: Batch) -> dict[int, Params]:
    """The parameters that sampled the tokens of a batch, by version."""
    return {int(v): store.trainer_params(int(v)) for v in np.unique(packed.versions[packed.mask])}


def make_score(
    config: RunConfig, learner: Learner, meshes: mesh.Meshes, store: WeightStore[sampler.FleetWeights]
) -> Callable[[list[Rollout]], np.ndarray]:
    """Log-probs of rollouts in packed rows, by the trainer's forward pass on the (first) sampler's mesh."""
    execution = dataclasses.replace(learner.settings.execution, layout=meshes.sampler_layout)
    scorer = Scorer(dataclasses.replace(learner.settings, execution=execution))

    def score(rollouts: list[Rollout]) -> np.ndarray:
        packed = packed_rows(config, learner.settings.objective, rollouts, np.zeros(len(rollouts), np.float32))
        versions = {v: scorer.place_params(params) for v, params in sampled_by(store, packed).items()}
        return np.asarray(scorer.logp(scorer.place(packed), versions))

    return score

"""No key is decoration: a change of any one alters the plan of the dry run or the lowered train or generate step."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from jaxrl_sat import mesh, model, optim, parts, plan, schema, sources
from jaxrl_sat.config import RunConfig, from_config_dict, make_objective, records_read
from jaxrl_sat.learner import Learner
from jaxrl_sat.objectives import make_evidence, normalise, policy_loss
from jaxrl_sat.types import Batch, RouterTrace, TrainState
from tests.run_configs import data_folder, model_folder, small

OTHER: dict[str, Any] = {
    "seed": 1,
    "updates": 200,
    "recipe": "grpo",
    "model.path": "other_model",
    "model.dtype": "bfloat16",
    "model.excess_precision": True,
    "data.path": "other_data",
    "data.prompts_per_update": 8,
    "data.max_prompt_tokens": 33,
    "data.template": "none",
    "data.balanced": True,
    "data.workers": 2,
    "data.dynamic_sampling": True,
    "data.oversample": 1.5,
    "sampler.group_size": 8,
    "sampler.temperature": 0.9,
    "sampler.top_p": 0.9,
    "sampler.nucleus": 16,
    "sampler.max_response_tokens": 12,
    "sampler.stop_string": "\n",
    "sampler.topk": 10,
    "sampler.engines": 2,
    "sampler.slots": 4,
    "sampler.order": "longest",
    "sampler.dtype": "bfloat16",
    "sampler.cache_dtype": "bfloat16",
    "sampler.quantise": "fp8",
    "sampler.score": True,
    "sampler.steps_per_dispatch": 4,
    "sampler.prefill_chunk": 32,
    "sampler.prefix_cache_bytes": 10**6,
    "sampler.keep_cache_at_swap": True,
    "sampler.recompute_prompt_cache": True,
    "pipeline.mode": "fixed",
    "pipeline.lag": 2,
    "objective.eps_low": 0.1,
    "objective.eps_high": 0.3,
    "objective.aggregation": "seq-mean-token-mean",
    "objective.denominator": "recomputed",
    "objective.quantile": 0.8,
    "objective.exponent": 3.0,
    "objective.q_floor": 0.01,
    "objective.scope": "update",
    "objective.grad_mode": "token",
    "objective.cap": 3.0,
    "objective.cap_low": 0.1,
    "objective.alpha": 0.6,
    "objective.beta": 4.0,
    "objective.phi": 0.1,
    "objective.trainer": "current",
    "objective.zero_one": True,
    "objective.delta": 0.1,
    "objective.delta_high": 0.2,
    "objective.include_sampled": False,
    "rewards.functions": "math,format=0.1",
    "rewards.workers": 3,
    "rewards.timeout": 5.0,
    "rewards.on_failure": "stop",
    "rewards.overlong_buffer": 4,
    "rewards.overlong_penalty": 0.5,
    "loss.kl_coef": 0.01,
    "loss.kl_kind": "k2",
    "loss.entropy_coef": 0.01,
    "loss.load_balance_coef": 0.01,
    "loss.router_z_coef": 0.01,
    "loss.advantage": "rloo",
    "loss.kl_level": "sequence",
    "optimizer.learning_rate": 1e-3,
    "optimizer.b1": 0.8,
    "optimizer.b2": 0.9,
    "optimizer.eps": 1e-6,
    "optimizer.max_grad_norm": 2.0,
    "optimizer.master_copy": True,
    "learner.row_tokens": 96,
    "learner.microbatch_rows": 2,
    "learner.replay": False,
    "learner.replay_top_p": False,
    "learner.remat": "layer",
    "learner.quantise": "fp8",
    "mesh.trainer.data": 2,
    "mesh.trainer.fsdp": 2,
    "mesh.trainer.expert": 2,
    "mesh.trainer.context": 2,
    "mesh.trainer.tensor": 2,
    "mesh.sampler.data": 2,
    "mesh.sampler.expert": 2,
    "mesh.sampler.tensor": 2,
    "eval.every": 40,
    "eval.path": "other_data",
    "eval.samples": 4,
    "eval.problems": 100,
    "eval.temperature": 0.0,
    "checkpoint.every": 40,
    "checkpoint.keep": 3,
    "log.rollouts_every": 40,
    "log.rollouts": 8,
    "log.direction_every": 40,
    "log.tensorboard": False,
}
"""A value for each key that is not the flagship's."""

STARTING_FROM = {
    # What the flagship's recipe has no parameter for.
    "objective.grad_mode": {"recipe": "sat_gspo"},
    "objective.cap": {"recipe": "grpo_tis"},
    "objective.cap_low": {"recipe": "grpo_tis"},
    "objective.alpha": {"recipe": "icepop"},
    "objective.beta": {"recipe": "icepop"},
    "objective.zero_one": {"recipe": "icepop"},
    "objective.phi": {"recipe": "kpop"},
    "objective.trainer": {"recipe": "kpop"},
    "objective.delta": {"recipe": "dppo"},
    "objective.delta_high": {"recipe": "dppo"},
    "objective.include_sampled": {"recipe": "dppo_topk_kl"},
    "rewards.overlong_penalty": {"rewards.overlong_buffer": 4},
    "data.oversample": {"data.dynamic_sampling": True},
    # What only a user's function has.
    "rewards.workers": {"rewards.functions": "math,my_rewards.py:brief"},
    "rewards.timeout": {"rewards.functions": "math,my_rewards.py:brief"},
    "rewards.on_failure": {"rewards.functions": "math,my_rewards.py:brief"},
    "learner.replay_top_p": {"sampler.top_p": 0.9},
    "sampler.nucleus": {"sampler.top_p": 0.9},
    "sampler.prefix_cache_bytes": {"sampler.prefill_chunk": 16},
    "sampler.keep_cache_at_swap": {"sampler.prefill_chunk": 16, "sampler.prefix_cache_bytes": 10**6},
    "optimizer.master_copy": {"model.dtype": "bfloat16"},
    "pipeline.mode": {"pipeline.lag": 2},  # at lag 1 fixed and interval are one schedule
    "loss.load_balance_coef": {"model.path": "moe"},
    "loss.router_z_coef": {"model.path": "moe"},
    "learner.replay": {"model.path": "moe"},  # a dense model, which traces in half the time, has no routing to replay
}
"""What else than the flagship a key is changed in."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keys")
    model_folder(root / "model", num_hidden_layers=1, num_experts=0)
    model_folder(root / "moe", num_hidden_layers=1)
    model_folder(root / "other_model", num_hidden_layers=1, vocab_size=48)
    data_folder(root / "other_data")
    return root


def configured(folders: Path, changes: dict[str, Any]) -> RunConfig:
    config: ConfigDict = small(folders / "model")
    paths = {key: str(folders / changes[key]) for key in ("model.path", "data.path", "eval.path") if key in changes}
    config.update_from_flattened_dict(changes | paths)
    return from_config_dict(config)


def planned(config: RunConfig) -> dict[str, Any]:
    """The plan without what merely repeats the config."""
    model_config = sources.read_model_config(config.model.path)
    figures = plan.plan(config, model_config)
    del figures["learner"]["objective"], figures["lag"]["version that samples update j"]
    meshes = plan.meshes(config)
    return figures | {"devices": [meshes["devices wanted"], meshes["trainer"]["devices"], meshes["sampler"]["devices"]]}


def made_learner(config: RunConfig) -> Learner:
    model_config = sources.read_model_config(config.model.path)
    return parts.make_learner(config, model_config, mesh.make_meshes(config, jax.devices()))


def lowered_objective(config: RunConfig) -> str:
    """The loss that the learner was given, and its gradient, as they go to the compiler."""
    objective = made_learner(config).settings.objective
    row = jnp.zeros((1, 4))
    words = jnp.zeros((1, 4, 2))
    evidence = make_evidence(
        row,
        row,
        row,
        row == 0,
        topk_ids=words.astype(jnp.int32),
        topk_logp=words,
        topk_logp_mu=words,
        vocab_size=32,
    )

    def loss(logp: jax.Array) -> jax.Array:
        out = policy_loss(objective, dataclasses.replace(evidence, logp=logp))
        return normalise(out.loss_sum, out.count)

    return jax.jit(jax.value_and_grad(loss)).lower(row).as_text()


def lowered_step(config: RunConfig) -> str:
    """The train step as it goes to the compiler."""
    model_config, learner = sources.read_model_config(config.model.path), made_learner(config)
    params = model.abstract_params(model_config, config.model.dtype)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    optimizer = optim.make_optimizer(**dataclasses.asdict(config.optimizer))
    state = TrainState(params=params, opt_state=jax.eval_shape(optimizer.init, params), step=scalar, skipped=scalar)
    return learner.trace(state, abstract_batch(config, model_config)).lower().as_text()


def abstract_batch(config: RunConfig, model_config: model.ModelConfig) -> Batch:
    shape = (config.learner.microbatch_rows, config.learner.row_tokens)
    array = functools.partial(jax.ShapeDtypeStruct, shape)
    topk = config.sampler.topk if records_read(config, make_objective(config)).topk else 0
    experts = (model_config.num_sparse_layers, *shape, model_config.num_experts_per_tok)
    return Batch(
        tokens=array(jnp.int32),
        positions=array(jnp.int32),
        segment_ids=array(jnp.int32),
        mask=array(jnp.bool_),
        behaviour_logp=array(jnp.float32),
        advantages=array(jnp.float32),
        versions=array(jnp.int32),
        topk_ids=jax.ShapeDtypeStruct((*shape, topk), jnp.int32),
        topk_logp=jax.ShapeDtypeStruct((*shape, topk), jnp.float32),
        nucleus_ids=jax.ShapeDtypeStruct((*shape, 0), jnp.int32),
        routing=RouterTrace(expert_ids=jax.ShapeDtypeStruct(experts, jnp.uint8), valid=array(jnp.bool_)),
    )


class Before:
    """Plan and programs of a starting point, each worked out once."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.plan = planned(config)

    @functools.cached_property
    def step(self) -> str:
        return lowered_step(self.config)

    @functools.cached_property
    def objective(self) -> str:
        return lowered_objective(self.config)


@pytest.fixture(scope="module")
def starting_points(folders: Path) -> dict[str, Before]:
    points = {key: Before(configured(folders, changes)) for key, changes in STARTING_FROM.items()}
    return points | {"": Before(configured(folders, {}))}


def test_the_walk_knows_every_key() -> None:
    assert sorted(OTHER) == sorted(key for key, _ in schema.flat_keys(RunConfig))


@pytest.mark.parametrize("key", OTHER)
def test_key_changes_the_run(folders: Path, starting_points: dict[str, Before], key: str) -> None:
    before = starting_points.get(key, starting_points[""])
    after = configured(folders, STARTING_FROM.get(key, {}) | {key: OTHER[key]})
    assert before.config != after
    if before.plan == planned(after):
        if key.startswith("objective."):
            assert lowered_objective(after) != before.objective, f"{key} is read by nothing"
        else:
            assert lowered_step(after) != before.step, f"{key} is read by nothing"

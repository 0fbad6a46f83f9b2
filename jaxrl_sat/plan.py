"""The plan of a run, worked out without starting it: what --dry-run prints.

Every figure follows from the config and the model's config.json, so a run for 128 chips can be planned on a laptop.
Of the user's reward functions it is seen that they can be called.
Bytes are whole-run totals unless they say "a device", and hold parameters, optimizer, caches and records, not
activations.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import config as config_lib
from jaxrl_sat import mesh, model, sources
from jaxrl_sat.config import RunConfig
from jaxrl_sat.data import catalogue, packing
from jaxrl_sat.objectives import ADVANTAGES, PolicyLoss, overlong_shaping
from jaxrl_sat.pipeline import lag, requests
from jaxrl_sat.rewards import functions, judge
from jaxrl_sat.schedule import due
from jaxrl_sat.types import Prompt

SHOWN = 12
"""Updates of the lag schedule that are written out."""

TURNS = {
    "fifo": "the oldest request",
    "longest": "the request with most prompt tokens and room for a response",
    "shortest": "the request with fewest prompt tokens and room for a response",
}
"""`sampler.order` in words."""


def render(config: RunConfig, preset: str) -> str:
    """The resolved config, the meshes and the plan as one JSON document. Raises `InputError` as the run would."""
    model_config = sources.read_model_config(config.model.path)
    mesh.check_fits(config, model_config)
    judge.check(functions.parse(config.rewards.functions), config.rewards.timeout)
    document = {
        "preset": preset,
        "config": config_lib.to_dict(config),
        "meshes": meshes(config),
        "plan": plan(config, model_config),
    }
    return json.dumps(document, indent=2)


def meshes(config: RunConfig) -> dict[str, Any]:
    """Axes and devices of both meshes, and of each engine where several sample; whether one device will do."""
    axes, wanted = mesh.axes(config), mesh.devices_wanted(config)
    sizes = {name: math.prod(axes[name].values()) for name in axes}
    shared = "both share it in turns" if wanted == 2 else "not enough"
    firsts = range(sizes["trainer"], wanted, sizes["sampler"])
    each = [f"{first} to {first + sizes['sampler'] - 1}" for first in firsts]
    return {
        "trainer": {"axes": axes["trainer"], "devices": f"0 to {sizes['trainer'] - 1}"},
        "sampler": {"axes": axes["sampler"], "devices": f"{sizes['trainer']} to {wanted - 1}", "engines": each},
        "devices wanted": wanted,
        "with a single device": shared,
    }


def plan(config: RunConfig, model_config: model.ModelConfig) -> dict[str, Any]:
    """What the run will do, in figures that follow from the config and are not in it."""
    parameters = jax.tree.leaves(model.abstract_params(model_config, config.model.dtype))
    copy = _bytes(parameters)
    return {
        "model": {
            "type": model_config.to_hf()["model_type"],
            "layers": model_config.num_hidden_layers,
            "layers with experts": model_config.num_sparse_layers,
            "parameters": sum(math.prod(array.shape) for array in parameters),
            "bytes": copy,
            "roundings to bfloat16": "some left out" if config.model.excess_precision else "all",
            "longest sequence": config.data.max_prompt_tokens + config.sampler.max_response_tokens,
            "positions it knows": model_config.max_position_embeddings,
        },
        "data": _data(config),
        "rollouts": _rollouts(config, model_config),
        "rewards": _rewards(config),
        "learner": _learner(config, model_config),
        "lag": _lag(config),
        "evaluation": _evaluation(config),
        "steps": _steps(config),
        "memory": _memory(config, model_config, copy),
        "seeds": _seeds(config),
    }


def _data(config: RunConfig) -> dict[str, Any]:
    data_set = catalogue.read_data_set(config.data.path)
    problems = data_set.problems
    drawn = config.updates * config_lib.prompts_asked(config)
    return {
        "set": data_set.name,
        "made by": "the user" if data_set.folder else "the run itself, once",
        "problems": problems,
        "prompts drawn": drawn,
        "a prompt is read": "as it stands" if config.data.template == "none" else "in the tokenizer's chat template",
        "sources share": "every update" if config.data.balanced else "every epoch",
        "processes that read ahead": config.data.workers,
        "epochs": round(drawn / problems["train"], 3) if problems.get("train") else None,
    }


def _responses(config: RunConfig) -> int:
    """Those that an update uses at most."""
    return config.data.prompts_per_update * config.sampler.group_size


def _rollouts(config: RunConfig, model_config: model.ModelConfig) -> dict[str, Any]:
    topk = min(config.sampler.topk, model_config.vocab_size)
    experts = model_config.num_sparse_layers * model_config.num_experts_per_tok
    plain = 12 + 8 * topk + experts * (1 if model_config.num_experts <= 256 else 2)
    nucleus = min(config.sampler.nucleus, model_config.vocab_size) if config.sampler.top_p < 1 else 0
    record = plain + 4 * nucleus
    prompts = config_lib.prompts_asked(config)
    responses = prompts * config.sampler.group_size
    return {
        "responses an update": responses,
        "new tokens an update at most": responses * config.sampler.max_response_tokens,
        "prefilled tokens an update at most": prompts * config.data.max_prompt_tokens,
        "tokens of a slot a dispatch": config.sampler.steps_per_dispatch,
        "prompts are read": _reading(config),
        "responses a slot": round(responses / (config.sampler.engines * config.sampler.slots), 3),
        "a response ends at": _ends(config),
        "a free slot is given to": TURNS[config.sampler.order],
        "log-probs recorded a token": topk,
        "words of a nucleus at most": nucleus,
        "record bytes a token at most": record,
        "record bytes a token without a nucleus": plain,
        "record bytes an update at most": record * responses * config.sampler.max_response_tokens,
    }


def _ends(config: RunConfig) -> str:
    text = config.sampler.stop_string
    return "the model's end of text" + (f" or {text!r}" if text else "")


def _rewards(config: RunConfig) -> dict[str, Any]:
    given, used = functions.parse(config.rewards.functions), config.rewards
    users = [function for function in given if function.target]
    longest, lengths = config.sampler.max_response_tokens, jnp.asarray([config.sampler.max_response_tokens])
    shaping = overlong_shaping(lengths, longest, used.overlong_buffer, used.overlong_penalty)
    processes = f"{used.workers} processes each, up to {used.timeout:g} s a response"
    failure = {"zero": "counts as 0", "stop": "ends the run"}[used.on_failure]
    names = ", ".join(["reward/mean", *(f"reward/{function.name}" for function in given)])
    most = f"the first {config.data.prompts_per_update} of {config_lib.prompts_asked(config)} with unequal rewards"
    return {
        "reward": " + ".join(f"{function.weight:g} {function.name}" for function in given),
        "metrics": names + (", reward/overlong" if used.overlong_buffer else ""),
        "users' functions": {function.name: function.target for function in users},
        "they run in": processes if users else None,
        "one that fails": failure if users else None,
        "added for the length of the longest response": float(shaping[0]),
        "groups an update uses": most if config.data.dynamic_sampling else "all",
    }


def _reading(config: RunConfig) -> str:
    drawing = config.sampler
    text = f"in pieces of {drawing.prefill_chunk} tokens" if drawing.prefill_chunk else "whole"
    if drawing.prefix_cache_bytes:
        until = "" if drawing.keep_cache_at_swap else " until the weights change"
        text += f", shared beginnings once{until}"
    return text + (", and again where weights change under way" if drawing.recompute_prompt_cache else "")


def _learner(config: RunConfig, model_config: model.ModelConfig) -> dict[str, Any]:
    longest = config.data.max_prompt_tokens + config.sampler.max_response_tokens
    rows = math.ceil(_responses(config) / (config.learner.row_tokens // longest))
    objective = config_lib.make_objective(config)
    one_right = jnp.zeros(config.sampler.group_size).at[0].set(1.0)
    one_group = jnp.zeros(config.sampler.group_size, jnp.int32)
    advantages = ADVANTAGES[config.loss.advantage](one_right, one_group, 1)
    return {
        "optimizer steps": config.updates,
        "rows an update at most": rows,
        "microbatches an update at most": math.ceil(rows / config.learner.microbatch_rows),
        "tokens a microbatch": config.learner.microbatch_rows * config.learner.row_tokens,
        "responses a row at most": packing.segments_per_row(config.learner.row_tokens),
        "objective": str(objective),
        "records it reads": _records(config, objective),
        "advantage of the only right answer of a group": round(float(advantages[0]), 4),
        "extra forward passes an update at most": config_lib.extra_forwards(
            config, objective, config.log.direction_every > 0
        ),
    }


def _records(config: RunConfig, objective: PolicyLoss) -> str:
    records = config_lib.records_read(config, objective)
    read = {"behaviour log-probs": True, "top-K log-probs": records.topk, "nucleus": records.nucleus}
    read |= {"expert ids": config.learner.replay}
    return ", ".join(name for name, used in read.items() if used)


def _lag(config: RunConfig) -> dict[str, Any]:
    schedule = (config.pipeline.mode, config.pipeline.lag)
    versions = [lag.behaviour_version(*schedule, update) for update in range(config.updates)]
    realised = [update - version for update, version in enumerate(versions)]
    n = config.pipeline.lag
    rules = {"sync": "j", "fixed": f"max(0, j - {n})", "interval": f"{n} floor(max(0, j - 1) / {n})"}
    return {
        "version that samples update j": rules[config.pipeline.mode],
        "version that samples each of the first updates": " ".join(map(str, versions[:SHOWN])),
        "realised lag of the first updates": " ".join(map(str, realised[:SHOWN])),
        "realised lag, mean": round(sum(realised) / len(realised), 3),
        "realised lag, most": max(realised),
        "handoffs to the sampler": len(set(versions)),
        "versions in flight at most": _versions_in_flight(config),
    }


def _versions_in_flight(config: RunConfig) -> int:
    last = min(config.updates, 3 * config.pipeline.lag + 2)
    return max(len(lag.versions_needed(config.pipeline.mode, config.pipeline.lag, update)) for update in range(last))


def _evaluation(config: RunConfig) -> dict[str, Any]:
    sets = catalogue.read_data_sets(*config_lib.eval_paths(config))
    problems = sum(min(config.eval.problems, each.problems.get("test", config.eval.problems)) for each in sets)
    return {
        "metrics": ", ".join(f"eval/{each.name}/avg_at_{config.eval.samples}" for each in sets),
        "problems": problems,
        "responses": problems * config.eval.samples,
        "drawn": _drawn(config.eval.temperature, config.sampler.top_p),
    }


def _drawn(temperature: float, top_p: float) -> str:
    if not temperature:
        return "greedily"
    return f"at temperature {temperature:g}" + (f", top-p {top_p:g}" if top_p < 1 else "")


def _steps(config: RunConfig) -> dict[str, Any]:
    evaluations = due(config.eval.every, config.updates)
    checkpoints = due(config.checkpoint.every, config.updates) or [config.updates]
    rollouts = due(config.log.rollouts_every, config.updates)
    each = min(config.log.rollouts, _responses(config))
    return {
        "evaluations": _short([0, *evaluations] if evaluations else []),
        "checkpoints": _short(checkpoints),
        "checkpoints kept at the end": _short(checkpoints[-config.checkpoint.keep :]),
        "readable rollouts": _short(rollouts),
        "direction analyses": _short(due(config.log.direction_every, config.updates)),
        "readable rollouts in all": each * len(rollouts),
        "written beside": "config.json, metrics.jsonl" + (", tensorboard/" if config.log.tensorboard else ""),
    }


def _short(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(map(str, steps)) or "never"
    return f"{steps[0]}, {steps[1]}, {steps[2]}, ... {steps[-1]} ({len(steps)} in all)"


def _memory(config: RunConfig, model_config: model.ModelConfig, copy: int) -> dict[str, Any]:
    """`copy`: bytes of the parameters once."""
    versions = _versions_in_flight(config)
    params = model.abstract_params(model_config, config.model.dtype)
    handed = (config.sampler.dtype, config.sampler.quantise)
    # While a version is handed over it stands on the sampler once more, as it comes from the trainer.
    sampled = versions * _bytes(jax.eval_shape(lambda tree: model.decode_params(tree, *handed), params)) + copy
    reference = copy if config.loss.kl_coef else 0
    sampler, engines = config.mesh.sampler, config.sampler.engines
    # A prompt takes a bucket in the cache: the next power of two, from 16.
    length = max(16, 1 << (config.data.max_prompt_tokens - 1).bit_length()) + config.sampler.max_response_tokens
    cache_bytes = _bytes(
        jax.eval_shape(
            lambda: model.init_cache(
                model_config,
                config.sampler.slots,
                length,
                config.sampler.cache_dtype,
                model.Execution(mesh.abstract_layout(config, "sampler")),
            )
        )
    )
    shared_bytes = config.sampler.prefix_cache_bytes
    wide = _bytes(model.abstract_params(model_config, "float32"))  # moments and gradients are float32 always
    master = wide if config.optimizer.master_copy else 0
    state = copy + 3 * wide + master + reference + versions * copy
    kept = 2 * wide + master + versions * copy
    return {
        "parameters, Adam's moments and gradient": copy + 3 * wide,
        "float32 master copy": master,
        "reference policy": reference,
        "trainer's copies of the versions in flight": versions * copy,
        "trainer, a device": math.ceil(state * _share(config, model_config, "trainer")),
        "sampler's copies of the versions in flight": engines * sampled,
        "sampler's cache": engines * cache_bytes,
        "sampler's cache of shared beginnings": engines * shared_bytes,
        "sampler, a device": math.ceil(
            sampled * _share(config, model_config, "sampler")
            + cache_bytes / (sampler.data * sampler.tensor)
            + shared_bytes / sampler.tensor
        ),
        "checkpoint on disk": kept,
        "checkpoints on disk": kept * config.checkpoint.keep,
    }


def _share(config: RunConfig, model_config: model.ModelConfig, side: str) -> float:
    """The part of the parameters that a device of one mesh holds."""
    layout = mesh.abstract_layout(config, side)
    shapes = jax.tree.leaves(model.abstract_params(model_config))
    specs = jax.tree.leaves(model.param_specs(model_config, layout))
    held = sum(
        math.prod(shape.shape) / math.prod(layout.ways(cut) for cut in spec)
        for shape, spec in zip(shapes, specs, strict=True)
    )
    return held / sum(math.prod(shape.shape) for shape in shapes)


def _bytes(tree: Any) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(tree))


def _seeds(config: RunConfig) -> dict[str, Any]:
    nothing = [Prompt(0, "", "", np.zeros(0, np.int32))]
    first = requests.training_requests(nothing, config.sampler.group_size, config.seed, 0)
    judged = requests.evaluation_requests(nothing, config.eval.samples, config.seed)
    return {
        "first responses of update 0": " ".join(str(request.seed) for request in first[:3]),
        "first responses of every evaluation": " ".join(str(request.seed) for request in judged[:3]),
    }

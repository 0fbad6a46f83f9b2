"""The programs of a run, traced for devices that are not there, with the bytes that their state should take."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_sat import config as config_lib
from jaxrl_sat import mesh, model, parts
from jaxrl_sat.aot.topology import Topology
from jaxrl_sat.config import RunConfig
from jaxrl_sat.data import packing
from jaxrl_sat.types import Batch, InputError, RouterTrace

TRAIN, GENERATE, PREFILL = "train", "generate", "prefill"


@dataclasses.dataclass(frozen=True)
class Program:
    """What is to be compiled. `tokens`: processed at once, or for decoding held in the cache, on all devices together.

    `microbatches`: one after the other, `rows` rows each.
    `state`: bytes a device of what the program holds throughout, from shapes and shardings alone.
    `model_flops`: of all devices together, as the mathematics has it: nothing recomputed, one pass forward each and
    one backward where there is a gradient.
    """

    name: str
    rows: int
    microbatches: int
    tokens: int
    mesh: dict[str, int]
    state: dict[str, int]
    model_flops: float
    trace: Callable[[], jax.stages.Traced]


def over_slices(config: RunConfig, topology: Topology) -> RunConfig:
    """The config with its data axes repeated over the slices, where its meshes are as large as one slice alone."""
    one = len(topology.devices) // topology.slices
    trainer, sampler = (math.prod(sizes.values()) for sizes in mesh.axes(config).values())
    if topology.slices == 1:
        return config

    def times(part: Any, **counts: int) -> Any:
        return dataclasses.replace(part, **{key: value * topology.slices for key, value in counts.items()})

    axes, learner, drawing = config.mesh, config.learner, config.sampler
    if trainer == one:
        axes = dataclasses.replace(axes, trainer=times(axes.trainer, data=axes.trainer.data))
        learner = times(learner, microbatch_rows=learner.microbatch_rows)
    if sampler == one:
        axes = dataclasses.replace(axes, sampler=times(axes.sampler, data=axes.sampler.data))
        drawing = times(drawing, slots=drawing.slots)
    return dataclasses.replace(config, mesh=axes, learner=learner, sampler=drawing)


def check_devices(config: RunConfig, topology: Topology, name: str) -> None:
    """Raise `InputError` where the mesh of the program `name` is not as large as the topology."""
    side = "trainer" if name == TRAIN else "sampler"
    sizes = mesh.axes(config)[side]
    given, wanted = math.prod(sizes.values()), len(topology.devices)
    if given != wanted:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
        raise InputError(
            f"mesh.{side}: {product} is {given} devices; allowed: mesh.{side}.* with product {wanted}, the devices of "
            f"{slices}{topology.name} (--program leaves out what is not to be compiled for it)"
        )


def make(
    name: str, config: RunConfig, model_config: model.ModelConfig, topology: Topology, microbatches: int | None
) -> Program:
    """The program `name` of a run on all devices of a topology. `microbatches`: of an update; None: the most."""
    check_devices(config, topology, name)
    side = "trainer" if name == TRAIN else "sampler"
    sizes = mesh.axes(config)[side]
    grid = mesh.device_mesh(side, sizes, topology.devices)
    meshes = mesh.Meshes(trainer=grid, samplers=(grid,), colocated=True)
    if name == TRAIN:
        return _train(config, model_config, meshes, sizes, microbatches or most_microbatches(config))
    return _sampling(name, config, model_config, meshes, sizes)


def most_microbatches(config: RunConfig) -> int:
    """Of an update whose responses are all as long as they may be."""
    longest = config.data.max_prompt_tokens + config.sampler.max_response_tokens
    responses = config.data.prompts_per_update * config.sampler.group_size
    rows = math.ceil(responses / (config.learner.row_tokens // longest))
    return packing.bucketed(math.ceil(rows / config.learner.microbatch_rows))


# ------------------------------------------------------------------------------------------------- the train step


def _train(
    config: RunConfig, model_config: model.ModelConfig, meshes: mesh.Meshes, sizes: dict[str, int], microbatches: int
) -> Program:
    learner = parts.make_learner(config, model_config, meshes)
    state = learner.abstract(model.abstract_params(model_config, config.model.dtype))
    rows = config.learner.microbatch_rows
    shapes = batch_shapes(config, model_config, microbatches * rows)
    batch = _placed(shapes, learner.scorer.batch_shardings(shapes))
    gradient = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), state.params)
    tokens = rows * config.learner.row_tokens
    extra = config_lib.extra_forwards(config, learner.settings.objective, False)
    passes = 3 + sum(extra.values()) - extra["log-probs at the sampling weights"]  # which are a program of their own
    return Program(
        name=TRAIN,
        rows=rows,
        microbatches=microbatches,
        tokens=tokens,
        mesh=sizes,
        state={
            "parameters": device_bytes(state.params),
            "updated parameters": device_bytes(state.params),
            "reference policy": device_bytes(state.params) if config.loss.kl_coef else 0,
            "optimizer": device_bytes(state.opt_state),
            "gradient": device_bytes(gradient),
            "batch": device_bytes(batch),
        },
        model_flops=passes * microbatches * _forward_flops(model_config, rows, config.learner.row_tokens),
        trace=lambda: learner.trace(state, batch),
    )


def batch_shapes(config: RunConfig, model_config: model.ModelConfig, rows: int) -> Batch:
    """Shapes and dtypes of a packed batch of `rows` rows, as `packing.pack` makes it."""
    records = config_lib.records_read(config, config_lib.make_objective(config))
    shape = (rows, config.learner.row_tokens)
    topk = min(config.sampler.topk, model_config.vocab_size) if records.topk else 0
    nucleus = min(config.sampler.nucleus, model_config.vocab_size) if records.nucleus else 0
    ids = jnp.uint8 if model_config.num_experts <= 256 else jnp.uint16
    routed = model_config.num_experts_per_tok if model_config.num_sparse_layers else 0

    def of(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *more), dtype)

    return Batch(
        tokens=of(jnp.int32),
        positions=of(jnp.int32),
        segment_ids=of(jnp.int32),
        mask=of(bool),
        behaviour_logp=of(jnp.float32),
        advantages=of(jnp.float32),
        versions=of(jnp.int32),
        topk_ids=of(jnp.int32, topk),
        topk_logp=of(jnp.float32, topk),
        nucleus_ids=of(jnp.int32, nucleus),
        routing=RouterTrace(
            expert_ids=jax.ShapeDtypeStruct((model_config.num_sparse_layers, *shape, routed), ids), valid=of(bool)
        ),
    )


# --------------------------------------------------------------------------------------- prefill and decoding


def _sampling(
    name: str, config: RunConfig, model_config: model.ModelConfig, meshes: mesh.Meshes, sizes: dict[str, int]
) -> Program:
    eos = model_config.eos_token_id
    stop_ids = (eos,) if isinstance(eos, int) else tuple(eos or ())
    engine = parts.make_engine(config, model_config, meshes, stop_ids)
    layout = meshes.sampler_layout
    handed = functools.partial(model.decode_params, dtype=config.sampler.dtype, numerics=config.sampler.quantise)
    decode_shapes = jax.eval_shape(handed, model.abstract_params(model_config, config.model.dtype))
    specs = model.decode_param_specs(model_config, layout, config.sampler.quantise)
    weights = _placed(decode_shapes, layout.place(specs))
    programs = engine.programs
    if name == PREFILL:
        bucket = engine.max_prefill_length
        rows = engine.prefill_rows(bucket)
        cache: dict[str, int] = {}
        # Of a bucket longer than a piece the last piece, which attends to most.
        length = min(bucket, programs.shapes.chunk or bucket)
        before = _attention_flops(model_config, length, float(bucket - length))
        tokens, flops = rows * length, _forward_flops(model_config, rows, length) + rows * before
        trace = functools.partial(programs.trace_reading, weights, rows, bucket)
    else:
        state, length = programs.state_shapes, programs.shapes.length
        cache = {"cache": device_bytes(state.cache), "slots": device_bytes(dataclasses.replace(state, cache=None))}
        rows = config.sampler.slots
        tokens = rows * length
        flops = rows * (_forward_flops(model_config, 1, 1) + _attention_flops(model_config, 1, float(length)))
        version = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.sharding((), ()))
        trace = functools.partial(programs.generate.trace, weights, version, state)
    return Program(
        name=name,
        rows=rows,
        microbatches=1,
        tokens=tokens,
        mesh=sizes,
        state={"weights": device_bytes(weights), **cache},
        model_flops=flops,
        trace=trace,
    )


# --------------------------------------------------------------------------------------------------- figures


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings)


def device_bytes(tree: Any) -> int:
    """Bytes of a pytree of placed shape structs on one device, without the padding of its memory's tiles."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _forward_flops(config: model.ModelConfig, rows: int, length: int) -> float:
    """Multiplications and additions of one forward pass over full rows of one sequence each, causal, head included."""
    used = sum(
        math.prod(x.shape) * (config.num_experts_per_tok / config.num_experts if axes[1] == "experts" else 1)
        for x, axes in zip(*_weights(config), strict=True)
        if "layers" in axes and x.ndim > 2
    )
    head = config.vocab_size * config.hidden_size
    return 2 * rows * length * (used + head) + rows * _attention_flops(config, length, length / 2)


def _attention_flops(config: model.ModelConfig, queries: int, keys: float) -> float:
    return 4 * queries * keys * config.num_attention_heads * config.head_dim * config.num_hidden_layers


def _weights(config: model.ModelConfig) -> tuple[list[Any], list[Any]]:
    axes = jax.tree.leaves(model.param_axes(config), is_leaf=lambda node: isinstance(node, tuple))
    return jax.tree.leaves(model.abstract_params(config)), axes

"""What a config and its weights become on their way to being served: engines on disjoint devices, and a tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_sat import mesh, model, parts, sources
from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.config import RunConfig
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.layout import Layout
from jaxrl_sat.sampler import RolloutEngine, WeightHolder
from jaxrl_sat.sampler.fleet import load_checked
from jaxrl_sat.sampler.waiting import Order
from jaxrl_sat.serving.body import Served
from jaxrl_sat.types import InputError, Params


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Engines with their weights in holders, all of one model. `order`: in which waiting requests get slots."""

    engines: list[RolloutEngine]
    holders: list[WeightHolder]
    order: Order
    tokenizer: Tokenizer
    served: Served


def load(config: RunConfig, engines: int, checkpoint: Path | None, name: str | None) -> Loaded:
    """`engines` engines of a config, each on devices of its own, with the weights of `model.path` or of a checkpoint.

    `checkpoint`: the work folder of a run; its newest is read. `name`: of the model, to clients. Raises `InputError`.
    """
    model_config = sources.read_model_config(config.model.path)
    mesh.check_fits(config, model_config)
    tokenizer = parts.load_tokenizer(config, model_config)
    groups = _device_groups(config, engines)
    built = [
        parts.make_engine(
            config, model_config, mesh.Meshes(group, (group,), True), tokenizer.eos_ids, tokenizer, restricted=True
        )
        for group in groups
    ]
    layout = Layout.of(groups[0], mesh.SAMPLER_RULES)
    version, params = _params(config, model_config, layout, checkpoint)
    holders = [WeightHolder(weights) for weights in load_checked(built, params, version).engines]
    served = Served(
        model=name or Path(config.model.path).name,
        tokenizer=tokenizer,
        sampling=built[0].sampling,
        vocab_size=model_config.vocab_size,
        max_prompt_tokens=built[0].max_prompt_tokens,
        topk=built[0].records.topk,
    )
    return Loaded(built, holders, config.sampler.order, tokenizer, served)


def _device_groups(config: RunConfig, engines: int) -> tuple[Mesh, ...]:
    devices = jax.devices()
    wanted, each = mesh.sampling_devices(config, engines), mesh.sampling_devices(config, 1)
    if len(devices) < wanted:
        raise InputError(
            f"--workers and --grpc-port: {engines} engines of {each} devices, {len(devices)} devices found; "
            f"allowed: {wanted} or more devices, fewer engines, or smaller mesh.sampler sizes"
        )
    return mesh.sampler_meshes(config, devices, engines)


def _params(
    config: RunConfig, model_config: model.ModelConfig, layout: Layout, checkpoint: Path | None
) -> tuple[int, Params]:
    """The version and the parameters, placed as the sampler's."""
    dtype = config.model.dtype
    shardings: Any = layout.place(model.param_specs(model_config, layout))
    if checkpoint is None:
        return 0, model.load_hf(sources.model_address(config.model.path), dtype, shardings)[1]
    folder = checkpoint / "checkpoints"
    if not folder.is_dir():
        raise InputError(
            f"--checkpoint: {checkpoint} has no checkpoints; allowed: the work folder of a run that wrote one"
        )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.abstract_params(model_config, dtype),
        shardings,
    )
    with contextlib.closing(Checkpointer(folder, keep=None, read_only=True)) as checkpoints:
        return checkpoints.params(abstract)

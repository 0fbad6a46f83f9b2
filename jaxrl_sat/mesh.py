"""The trainer's and the sampler's devices, and the table of each: which mesh axis carries which logical axis.

Logical names come from the model (`jaxrl_sat.model.param_axes`) and the batch. Nothing else in the package knows how
arrays are cut; `jaxrl_sat.layout` makes specs and collectives of a table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl_sat import model
from jaxrl_sat.config import RunConfig
from jaxrl_sat.layout import Layout, Rules
from jaxrl_sat.types import InputError

TRAINER_RULES: Rules = {
    "rows": ("data", "fsdp", "expert"),
    "sequence": "context",
    "layers": None,
    "embed": ("fsdp", "expert", "context"),  # what an axis has not cut otherwise: all but data hold parts of the state
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "choices": None,  # each device routes among all experts
}

SAMPLER_RULES: Rules = {
    "rows": "data",
    "sequence": None,
    "layers": None,
    "embed": None,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "choices": None,  # each device routes among all experts
}


RULES: Mapping[str, Rules] = {"trainer": TRAINER_RULES, "sampler": SAMPLER_RULES}


@dataclasses.dataclass(frozen=True)
class Meshes:
    """The trainer's mesh and those of the samplers, one for each engine.

    `colocated`: trainer and sampler are the same device, so training and sampling take turns.
    """

    trainer: Mesh
    samplers: tuple[Mesh, ...]
    colocated: bool

    @property
    def of_engines(self) -> list[Meshes]:
        """What each engine has of them: the trainer's mesh, and its own as the sampler's."""
        return [dataclasses.replace(self, samplers=(one,)) for one in self.samplers]

    @property
    def trainer_layout(self) -> Layout:
        """Where the trainer's arrays lie."""
        return Layout.of(self.trainer, TRAINER_RULES)

    @property
    def sampler_layout(self) -> Layout:
        """Where the arrays of the (first) sampler lie."""
        return Layout.of(self.samplers[0], SAMPLER_RULES)


def axes(config: RunConfig) -> dict[str, dict[str, int]]:
    """Devices along each axis of {"trainer": ..., "sampler": ...}, in the order of the mesh's axes."""
    return {"trainer": dataclasses.asdict(config.mesh.trainer), "sampler": dataclasses.asdict(config.mesh.sampler)}


def devices_wanted(config: RunConfig) -> int:
    """Devices of the trainer and of all samplers together."""
    return math.prod(axes(config)["trainer"].values()) + sampling_devices(config, config.sampler.engines)


def sampling_devices(config: RunConfig, engines: int) -> int:
    """Devices of so many samplers."""
    return engines * math.prod(axes(config)["sampler"].values())


def make_meshes(config: RunConfig, devices: Sequence[Any]) -> Meshes:
    """The first devices train and the next ones sample; a single device does both in turns.

    Raises `InputError` where there are too few.
    """
    sizes, wanted, engines = axes(config)["trainer"], devices_wanted(config), config.sampler.engines
    first = math.prod(sizes.values())
    colocated = wanted == 2 and len(devices) == 1
    if len(devices) < wanted and not colocated:
        either = " (or 1 device, shared in turns)" if wanted == 2 else ""
        keys, several = ("sampler.engines, ", f" by {engines} sampler.engines") if engines > 1 else ("", "")
        raise InputError(
            f"mesh: {first} devices to train and {wanted - first} to sample{several}, {len(devices)} found; "
            f"allowed: {wanted} or more devices{either}, or smaller {keys}mesh.trainer and mesh.sampler sizes"
        )
    samplers = sampler_meshes(config, devices[0 if colocated else first :], engines)
    return Meshes(device_mesh("trainer", sizes, devices[:first]), samplers, colocated)


def sampler_meshes(config: RunConfig, devices: Sequence[Any], engines: int) -> tuple[Mesh, ...]:
    """The meshes of so many samplers on disjoint devices, the first of `devices`, which have to be enough."""
    sizes, each = axes(config)["sampler"], sampling_devices(config, 1)
    return tuple(device_mesh("sampler", sizes, devices[i * each : (i + 1) * each]) for i in range(engines))


def device_mesh(side: str, sizes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """The devices in an order that suits their network. Over several slices, the data axis crosses between them."""
    shape = tuple(sizes.values())
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if devices[0].platform != "tpu":
        grid = np.array(devices, dtype=object).reshape(shape)
    elif slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        if sizes["data"] % slices:
            raise InputError(f"mesh.{side}.data: {sizes['data']}; allowed: a multiple of {slices}, the slices found")
        across = (slices, *(1,) * (len(shape) - 1))
        inside = (shape[0] // slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_layout(config: RunConfig, side: str) -> Layout:
    """The layout of "trainer" or "sampler" without its devices: enough for specs."""
    sizes = axes(config)[side]
    return Layout.of(AbstractMesh(tuple(sizes.values()), tuple(sizes)), RULES[side])


def check_fits(config: RunConfig, model_config: model.ModelConfig) -> None:
    """Raise `InputError` for the first mesh axis that does not divide a dimension of the model it would cut.

    Also for sequences longer than the model has positions for, and for losses of a router that it has not.
    """
    known = model_config.max_position_embeddings
    if config.data.max_prompt_tokens + config.sampler.max_response_tokens > known:
        raise InputError(
            f"sampler.max_response_tokens: {config.sampler.max_response_tokens} after data.max_prompt_tokens "
            f"{config.data.max_prompt_tokens}; allowed: {known} together, the model's max_position_embeddings"
        )
    for name in ("load_balance_coef", "router_z_coef"):
        if getattr(config.loss, name) and not model_config.num_sparse_layers:
            raise InputError(f"loss.{name}: {getattr(config.loss, name)}; allowed: 0, as the model has no experts")
    for name, rules in RULES.items():
        check_cuts(name, axes(config)[name], rules, model_config)


def check_cuts(name: str, sizes: Mapping[str, int], rules: Rules, model_config: model.ModelConfig) -> None:
    """Raise `InputError` for the first axis of the mesh `name` that does not divide what `rules` has it cut."""
    shapes = jax.tree.leaves(model.abstract_params(model_config))
    logical = jax.tree.leaves(model.param_axes(model_config), is_leaf=lambda node: isinstance(node, tuple))
    for array, names in zip(shapes, logical, strict=True):
        used: set[str] = set()
        for size, dimension in zip(array.shape, names, strict=True):
            rule = rules[dimension]
            cut = [axis for axis in ((rule,) if isinstance(rule, str) else rule or ()) if axis not in used]
            used.update(cut)
            ways = math.prod(sizes[axis] for axis in cut)
            # Where there are more devices than key-value heads, each head is held by several.
            shared = dimension == "kv_heads" and ways % size == 0
            if size % ways and not shared:
                keys = " x ".join(f"mesh.{name}.{axis}" for axis in cut if sizes[axis] > 1)
                allowed = "a divisor or a multiple" if dimension == "kv_heads" else "a divisor"
                raise InputError(f"{keys}: {ways}; allowed: {allowed} of {size}, the model's {dimension} dimension")
    if name == "sampler" and not model_config.num_sparse_layers and sizes["expert"] > 1:
        raise InputError(f"mesh.sampler.expert: {sizes['expert']}; allowed: 1, as the model has no experts")

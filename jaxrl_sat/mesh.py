"""The trainer's and the sampler's devices, and where each logical axis of an array lies on them.

Logical names come from the model (`jaxrl_sat.model.param_axes`) and the batch; one table a mesh says which mesh axis
carries each. Nothing else in the package knows how arrays are cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sat import model
from jaxrl_sat.config import RunConfig
from jaxrl_sat.types import InputError

Rules = Mapping[str, str | tuple[str, ...] | None]

TRAINER_RULES: Rules = {
    "rows": ("data", "fsdp"),
    "layers": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
}

SAMPLER_RULES: Rules = {
    "slots": "data",
    "layers": None,
    "embed": None,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
}


@dataclasses.dataclass(frozen=True)
class Meshes:
    """Both meshes. `colocated`: they are the same device, so training and sampling take turns."""

    trainer: Mesh
    sampler: Mesh
    colocated: bool


def axes(config: RunConfig) -> dict[str, dict[str, int]]:
    """Devices along each axis of {"trainer": ..., "sampler": ...}, in the order of the mesh's axes."""
    return {"trainer": dataclasses.asdict(config.mesh.trainer), "sampler": dataclasses.asdict(config.mesh.sampler)}


def devices_wanted(config: RunConfig) -> int:
    """Devices of both meshes together."""
    return sum(math.prod(sizes.values()) for sizes in axes(config).values())


def make_meshes(config: RunConfig, devices: Sequence[Any]) -> Meshes:
    """The first devices train and the next ones sample; a single device does both in turns.

    Raises `InputError` where there are too few.
    """
    sizes, wanted = axes(config), devices_wanted(config)
    first = math.prod(sizes["trainer"].values())
    colocated = wanted == 2 and len(devices) == 1
    if len(devices) < wanted and not colocated:
        either = " (or 1 device, shared in turns)" if wanted == 2 else ""
        raise InputError(
            f"mesh: {first} devices to train and {wanted - first} to sample, {len(devices)} found; "
            f"allowed: {wanted} or more devices{either}, or smaller mesh.trainer and mesh.sampler sizes"
        )
    start = 0 if colocated else first
    return Meshes(
        _mesh(sizes["trainer"], devices[:first]), _mesh(sizes["sampler"], devices[start:][: wanted - first]), colocated
    )


def _mesh(sizes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    grid = np.array(devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def spec(logical: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """The cut of an array with these logical axes. A mesh axis cuts one dimension only: the first that asks for it."""
    used: set[str] = set()
    cuts: list[str | tuple[str, ...] | None] = []
    for name in logical:
        cut = rules[name] if name is not None else None
        names = (cut,) if isinstance(cut, str) else cut or ()
        cuts.append(None if used.intersection(names) else cut)
        used.update(names)
    return PartitionSpec(*cuts)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def shardings(axes_tree: Any, rules: Rules, mesh: Mesh) -> Any:
    """A `NamedSharding` for each tuple of logical names in `axes_tree`, in a pytree of the same shape."""
    return jax.tree.map(lambda logical: NamedSharding(mesh, spec(logical, rules)), axes_tree, is_leaf=_is_axes)


def check_fits(config: RunConfig, model_config: model.ModelConfig) -> None:
    """Raise `InputError` for the first mesh axis that does not divide a dimension of the model it would cut.

    Also for sequences longer than the model has positions for.
    """
    known = model_config.max_position_embeddings
    if config.data.max_prompt_tokens + config.sampler.max_response_tokens > known:
        raise InputError(
            f"sampler.max_response_tokens: {config.sampler.max_response_tokens} after data.max_prompt_tokens "
            f"{config.data.max_prompt_tokens}; allowed: {known} together, the model's max_position_embeddings"
        )
    shapes = jax.tree.leaves(model.abstract_params(model_config))
    logical = jax.tree.leaves(model.param_axes(model_config), is_leaf=_is_axes)
    for name, rules in (("trainer", TRAINER_RULES), ("sampler", SAMPLER_RULES)):
        sizes = axes(config)[name]
        for array, names in zip(shapes, logical, strict=True):
            for size, dimension, cut in zip(array.shape, names, spec(names, rules), strict=True):
                if isinstance(cut, str) and size % sizes[cut]:
                    raise InputError(
                        f"mesh.{name}.{cut}: {sizes[cut]}; allowed: a divisor of {size}, "
                        f"the model's {dimension} dimension"
                    )

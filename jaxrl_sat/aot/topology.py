"""TPU topologies by name: their devices, without the devices, and the memory each has."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxrl_sat.aot import memory
from jaxrl_sat.types import InputError


@dataclasses.dataclass(frozen=True)
class Kind:
    """A generation of TPU: axes of its network, most chips along one, and a machine that libtpu knows to have it."""

    axes: int
    longest: int
    accelerator: str


KINDS = {
    "v4": Kind(3, 16, "v4-8"),
    "v5e": Kind(2, 16, "v5litepod-8"),
    "v5p": Kind(3, 24, "v5p-8"),
    "v6e": Kind(2, 16, "v6e-8"),
    "tpu7x": Kind(3, 24, "tpu7x-8"),
}

EXAMPLES = "v5e or v6e with two axes of up to 16 chips, as v6e:16x16, or v4, v5p or tpu7x with three, as v5p:4x4x4"


@dataclasses.dataclass(frozen=True)
class Topology:
    """`slices` slices of one shape. `hbm_bytes`: what the compiler lets a program use on one device."""

    name: str
    slices: int
    devices: tuple[Any, ...]
    hbm_bytes: int


def parse(name: str) -> tuple[str, tuple[int, ...]]:
    """("v5p", (4, 4, 4)) of "v5p:4x4x4". Raises `InputError`."""
    found = re.fullmatch(r"(\w+):([1-9]\d?(?:x[1-9]\d?)+)", name)
    shape = tuple(map(int, found[2].split("x"))) if found else ()
    kind = KINDS.get(found[1]) if found else None
    if not found or not kind or len(shape) != kind.axes or max(shape) > kind.longest:
        # Not left to the compiler, which takes its process down where a shape is beyond it.
        raise InputError(f"--topology: {name!r}; allowed: {EXAMPLES}")
    return found[1], shape


def prepare(environment: MutableMapping[str, str], name: str) -> None:
    """Set what libtpu reads when it is loaded: a kind of machine, and that there is none here to ask."""
    kind, _ = parse(name)
    environment.update(
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE=KINDS[kind].accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # another may compile here at the same time
    )


def describe(name: str, slices: int) -> Topology:
    """The topology that `name` names, `slices` times. Raises `InputError` where the compiler knows none such."""
    _, shape = parse(name)
    if importlib.util.find_spec("libtpu") is None:
        raise InputError("libtpu: not installed; allowed: pip install -e '.[tpu]', or make venv EXTRA=tpu")
    # Less than a host is one host of fewer chips: the compiler has to be told.
    bounds = tuple(min(size, whole) for size, whole in zip((*shape, 1)[:3], (2, 2, 1), strict=True))
    options: dict[str, Any] = {} if math.prod(bounds) == 4 else {"chips_per_host_bounds": bounds}
    if slices > 1:
        options["num_slices"] = slices
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--topology: {name!r} ({reason}); allowed: {EXAMPLES}") from error
    return Topology(name, slices, tuple(devices), _hbm_bytes(devices[0]))


def _hbm_bytes(device: Any) -> int:
    """The compiler states its limit when a program is beyond it: this one needs 8 TiB."""
    huge = jax.ShapeDtypeStruct((1 << 40,), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        limit = memory.limit_bytes(str(error))
        if limit is not None:
            return limit
        raise
    raise AssertionError("a program of 8 TiB fits")

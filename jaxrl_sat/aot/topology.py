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

ACCELERATORS = {"v4": "v4-8", "v5e": "v5litepod-8", "v5p": "v5p-8", "v6e": "v6e-8", "tpu7x": "tpu7x-8"}
"""Kinds of TPU, and an accelerator type of each, which libtpu wants to know of before it compiles for any."""

EXAMPLES = "v4, v5e, v5p, v6e or tpu7x with the chips along each axis, as v5p:4x4x4 or v6e:16x16"


@dataclasses.dataclass(frozen=True)
class Topology:
    """`slices` slices of one shape. `hbm_bytes`: what the compiler lets a program use on one device."""

    name: str
    slices: int
    devices: tuple[Any, ...]
    hbm_bytes: int


def parse(name: str) -> tuple[str, tuple[int, ...]]:
    """("v5p", (4, 4, 4)) of "v5p:4x4x4". Raises `InputError`."""
    found = re.fullmatch(r"(\w+):([1-9]\d{0,3}(?:x[1-9]\d{0,3}){1,2})", name)
    if not found or found[1] not in ACCELERATORS:
        raise InputError(f"--topology: {name!r}; allowed: {EXAMPLES}")
    return found[1], tuple(map(int, found[2].split("x")))


def prepare(environment: MutableMapping[str, str], name: str) -> None:
    """Set what libtpu reads when it is loaded: a kind of machine, and that there is none here to ask."""
    kind, _ = parse(name)
    environment.update(
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE=ACCELERATORS[kind],
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

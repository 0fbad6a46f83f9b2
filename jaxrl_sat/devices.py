"""The devices of a command, before JAX has looked for any: the preset that fits them, and CPU devices as needed."""

from __future__ import annotations

import os
from collections.abc import Callable

import jax

from jaxrl_sat import cli, config
from jaxrl_sat.config import RunConfig


def preset_that_fits(source: cli.Source, wanted: Callable[[RunConfig], int]) -> tuple[str, str]:
    """The preset for the devices found, and which those are. JAX starts here, so CPU devices are made first.

    `wanted`: how many devices a config needs.
    """
    try:
        make_cpu_devices(wanted(config.from_config_dict(cli.load(source, "cpu"))))
    except config.InputError:
        pass  # it may well fit another preset; if not, the same line comes when it is loaded to be run
    device = jax.devices()[0]
    preset = device.platform if device.platform in config.PRESETS else "cpu"
    return preset, f"fits what JAX found, {len(jax.devices())} x {device.device_kind}"


def make_cpu_devices(count: int) -> None:
    """Let the CPU, one device to JAX, be `count` of them."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        if jax.config.jax_num_cpu_devices < count:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_num_cpu_devices", count)

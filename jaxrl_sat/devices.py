"""The devices of a command, before JAX has looked for any: the preset that fits them, and CPU devices as needed."""

from __future__ import annotations

import os
from collections.abc import Callable

import jax

from jaxrl_sat import cli, config
from jaxrl_sat.config import RunConfig


def preset_of(source: cli.Source, wanted: Callable[[RunConfig], int]) -> tuple[str, str]:
    """The preset asked for, else that for the devices found; and why it is that one.

    `wanted`: how many devices a config needs. To find devices JAX is started, so CPU devices are made first.
    """
    if source.preset:
        return source.preset, "as asked"
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

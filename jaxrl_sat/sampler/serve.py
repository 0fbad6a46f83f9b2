"""python -m jaxrl_sat.sampler.serve --config=FILE[:PRESET] [--port=N] [--grpc-port=N] [--config.KEY=VALUE ...]

Serves the sampling engine of a config: OpenAI-compatible HTTP, and with --grpc-port JetStream's gRPC. Each protocol has
engines of its own on devices of its own. Listens on the loopback; elsewhere only with a token. SIGTERM and Ctrl-C stop
it: calls under way may end. Exit status 0: stopped. 2: the input cannot be used; one line on stderr says what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import sys
from collections.abc import Sequence

from jaxrl_sat import cli, config, devices, mesh
from jaxrl_sat.serving import settings as settings_lib
from jaxrl_sat.types import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's own). Returns the exit status."""
    return cli.exit_status(_run, argv)


def _run(argv: Sequence[str]) -> None:
    settings, source = settings_lib.parse(argv)
    with settings_lib.bound(settings) if settings.workers else contextlib.nullcontext() as listening:
        _serve(settings, source, listening)


def _serve(settings: settings_lib.Settings, source: cli.Source, listening: socket.socket | None) -> None:
    try:
        from jaxrl_sat.serving import build, server
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise InputError(f"{error.name}: not installed; allowed: pip install 'jaxrl-sat[serve]'") from error

    for name, level in (("jax", logging.WARNING), ("absl", logging.ERROR)):
        logging.getLogger(name).setLevel(level)
    source = without_data(source)
    wanted = lambda run: mesh.sampling_devices(run, settings.engines)  # noqa: E731
    preset, found = devices.preset_of(source, wanted)
    run = config.from_config_dict(cli.load(source, preset))
    print(f"preset {preset}: {found}", flush=True)
    if preset == "cpu":
        devices.make_cpu_devices(wanted(run))
    if settings.temperature is not None:
        run = dataclasses.replace(run, sampler=dataclasses.replace(run.sampler, temperature=settings.temperature))
    loaded = build.load(run, settings.engines, settings.checkpoint, settings.model_name)
    server.run(loaded, settings, listening)


def without_data(source: cli.Source) -> cli.Source:
    """A config that need not name data, as none is read."""
    return dataclasses.replace(source, overrides=(("data.path", "arithmetic"), *source.overrides))


if __name__ == "__main__":
    sys.exit(main())

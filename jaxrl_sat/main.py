"""python -m jaxrl_sat.main --config=FILE[:PRESET] [--workdir=DIR] [--dry-run] [--config.KEY=VALUE ...]

Exit status 0: done. 2: the input cannot be used; one line on stderr says what, the value, and what is allowed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's own). Returns the exit status."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's C++ log: errors only
    from jaxrl_sat.types import InputError

    try:
        _run(sys.argv[1:] if argv is None else argv)
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(argv: Sequence[str]) -> None:
    from jaxrl_sat import cli, config

    command = cli.parse(argv)
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what checkpoint.py says in one line
    preset, found = (command.preset, "as asked") if command.preset else _preset_that_fits(command)
    run = config.from_config_dict(cli.load(command, preset))
    if command.dry_run:
        from jaxrl_sat import plan

        print(plan.render(run, preset))
        return
    print(f"preset {preset}: {found}", flush=True)
    from jaxrl_sat import train

    if preset == "cpu":
        _make_cpu_devices(run)
    train.run(run, command.workdir)


def _preset_that_fits(command) -> tuple[str, str]:
    """The preset for the devices found, and which those are. JAX starts here, so CPU devices are made first."""
    import jax

    from jaxrl_sat import cli, config

    try:
        _make_cpu_devices(config.from_config_dict(cli.load(command, "cpu")))
    except config.InputError:
        pass  # it may well fit another preset; if not, the same line comes when it is loaded to be run
    device = jax.devices()[0]
    preset = device.platform if device.platform in config.PRESETS else "cpu"
    return preset, f"fits what JAX found, {len(jax.devices())} x {device.device_kind}"


def _make_cpu_devices(run) -> None:
    """Let the CPU, one device to JAX, be as many as the meshes of `run` have places."""
    import jax

    from jaxrl_sat import mesh

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        if jax.config.jax_num_cpu_devices < mesh.devices_wanted(run):  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_num_cpu_devices", mesh.devices_wanted(run))


if __name__ == "__main__":
    sys.exit(main())

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
    from jaxrl_sat import cli

    return cli.exit_status(_run, argv)


def _run(argv: Sequence[str]) -> None:
    from jaxrl_sat import cli, config

    command = cli.parse(argv)
    from jaxrl_sat import devices, mesh  # JAX loads here

    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what checkpoint.py says in one line
    wanted = mesh.devices_wanted
    preset, found = devices.preset_of(command, wanted)
    run = config.from_config_dict(cli.load(command, preset))
    if command.dry_run:
        from jaxrl_sat import plan

        print(plan.render(run, preset))
        return
    print(f"preset {preset}: {found}", flush=True)
    from jaxrl_sat import train

    if preset == "cpu":
        devices.make_cpu_devices(wanted(run))
    train.run(run, command.workdir)


if __name__ == "__main__":
    sys.exit(main())

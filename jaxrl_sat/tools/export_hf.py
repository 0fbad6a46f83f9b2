"""A run's checkpoint as a Hugging Face model, with its tokenizer, for transformers, vLLM or a run to start from.

    python -m jaxrl_sat.tools.export_hf --workdir=RUN --out=DIR [--step=N]

The parameters come from the checkpoint after N updates (default: the newest), in the dtype the run trained in; nothing
else of it is read. Exit status 2 with one line where something is missing.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl_sat import model, sources
from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.model.folder import Folder
from jaxrl_sat.paths import is_address
from jaxrl_sat.types import InputError, reading
from jaxrl_sat.workdir import model_of


def export(workdir: Path, out: str, step: int | None = None) -> int:
    """Write the model of a run to `out`, a folder or an address that fsspec opens. Returns the step it is of.

    Raises `InputError` where `workdir` is not a run's, the checkpoint is not there, or `out` cannot be written.
    """
    _check_out(workdir, out)
    source, dtype = model_of(workdir, "--workdir")
    config = sources.read_model_config(source)
    if not (workdir / "checkpoints").is_dir():
        raise InputError(f"--workdir: {workdir} has no checkpoints; allowed: the folder of a run that wrote one")
    small = _small_files(sources.model_folder(source))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])  # host memory
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        model.abstract_params(config, dtype),
    )
    checkpoints = Checkpointer(workdir / "checkpoints", keep=None, read_only=True)
    try:
        step, params = checkpoints.params(shapes, step)
    finally:
        checkpoints.close()
    model.save_hf(out, config, params, small)
    return step


def _check_out(workdir: Path, out: str) -> None:
    """Refuse, by `InputError`, an `out` that holds a run: its config.json would be replaced."""
    folder = Folder(out)
    try:
        fields = folder.read_json("config.json") if folder.exists() and folder.has("config.json") else {}
    except InputError:
        fields = {}
    here = Path(out).resolve()
    if {"recipe", "updates"} <= fields.keys() or here == workdir.resolve() or workdir.resolve() in here.parents:
        raise InputError(f"--out: {out} is or lies in the work folder of a run; allowed: a folder of its own")


def _small_files(folder: Path) -> dict[str, bytes | None]:
    """The tokenizer and what else lies beside the weights, None for what does not; config.json is written with them."""
    with reading(str(folder)):
        return {
            name: (folder / name).read_bytes() if (folder / name).is_file() else None
            for name in sources.SMALL_FILES
            if name != "config.json"
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what is meant: nothing is written there
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], exit_on_error=False)
    parser.add_argument("--workdir", type=Path, required=True, help="work folder of the run")
    parser.add_argument("--out", required=True, help="folder of the model, or an address that fsspec opens")
    parser.add_argument("--step", type=int, help="updates done at the checkpoint; default: the newest")
    try:
        given = parser.parse_args(arguments)
        if not given.out or not str(given.workdir).strip("."):
            raise InputError("--workdir and --out: empty; allowed: the folder of a run, and one for the model")
        out = given.out if is_address(given.out) else str(Path(given.out).expanduser())
        step = export(given.workdir.expanduser(), out, given.step)
    except (InputError, argparse.ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"model after {step} updates written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

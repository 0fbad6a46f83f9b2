"""Checkpoints with Orbax: the train state and the parameter versions that coming batches are sampled by.

The data loader and the sampler's seeds are functions of the update number, so the state, the versions in flight and
the step are a whole run. A write is atomic (a folder renamed when complete), so a killed write never hides the
checkpoint before it. Orbax notices a file that is cut or missing; one whose bytes changed on disk it does not, so a
checksum of every file is kept beside the folder, in checkpoint_sums.json, from when the write is known to be complete.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_sat.metrics import replace_file
from jaxrl_sat.types import InputError, Params, TrainState


class Checkpointer:
    """Saves in the background, keeps the newest `keep` (None: all), restores into given shardings.

    `read_only`: nothing in the folder is ever changed, so that a run may write there meanwhile.
    """

    def __init__(self, folder: Path, keep: int | None, read_only: bool = False):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=not read_only, read_only=read_only
        )
        self._read_only = read_only
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._sums = folder.with_name("checkpoint_sums.json")

    def latest(self) -> int | None:
        """Updates done in the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, versions: dict[int, Params]) -> None:
        """Write the state after `state.step` updates, with the parameter versions still in flight beside it."""
        step = int(state.step)
        if self.latest() == step:
            return
        self.wait()
        self._unseal(step)
        items = {"state": ocp.args.StandardSave(state)}
        # The state's own parameters are never written twice: the version of this step is the state's.
        items |= {f"version_{v}": ocp.args.StandardSave(p) for v, p in versions.items() if v != step}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, abstract: TrainState, needed: Callable[[int], list[int]]) -> tuple[TrainState, dict[int, Params]]:
        """The newest checkpoint that can be read: its state and the parameter versions `needed(step)`.

        `abstract` is the state as shape structs with shardings. A newer one that cannot be read is moved aside, to
        checkpoints_unreadable/, once an older one could be. Raises `InputError` if none fits, as it would be under
        another model, optimizer or lag schedule; nothing is moved then.
        """
        broken: list[int] = []
        refused: InputError | None = None
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored = self._restore(step, abstract, needed(step))
            except InputError as error:
                broken.append(step)
                refused = refused or error
                continue
            self._move_aside(broken)
            return restored
        assert refused is not None
        raise refused

    def _folder(self, step: int) -> Path:
        return Path(self._manager.directory) / str(step)

    def _move_aside(self, steps: list[int]) -> None:
        aside = Path(self._manager.directory).with_name("checkpoints_unreadable")
        for step in steps:
            aside.mkdir(exist_ok=True)
            self._folder(step).replace(aside / f"{step}_{time.time_ns()}")
            print(f"checkpoint {step} cannot be read and was moved to {aside}; an older one is used", file=sys.stderr)
        if steps:
            self._manager.reload()

    def _restore(self, step: int, abstract: TrainState, needed: list[int]) -> tuple[TrainState, dict[int, Params]]:
        self._check_sums(step)
        wanted = [v for v in needed if v != step]
        items = {"state": ocp.args.StandardRestore(abstract)}
        items |= {f"version_{v}": ocp.args.StandardRestore(abstract.params) for v in wanted}
        lacking = [name for name in items if not (self._folder(step) / name).is_dir()]
        try:
            if lacking:  # Orbax would start on the others first, and leave them unfinished
                raise ValueError(f"it holds no {lacking[0]}")
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # a damaged file raises whatever the reader of its part raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise InputError(
                f"--workdir: checkpoint {step} in {self._manager.directory} does not fit this config ({reason}); "
                "allowed: the config that wrote it, or another --workdir"
            ) from error
        state = found["state"]
        versions = {v: found[f"version_{v}"] for v in wanted}
        return state, versions | ({step: state.params} if step in needed else {})

    def params(self, abstract: Params, step: int | None = None) -> tuple[int, Params]:
        """The step and the parameters alone of a checkpoint, by default the newest. Raises `InputError`.

        `abstract` is the parameters as shape structs with shardings.
        """
        steps = sorted(self._manager.all_steps())
        if not steps or step not in (None, *steps):
            there = ", ".join(map(str, steps)) or "none"
            raise InputError(
                f"checkpoint {step if step is not None else ''}: not in {self._manager.directory}; allowed: {there}"
            )
        step = steps[-1] if step is None else step
        self._check_sums(step)
        wanted = {"params": abstract}
        arguments = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
        )
        try:
            with ocp.PyTreeCheckpointer() as reader:
                _check_shapes(reader.metadata(self._folder(step) / "state"), abstract)
                found = reader.restore(self._folder(step) / "state", args=arguments)
        except Exception as error:  # a damaged file raises whatever the reader of its part raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise InputError(
                f"checkpoint {step} in {self._manager.directory} cannot be read ({reason}); allowed: one of this model"
            ) from error
        return step, found["params"]

    def wait(self) -> None:
        """Block until the last write is complete, and seal it with checksums."""
        self._manager.wait_until_finished()
        self._seal()

    def _seal(self) -> None:
        steps, sealed = self._manager.all_steps(), self._sealed()
        if {str(step) for step in steps} != sealed.keys():
            sums = {str(step): sealed.get(str(step)) or self._sum_up(step) for step in steps}
            replace_file(self._sums, json.dumps(sums))

    def _unseal(self, step: int) -> None:
        """Forget the checksums of an unreadable checkpoint of this number, which is about to be written anew."""
        sealed = self._sealed()
        if sealed.pop(str(step), None) is not None:
            replace_file(self._sums, json.dumps(sealed))

    def _sealed(self) -> dict[str, dict[str, int]]:
        try:
            found = json.loads(self._sums.read_text())
        except (OSError, ValueError):  # not written yet, or damaged itself: nothing to hold the files to
            return {}
        return found if isinstance(found, dict) else {}

    def _sum_up(self, step: int) -> dict[str, int]:
        """CRC-32 of each file of a checkpoint, by its name inside."""
        folder = self._folder(step)
        return {str(file.relative_to(folder)): _crc32(file) for file in sorted(folder.rglob("*")) if file.is_file()}

    def _check_sums(self, step: int) -> None:
        sealed = self._sealed().get(str(step))
        if sealed is not None and sealed != self._sum_up(step):
            raise InputError(
                f"--workdir: checkpoint {step} in {self._manager.directory} is damaged (its checksums differ); "
                "allowed: the files as they were written"
            )

    def close(self) -> None:
        """Finish writing and let go of the folder."""
        try:
            if not self._read_only:
                self.wait()
        finally:
            self._manager.close()


def _check_shapes(metadata: Any, abstract: Params) -> None:
    """Raise ValueError where the parameters written are others than those asked for."""
    written, asked = (
        {
            jax.tree_util.keystr(path): (tuple(leaf.shape), str(leaf.dtype))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (metadata.item_metadata.tree["params"], abstract)
    )
    for name in sorted(written.keys() | asked.keys()):
        if written.get(name) != asked.get(name):
            raise ValueError(f"{name} is {written.get(name)} there, the run's model has {asked.get(name)}")


def _crc32(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            total = zlib.crc32(block, total)
    return total

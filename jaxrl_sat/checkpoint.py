"""Checkpoints with Orbax: the train state and the parameter versions that coming batches are sampled by.

The data loader and the sampler's seeds are functions of the update number, so the state, the versions in flight and
the step are a whole run. A write is atomic (a folder renamed when complete), so a killed write never hides the
checkpoint before it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import orbax.checkpoint as ocp

from jaxrl_sat.types import InputError, Params, TrainState


class Checkpointer:
    """Saves in the background, keeps the newest `keep`, restores into given shardings."""

    def __init__(self, folder: Path, keep: int):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--workdir: {folder} is not a folder; allowed: a work folder of its own")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """Updates done in the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, versions: dict[int, Params]) -> None:
        """Write the state after `state.step` updates, with the parameter versions still in flight beside it."""
        step = int(state.step)
        if self.latest() == step:
            return
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

    def _move_aside(self, steps: list[int]) -> None:
        folder = Path(self._manager.directory)
        for step in steps:
            aside = folder.with_name("checkpoints_unreadable")
            aside.mkdir(exist_ok=True)
            (folder / str(step)).replace(aside / f"{step}_{time.time_ns()}")
            print(f"checkpoint {step} cannot be read and was moved to {aside}; an older one is used", file=sys.stderr)
        if steps:
            self._manager.reload()

    def _restore(self, step: int, abstract: TrainState, needed: list[int]) -> tuple[TrainState, dict[int, Params]]:
        wanted = [v for v in needed if v != step]
        items = {"state": ocp.args.StandardRestore(abstract)}
        items |= {f"version_{v}": ocp.args.StandardRestore(abstract.params) for v in wanted}
        try:
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

    def wait(self) -> None:
        """Block until the last write is complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish writing and let go of the folder."""
        try:
            self._manager.wait_until_finished()
        finally:
            self._manager.close()

"""Checkpoints with Orbax: the train state and the parameter versions that coming batches are sampled by.

The data loader and the sampler's seeds are functions of the update number, so the state, the versions in flight and
the step are a whole run. A write is atomic (a folder renamed when complete), so a killed write never hides the
checkpoint before it.
"""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxrl_sat.types import InputError, Params, TrainState


class Checkpointer:
    """Saves in the background, keeps the newest `keep`, restores into given shardings."""

    def __init__(self, folder: Path, keep: int):
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

    def restore(self, abstract: TrainState, needed: list[int]) -> tuple[TrainState, dict[int, Params]]:
        """The newest checkpoint: its state and the `needed` parameter versions.

        `abstract` is the state as shape structs with shardings. Raises `InputError` if the checkpoint does not fit it
        or lacks a version, as it would under another model, optimizer or lag schedule.
        """
        step = self.latest()
        wanted = [v for v in needed if v != step]
        items = {"state": ocp.args.StandardRestore(abstract)}
        items |= {f"version_{v}": ocp.args.StandardRestore(abstract.params) for v in wanted}
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, FileNotFoundError) as error:
            reason = str(error).strip().splitlines()[0][:200]
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
        self._manager.wait_until_finished()
        self._manager.close()


def abstract_state(state: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a state, to restore into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

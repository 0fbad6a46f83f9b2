"""Which weight version samples which batch: pure functions of the mode, the lag and the update number.

Updates are numbered from 0; version v is the weights after v updates, so update j turns version j into j + 1 and a
batch sampled by version v has realised lag j - v when update j consumes it.

    sync       v(j) = j                                lag 0: sampling and training alternate
    fixed n    v(j) = max(0, j - n)                    lag n once the run is n updates old
    interval n v(j) = n floor(max(0, j - 1) / n)       weights are broadcast every n updates and the sampler works one
                                                       batch ahead, so lags run from 1 to n (seed 000, section 3.3)

Since the schedule is a function of the update alone, a resumed run repeats it exactly.
"""

from __future__ import annotations

from jaxrl_sat.types import InputError

MODES = ("sync", "fixed", "interval")


def check(mode: str, lag: int) -> None:
    """Refuse a mode that does not exist or a lag that the mode cannot have, by `InputError`."""
    if mode not in MODES:
        raise InputError(f"pipeline.mode: {mode!r} is not a mode; allowed: {', '.join(MODES)}")
    if mode == "sync" and lag != 0:
        raise InputError(f"pipeline.lag: {lag} with pipeline.mode 'sync'; allowed: 0")
    if mode != "sync" and lag < 1:
        raise InputError(f"pipeline.lag: {lag} with pipeline.mode {mode!r}; allowed: 1 or more (0 is mode 'sync')")


def behaviour_version(mode: str, lag: int, update: int) -> int:
    """The weight version that samples the batch of `update`. See the table at the top of this file."""
    if mode == "sync":
        return update
    if mode == "fixed":
        return max(0, update - lag)
    return lag * (max(0, update - 1) // lag)


def batches_ahead(mode: str, lag: int) -> int:
    """How many finished batches may wait for the trainer: what the mode can use, and no more."""
    return lag if mode == "fixed" else 1


def versions_needed(mode: str, lag: int, update: int) -> list[int]:
    """Versions up to `update` that batches from `update` on are sampled by, in rising order.

    At update j these are the parameter versions in flight: what must be kept to sample the coming batches and to
    recompute log-probs at the weights that sampled, and what a checkpoint taken before update j has to hold.
    """
    versions = {behaviour_version(mode, lag, later) for later in range(update, update + lag + 1)}
    return sorted(version for version in versions if version <= update)


def samples_any(mode: str, lag: int, version: int) -> bool:
    """Whether some batch is sampled by `version`: whether these weights have to reach the sampler at all."""
    return any(behaviour_version(mode, lag, update) == version for update in range(version, version + lag + 1))

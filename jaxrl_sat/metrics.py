"""What a run says about itself: metrics.jsonl, TensorBoard, a progress bar, and rollouts a person can read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from tensorboardX import SummaryWriter
from tqdm import tqdm

Metrics = Mapping[str, float | int]


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all, also under kill -9."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each whole line with what it holds; torn lines are left out. No file is no lines."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def cut_back(path: Path, step: int) -> None:
    """Keep the lines of updates up to `step`; torn lines and everything later go. No file is no lines."""
    replace_file(path, "".join(line + "\n" for line, record in _records(path) if record["step"] <= step))


def written(path: Path, step: int) -> dict[str, float]:
    """The metrics in the (last) line of `step`, null as NaN; nothing where there is no such line."""
    found: dict[str, Any] = {}
    for _, record in _records(path):
        if record["step"] == step:
            found = {name: value for name, value in record.items() if name != "step"}
    return {name: float("nan") if value is None else value for name, value in found.items()}


@runtime_checkable
class Sink(Protocol):
    """Anything that takes the metrics of an update."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Take the metrics after `step` updates."""
        ...

    def flush(self) -> None:
        """Write out whatever is held back."""
        ...

    def close(self) -> None:
        """Write out whatever is held back, and end."""
        ...


class JsonLines:
    """metrics.jsonl: a line an update, `step` = updates done, cut back to the checkpoint a run goes on from."""

    def __init__(self, path: Path, resumed_at: int | None):
        if resumed_at is None and path.exists() and path.stat().st_size:
            path.replace(path.with_name(path.name + ".old"))  # a run that never got to a checkpoint
        cut_back(path, -1 if resumed_at is None else resumed_at)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line. Numbers that are not finite are written as null, so that any JSON reader can read on."""
        finite = {name: value if abs(value) < float("inf") else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def flush(self) -> None:
        """Nothing: every line is written at once."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files without TensorFlow; points after the checkpoint a run goes on from are purged."""

    def __init__(self, folder: Path, resumed_at: int | None):
        self._writer = SummaryWriter(str(folder), purge_step=0 if resumed_at is None else resumed_at + 1)

    def write(self, step: int, metrics: Metrics) -> None:
        """Add a scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write the points held back."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Progress:
    """A bar with reward, mismatch, lag, tokens a second and the time left; rarer lines where nobody watches."""

    def __init__(self, start: int, total: int):
        interval = 0.2 if sys.stderr.isatty() else 20.0
        self._bar = tqdm(total=total, initial=start, unit="update", mininterval=interval, dynamic_ncols=True)
        self._done = start
        self._skipped = float("inf") if start else 0  # how many were before a resume shows at its first update

    def write(self, step: int, metrics: Metrics) -> None:
        """Move the bar to `step`."""
        shown = {
            "reward": "reward/mean",
            "mismatch": "staleness/abs_d_mean",
            "lag": "staleness/lag_mean",
            "tok/s": "train/tokens_per_s",
        }
        postfix = {label: f"{metrics[name]:.3g}" for label, name in shown.items() if name in metrics}
        self._bar.set_postfix(postfix, refresh=False)
        self._bar.update(step - self._done)
        self._done = step
        if metrics.get("train/skipped", 0) > self._skipped:
            self._skipped = metrics["train/skipped"]
            equal = metrics.get("rollout/groups_used") == 0
            why = "no group with unequal rewards" if equal else "loss not finite or no active token"
            self._bar.write(f"update {step} skipped: {why}", file=sys.stderr)
        for name, value in metrics.items():
            if name.startswith("eval/") and not name.endswith("_ci"):
                sure = f" +- {metrics[f'{name}_ci']:.4f}" if f"{name}_ci" in metrics else ""
                self._bar.write(f"after {step} updates: {name} = {value:.4f}{sure}", file=sys.stderr)

    def flush(self) -> None:
        """Nothing: what a person sees is never held back."""

    def close(self) -> None:
        """Leave the bar where it is."""
        self._bar.close()


class Log:
    """All sinks of a run; a context manager that closes them."""

    def __init__(self, sinks: Iterable[Sink]):
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Metrics) -> None:
        """Send the metrics after `step` updates to every sink."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def flush(self) -> None:
        """Make every sink write what it holds back."""
        for sink in self._sinks:
            sink.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()


def save_rollouts(folder: Path, update: int, records: Iterable[Mapping[str, Any]]) -> None:
    """Write rollouts/update_NNNNNN.jsonl, a response a line, in words."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    replace_file(folder / f"update_{update:06d}.jsonl", lines)

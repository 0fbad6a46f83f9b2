"""The curves of runs, drawn from their metrics.jsonl alone.

python -m jaxrl_sat.report.curves WORKDIR [WORKDIR ...] --out=curves.png
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxrl_sat.types import InputError

PANELS = (
    ("Held-out avg@k", r"eval/(.+)/avg_at_\d+"),
    ("Training reward", "reward/mean"),
    ("Training-inference mismatch, mean |d|", "staleness/abs_d_mean"),
    ("Realised lag, updates", "staleness/lag_mean"),
    ("SAT reference scale q", "sat/q"),
    ("Share of tokens SAT newly clips", "sat/newly_clipped_fraction"),
)
"""Titles, and what the names of the metrics match; each that does is a line of its own."""


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, in order. Raises `InputError` if there is none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise InputError(f"WORKDIR: {folder} has no metrics.jsonl; allowed: the work folder of a run")
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a run under way may be writing its last


def _smoothed(values: Sequence[float], width: int) -> list[float]:
    """Mean over the last `width` values up to each point."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def _plot(axes: Axes, records: list[dict[str, Any]], pattern: str, label: str) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if value is not None and re.fullmatch(pattern, name):
                lines.setdefault(name, []).append((record["step"], value))
    for name, points in lines.items():
        steps, values = zip(*points, strict=True)
        sparse = len(points) < 0.5 * len(records)
        shown = values if sparse else _smoothed(values, 10)
        which = f"{label} {name.split('/')[1]}" if len(lines) > 1 else label
        axes.plot(steps, shown, marker="o" if sparse else None, ms=3, label=which)


def draw(folders: Sequence[Path], out: Path) -> None:
    """Draw six panels over updates into the PNG `out`, a line a run; per-update series are 10-update means."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    runs = [(folder.name, read(folder)) for folder in folders]
    for axes, (title, pattern) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for label, records in runs:
            _plot(axes, records, pattern, label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("update", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize=7)
    figure.savefig(out, dpi=110)


def main() -> None:
    """Draw from the command line."""
    parser = argparse.ArgumentParser(description="Draw the curves of one or more runs.")
    parser.add_argument("workdirs", nargs="+", type=Path, metavar="WORKDIR")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    arguments = parser.parse_args()
    try:
        draw(arguments.workdirs, arguments.out)
    except InputError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()

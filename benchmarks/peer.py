"""Another project's code, timed in turns with ours: a process of its own interpreter that computes when it is told to.

A worker (a module of `benchmarks` that calls `benchmarks.serve.serve`) reads arrays from an .npz, prints one line of
JSON when it is ready (what it ran on), its first results in another .npz, then answers every line on its input with the
seconds that one call took.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve import save
from benchmarks.timing import Times

ROOT = Path(__file__).resolve().parent.parent


class Peer:
    """A worker module under another Python. Use as a context; `results` are the arrays of its first call."""

    def __init__(self, python: str, module: str, arrays: Mapping[str, Any], settings: Mapping[str, Any]):
        self._folder = tempfile.TemporaryDirectory()
        arguments = [Path(self._folder.name, name) for name in ("given.npz", "results.npz")]
        save(arguments[0], arrays)
        command = [python, "-m", module, *map(str, arguments), json.dumps(dict(settings))]
        # OpenMP's threads would otherwise spin while they wait, and on a shared machine most of their time is waiting.
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.ran_on = self._line()
        self.results = dict(np.load(arguments[1]))

    def _line(self) -> dict[str, Any]:
        """Its next line that is JSON; libraries print what they like."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the peer ended with status {self._process.wait()}; its messages are above")

    def timed(self, times: Times) -> None:
        """One call more, its seconds added to `times`."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found = self._line()
        times.wall.append(found["wall"])
        times.cpu.append(found["cpu"])

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *unused: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()

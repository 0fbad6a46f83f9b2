"""The worker's side of `benchmarks.peer`: imports nothing that another project's environment may lack."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def save(path: Path, arrays: Mapping[str, Any]) -> None:
    """An .npz of the arrays."""
    np.savez(path, allow_pickle=False, **{name: np.asarray(x) for name, x in arrays.items()})


def given() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the settings that the command line names."""
    return dict(np.load(sys.argv[1])), json.loads(sys.argv[3])


def serve(call: Callable[[], object], results: Mapping[str, Any], ran_on: Mapping[str, Any]) -> None:
    """Hands over the results of a first call, then calls, times and answers for every line on standard input."""
    save(Path(sys.argv[2]), results)
    print(json.dumps(dict(ran_on)), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}), flush=True)

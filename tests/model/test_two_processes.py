"""The same numbers where the devices belong to two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_sat.model import save_hf
from tests.model.test_sharding import ACROSS, CONFIG, PARAMS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_processes_of_four_devices_give_one_devices_gradient(tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, PARAMS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "tests/model/two_processes.py"), str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([*command, number, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True)
        for number in "01"
    ]
    reports = [process.communicate(timeout=900)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for report in reports:
        found = json.loads(report.splitlines()[-1])
        assert found["devices"] == 8 and len(found["gaps"]) == len(ACROSS)
        assert max(found["gaps"].values()) < 1e-5, found

"""python -m jaxrl_sat.aot, and the page made of its answers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_sat.aot.__main__ import main
from jaxrl_sat.report import aot_table
from tests.run_configs import CONFIGS, model_folder

FLAGSHIP = str(CONFIGS / "sat_grpo.py")

# ----------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "allowed: --config=FILE[:PRESET], --topology=KIND:AxBxC"),
        (["--topology=v5p:4x4x4", "--workdir=x"], "--workdir=x: no such flag; allowed: --config=FILE"),
        (["--topology=v5p:4x4x4", "--slices=0"], "--slices: 0; allowed: 1 to 64"),
        (["--topology=v5p:4x4x4", "--program=both"], "--program"),
        (["--topology=gpu:8x8"], "--topology: 'gpu:8x8'; allowed: "),
        (["--topology=v5p:4x4x4", "--config.model.path=/no/where"], "/no/where"),
    ],
)
def test_mistake(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main([f"--config={FLAGSHIP}:tpu", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


ANSWER = {
    "name": str,
    "rows": int,
    "tokens_per_device": int,
    "argument_bytes": int,
    "temp_bytes": int,
    "peak_bytes": int,
    "state_bytes_expected": int,
    "flops": float,
    "compile_s": float,
    "fits": bool,
}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_the_command_compiles(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, head_dim=128)
    command = [sys.executable, "-m", "jaxrl_sat.aot", f"--config={FLAGSHIP}:cpu", "--topology=v5e:2x2"]
    command += [f"--config.model.path={folder}", "--config.mesh.trainer.fsdp=4", "--config.mesh.sampler.data=4"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["topology"], found["devices"], found["hbm_bytes"]) == ("v5e:2x2", 4, round(15.75 * 2**30))
    assert [program["name"] for program in found["programs"]] == ["train", "generate", "prefill"]
    for program in found["programs"]:
        assert {key: type(program[key]) for key in ANSWER} == ANSWER
        assert program["fits"]
        assert program["peak_bytes"] >= program["state_bytes_expected"] > 0


# -------------------------------------------------------------------------------------------- the page


def test_the_page_is_made_of_the_answers() -> None:
    docs = CONFIGS.parent / "docs"
    answers = aot_table.read(docs / "aot.json")
    assert list(answers) and set(answers) <= set(aot_table.CASES)
    assert (docs / "aot.md").read_text(encoding="utf-8") == aot_table.page(answers)


def test_a_line_of_the_page() -> None:
    program = {"name": "train", "mesh": {"data": 1, "fsdp": 64}, "rows": 64, "microbatches": 3, "fits": False}
    program |= {"tokens_per_device": 32768, "state_bytes_expected": 2**30, "peak_bytes": 3 * 2**31}
    program |= {"flops": 3.0, "model_flops": 2.0, "compile_s": 61.4}
    answer = {"topology": "v5p:4x4x4", "slices": 2, "devices": 128, "model": "M", "hbm_bytes": 2**32}
    name = next(iter(aot_table.CASES))
    lines = aot_table.page({name: answer | {"programs": [program]}}).splitlines()
    cells = [name, "M train", "128 (2 x v5p:4x4x4)", "fsdp 64", "64 x 3", "32,768", "1.0", "6.0 (does not fit)"]
    assert f"| {' | '.join([*cells, '4.0', '1.50', '61'])} |" in lines

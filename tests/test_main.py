"""The command line: each mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_sat import main as main_module
from tests.run_configs import CONFIGS, data_folder, model_folder

FLAGSHIP = str(CONFIGS / "sat_grpo.py")
HEAD = "from ml_collections import ConfigDict\n"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main_module.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config"),
        ([f"--config={FLAGSHIP}:big"], "--config: preset 'big'; allowed: cpu, gpu, tpu"),
        ([f"--config={FLAGSHIP}", "--dryrun"], "--dryrun: no such flag; allowed: "),
        ([f"--config={FLAGSHIP}", "stray"], "stray: no such flag; allowed: "),
        ([f"--config={FLAGSHIP}", "--config.updatse=3"], "updatse: no such key; did you mean updates?"),
        ([f"--config={FLAGSHIP}", "--config.model=x"], "model: a group of keys; allowed: model.path"),
        ([f"--config={FLAGSHIP}", "--config.updates"], "--config.updates: no value; allowed: --config.updates=VALUE"),
        ([f"--config={FLAGSHIP}", "--config.updates=many"], "updates: 'many'; allowed: a whole number, 1 or more"),
        ([f"--config={FLAGSHIP}", "--config.updates", "-3"], "updates: -3; allowed: a whole number, 1 or more"),
        (["--config", f"{FLAGSHIP}:tpu", "--dry-run"], "model.path and data.path: not given"),
        (["--config", "nowhere/x.py"], "--config: nowhere/x.py is not a file; allowed: "),
        ([f"--config={FLAGSHIP}:cpu", "--config.model.path=/no/where", "--dry-run"], "model.path: '/no/where'"),
        ([f"--config={FLAGSHIP}:cpu", "--config.model.path=/no/where"], "/no/where"),
    ],
)
def test_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], message: str) -> None:
    status, out, err = run(capsys, *argv, *([f"--workdir={tmp_path}"] if argv else []))
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(preset:\n", "1: SyntaxError: '(' was never closed"),
        ("import no_such_module_here\n", "1: ModuleNotFoundError: No module named"),
        (f"{HEAD}def get_config(preset):\n    c = ConfigDict()\n    return c.nothing\n", "4: AttributeError: "),
        ("x = 1\n", "defines no function get_config"),
        ("def get_config(preset):\n    return 3\n", "returned a int; allowed: a ConfigDict"),
        (f"{HEAD}def get_config(preset):\n    return ConfigDict(dict(seed=1))\n", "updates: missing"),
        (f"{HEAD}def get_config():\n    return ConfigDict(dict(seed=1))\n", "preset 'cpu', but"),
    ],
)
def test_config_file_that_does_not_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    status, _, err = run(capsys, f"--config={file}:cpu", "--dry-run")
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_dry_run_of_the_tpu_preset_needs_no_tpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m", hidden_size=64, max_position_embeddings=32768)
    data = data_folder(tmp_path / "d")
    status, out, err = run(
        capsys,
        f"--config={FLAGSHIP}:tpu",
        "--dry-run",
        "--config.pipeline.lag",
        "8",
        f"--config.model.path={model}",
        f"--config.data.path={data}",
    )
    assert (status, err) == (0, "")
    printed = json.loads(out)
    assert printed["preset"] == "tpu"
    assert printed["config"]["pipeline"] == {"mode": "interval", "lag": 8}
    assert printed["meshes"]["devices wanted"] == 128
    assert printed["plan"]["lag"]["realised lag, most"] == 8


def test_mesh_that_does_not_divide_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m", num_experts=6)
    argv = [f"--config={FLAGSHIP}:cpu", "--dry-run", f"--config.model.path={model}", "--config.mesh.trainer.expert=4"]
    status, _, err = run(capsys, *argv)
    assert status == 2
    assert err == "error: mesh.trainer.expert: 4; allowed: a divisor of 6, the model's experts dimension\n"


def test_last_of_a_repeated_flag_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    status, out, _ = run(
        capsys,
        f"--config={FLAGSHIP}:cpu",
        "--dry-run",
        f"--config.model.path={model}",
        "--config.seed=1",
        "--config.seed=2",
    )
    assert status == 0 and json.loads(out)["config"]["seed"] == 2


def as_a_command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(CONFIGS.parent)
    command = [sys.executable, "-m", "jaxrl_sat.main", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_a_process_of_its_own_picks_the_preset(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    done = as_a_command(f"--config={FLAGSHIP}", "--dry-run", f"--config.model.path={model}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["preset"] == "cpu"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"], "a dry run writes nothing"


def test_help(tmp_path: Path) -> None:
    done = as_a_command("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--config.KEY=VALUE" in done.stdout

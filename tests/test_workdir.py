"""A work folder belongs to one process and one configuration."""

import subprocess
import sys

import pytest

from jaxrl_sat import workdir
from jaxrl_sat.types import InputError
from jaxrl_sat.workdir import check_layout


def test_second_process_is_refused(tmp_path):
    code = f"import pathlib as p; from jaxrl_sat import workdir as w; w.claimed(p.Path({str(tmp_path)!r})).__enter__()"
    with workdir.claimed(tmp_path):
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert second.returncode != 0 and "is in use by another run" in second.stderr
    with workdir.claimed(tmp_path):
        pass


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="--workdir: .*taken cannot be written"), workdir.claimed(tmp_path / "taken"):
        pass


def test_resume_refuses_another_learning_problem_but_not_a_longer_run(tmp_path):
    config = {"seed": 1, "updates": 10, "recipe": "grpo", "optimizer": {"learning_rate": 1e-4}, "eval": {"every": 5}}
    workdir.record_config(tmp_path, config)
    workdir.check_same_run(tmp_path, config | {"updates": 20, "eval": {"every": 7}}, resumes=True)
    workdir.check_same_run(tmp_path, config | {"seed": 2}, resumes=False)
    with pytest.raises(InputError, match=r"optimizer\.learning_rate: 0\.1, but the run in .* started with 0\.0001"):
        workdir.check_same_run(tmp_path, config | {"optimizer": {"learning_rate": 0.1}}, resumes=True)
    with pytest.raises(InputError, match="seed: 2, but"):
        workdir.check_same_run(tmp_path, config | {"seed": 2}, resumes=True)


@pytest.mark.parametrize("text", ['{"model_type": "qwen3_moe"}', "{torn", "[]"])
def test_config_that_no_run_wrote_is_never_written_over(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"--workdir: .*config\.json is not"):
        workdir.check_same_run(tmp_path, {"seed": 1}, resumes=False)


def test_checkpoints_without_their_config_are_refused(tmp_path):
    with pytest.raises(InputError, match="has checkpoints but no config"):
        workdir.check_same_run(tmp_path, {"seed": 1}, resumes=True)


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "rollouts", "checkpoints_unreadable"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(InputError, match=f"--workdir: .*{name} is not a folder; allowed"):
        check_layout(tmp_path)
    with pytest.raises(InputError, match=f"{name} is not a folder"), workdir.claimed(tmp_path):
        raise AssertionError("claimed")


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "curves.png"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"--workdir: .*{name} is not a file; allowed"):
        check_layout(tmp_path)

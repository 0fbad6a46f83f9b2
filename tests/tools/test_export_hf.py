"""A run's checkpoint leaves as the model it holds, with the tokenizer it was sampled with."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_sat import embedded, sources
from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.model import load_hf, save_hf
from jaxrl_sat.model.folder import Folder
from jaxrl_sat.tools import export_hf
from jaxrl_sat.types import TrainState
from tests.model.helpers import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a tiny model in bfloat16 that started from a folder with the embedded tokenizer."""
    root = tmp_path_factory.mktemp("run")
    config, start = tiny()
    save_hf(root / "start", config, start)
    shutil.copy(embedded.model_path() / "tokenizer.json", root / "start")
    (root / "config.json").write_text(json.dumps({"model": {"path": str(root / "start"), "dtype": "bfloat16"}}))
    checkpoints = Checkpointer(root / "checkpoints", keep=2)
    for step in (3, 5):
        params = jax.tree.map(lambda x, step=step: (x * step).astype(jnp.bfloat16), start)
        opt_state = optax.adam(1e-3).init(params)
        checkpoints.save(TrainState(params, opt_state, jnp.int32(step), jnp.int32(0)), {})
    checkpoints.close()
    return root


@pytest.mark.parametrize(("arguments", "step"), [([], 5), (["--step=3"], 3)])
def test_the_model_of_a_checkpoint_comes_back(run: Path, tmp_path: Path, arguments: list[str], step: int) -> None:
    assert export_hf.main([f"--workdir={run}", f"--out={tmp_path / 'model'}", *arguments]) == 0
    config, params = load_hf(tmp_path / "model", "bfloat16")
    expected, start = tiny()
    assert config == expected
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, (y * step).astype(jnp.bfloat16)), params, start)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (run / "start" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("workdir", "arguments", "words"),
    [
        ("", ["--step=4"], "checkpoint 4: not in "),
        ("", ["--step=x"], "invalid int value"),
        ("", ["--out="], "--out: empty"),
        ("start", [], "is not a run's"),
        ("nowhere", [], "is not a run's"),
    ],
)
def test_what_is_not_there_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, workdir: str, arguments: list[str], words: str
) -> None:
    assert export_hf.main([f"--workdir={run / workdir}", f"--out={tmp_path / 'model'}", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("inside", ["", "checkpoints/model"])
def test_a_run_is_not_written_over(run: Path, capsys: pytest.CaptureFixture, inside: str) -> None:
    before = (run / "config.json").read_bytes()
    assert export_hf.main([f"--workdir={run}", f"--out={run / inside}"]) == 2
    assert "is or lies in the work folder of a run" in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == before and not (run / "model.safetensors").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_tokenizer_stays_where_the_model_is_written_over_what_it_started_from(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "start", tmp_path / "start")
    shutil.copytree(run / "checkpoints", tmp_path / "run" / "checkpoints")
    path = {"path": str(tmp_path / "start"), "dtype": "bfloat16"}
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": path}))
    assert export_hf.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'start'}"]) == 0
    found = contents(tmp_path / "start")
    assert found.keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert found["tokenizer.json"] == (run / "start" / "tokenizer.json").read_bytes()
    np.testing.assert_array_equal(
        load_hf(tmp_path / "start", "bfloat16")[1]["final_norm"], (tiny()[1]["final_norm"] * 5).astype(jnp.bfloat16)
    )


def test_nothing_of_an_earlier_model_stays_beside_it(run: Path, tmp_path: Path) -> None:
    for name in (*sources.SMALL_FILES, "notes.txt"):
        (tmp_path / name).write_text("{}")
    assert export_hf.main([f"--workdir={run}", f"--out={tmp_path}"]) == 0
    found = contents(tmp_path)
    assert found.keys() == {"config.json", "model.safetensors", "tokenizer.json", "notes.txt"}
    assert found["notes.txt"] == b"{}"
    assert found["tokenizer.json"] == (run / "start" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_folder_where_a_file_belongs_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("1")
    assert export_hf.main([f"--workdir={run}", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / name} is a folder; it must be a file, or not be there\n"
    assert contents(tmp_path) == {f"{name}/mine": b"1"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_disk_that_is_full_leaves_the_old_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert export_hf.main([f"--workdir={run}", f"--out={tmp_path}", "--step=3"]) == 0
    before, writing = contents(tmp_path), Folder.writing

    @contextlib.contextmanager
    def full(self: Folder, file: str) -> Iterator[IO[bytes]]:
        with writing(self, "/dev/full" if file == f"{name}.partial" else file) as opened:
            yield opened

    monkeypatch.setattr(Folder, "writing", full)
    assert export_hf.main([f"--workdir={run}", f"--out={tmp_path}"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("change", "words"), [({"dtype": "int8"}, "int8"), ({"dtype": "float32"}, "bfloat16")])
def test_a_run_whose_config_was_changed_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, change: dict, words: str
) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    found = json.loads((run / "config.json").read_text())["model"] | change
    (tmp_path / "config.json").write_text(json.dumps({"model": found}))
    assert export_hf.main([f"--workdir={tmp_path}", "--out=/tmp/never_made_by_export"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and words in errors[0]

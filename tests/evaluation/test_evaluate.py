"""The command from flags to tables: the same answers whole, stopped and resumed; two compared; what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat import embedded, evaluate, model
from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.evaluation import answers, compare, estimates, folder
from jaxrl_sat.evaluation.subject import Subject, make_service
from jaxrl_sat.types import InputError, SamplingParams, TrainState

ASKED = ["--model=embedded", "--problems=6", "--samples=4", "--max-tokens=8", "--slots=8", "--responses"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = evaluate.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def problems(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums that the embedded model has seen the like of, with ids."""
    rows = [{"id": f"sum{a}", "prompt": f"{a}+{a + 3}", "answer": str(2 * a + 3)} for a in range(11, 17)]
    return problems(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


@pytest.fixture(scope="module")
def whole(sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The out folder of an evaluation of a file and of the embedded set."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert evaluate.main([*ASKED, f"--data={sums},arithmetic", f"--out={out}"]) == 0
    return out


def table(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_tables_say_what_became_of_each_problem(whole: Path) -> None:
    rows = table(whole, "sums")
    assert [row["id"] for row in rows] == [f"sum{a}" for a in range(11, 17)]
    assert rows[0] | {"right": 0, "responses": 0, "tokens_mean": 0, "truncated": 0} == {
        "id": "sum11", "problem": "11+14", "answer": "25", "right": 0, "tokens_mean": 0, "truncated": 0, "unjudged": 0,
        "responses": 0,
    }  # fmt: skip
    for row in rows:
        assert row["right"] == [text == row["answer"] for text in row["responses"]]
        assert row["tokens_mean"] == np.mean([len(text) + 1 for text in row["responses"]]), "characters and an end"
    assert len(table(whole, "arithmetic")) == 6 and any(sum(row["right"]) for row in rows)


def test_summary_has_the_figures_of_the_tables(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    right = np.asarray([row["right"] for row in table(whole, "sums")])
    found = summary["sets"]["sums"]
    assert (found["problems"], found["samples"], found["truncated"]) == (6, 4, 0)
    assert found["avg_at_4"]["value"] == right.mean() == found["pass_at_1"]["value"]
    assert found["pass_at_4"]["value"] == right.any(axis=1).mean()
    assert found["avg_at_4"]["low"] < right.mean() < found["avg_at_4"]["high"]
    assert summary["settings"]["seed"] == 0 and summary["versions"]["jax"]


def test_goes_on_after_a_kill_to_the_same_answers(
    whole: Path, sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is lost of an evaluation that was killed is the problems under way, and a line half written."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "summary.json").unlink()
    lines = (out / "sums.jsonl").read_text().splitlines(keepends=True)
    marked = lines[4].replace('"truncated": 0', '"truncated": 1')
    (out / "sums.jsonl").write_text(marked + lines[1] + lines[0][:40])
    status, said, _ = run(capsys, *ASKED, f"--data={sums},arithmetic", f"--out={out}")
    assert status == 0 and "pass@4" in said
    kept, expected = table(out, "sums"), table(whole, "sums")
    assert kept[4].pop("truncated") == 1, "it was not asked again"
    expected[4].pop("truncated")
    assert kept == expected and table(out, "arithmetic") == table(whole, "arithmetic")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--seed=1", "--seed: 1, but the evaluation in"),
        ("--samples=2", "--samples: 2, but"),
        ("--temperature=0.5", "--temperature: 0.5, but"),
        ("--problems=5", "--data: "),
        ("--stop=x", "--stop: ['x'], but"),
    ],
)
def test_another_evaluation_does_not_go_into_the_folder(
    whole: Path, sums: Path, capsys: pytest.CaptureFixture[str], flag: str, said: str
) -> None:
    status, _, err = run(capsys, *ASKED, f"--data={sums},arithmetic", f"--out={whole}", flag)
    assert status == 2 and err.startswith(f"error: {said}") and "another --out" in err and err.count("\n") == 1


def results(*counts: int, samples: int = 4) -> list[folder.Result]:
    return [
        folder.Result(f"p{i}", "?", "1", [j < count for j in range(samples)], 3.0, 0, 0)
        for i, count in enumerate(counts)
    ]


def evaluated(path: Path, counts: Sequence[int], checksum: str = "same") -> Path:
    path.mkdir()
    (path / "settings.json").write_text(json.dumps({"data": {"sums": checksum}}))
    folder.write(path / "sums.jsonl", results(*counts))
    (path / "summary.json").write_text("{}")
    return path


def test_comparison_is_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = evaluated(tmp_path / "one", [0, 1, 2, 2, 4, 0, 1, 0])
    other = evaluated(tmp_path / "other", [1, 2, 3, 1, 4, 1, 2, 1])
    status, said, _ = run(capsys, "--compare", str(one), str(other), f"--out={tmp_path / 'found'}")
    found = json.loads((tmp_path / "found" / "comparison.json").read_text())["sets"]["sums"]
    gaps = np.array([1, 1, 1, -1, 0, 1, 1, 1]) / 4
    assert status == 0 and "better on 6 problems, worse on 1, even on 1" in said
    assert found["avg"]["change"] == pytest.approx(gaps.mean()) and (found["wins"], found["losses"]) == (6, 1)
    half = 2.3646 * gaps.std(ddof=1) / np.sqrt(8)
    assert found["avg"]["high"] - found["avg"]["change"] == pytest.approx(half, rel=1e-4)
    assert found["avg"]["p"] == 2 * (1 + 7) / 2**7, "one of seven signs or none against the others, on either side"
    assert found["pass@4"]["second"] == 1 and found["differ"]["p3"] == [0.5, 0.25]


def test_a_comparison_says_which_settings_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [evaluated(tmp_path / name, [0, 1]) for name in ("one", "other")]
    for path, changes in zip(folders, ({}, {"temperature": 0.6, "seed": 1, "model": {"path": "b"}}), strict=True):
        settings = {"data": {"sums": "same"}, "temperature": 1.0, "seed": 0, "stop": [], "model": {"path": "a"}}
        (path / "settings.json").write_text(json.dumps(settings | changes))
    assert run(capsys, "--compare", *map(str, folders), f"--out={tmp_path / 'found'}")[0] == 0
    assert json.loads((tmp_path / "found" / "comparison.json").read_text())["settings"] == {"temperature": [1.0, 0.6]}
    _, said, _ = run(capsys, "--compare", *map(str, folders))
    assert said.splitlines()[-1] == "--temperature is 1.0 in the first and 0.6 in the second"
    assert "temperature" not in run(capsys, "--compare", str(folders[0]), str(folders[0]))[1]


def test_comparison_refuses_what_cannot_be_compared(tmp_path: Path) -> None:
    one = evaluated(tmp_path / "one", [0, 1])
    other = evaluated(tmp_path / "other", [0, 1], "other problems")
    with pytest.raises(InputError, match="--compare: sums has other problems"):
        compare.compare(one, other)
    (other / "summary.json").unlink()
    with pytest.raises(InputError, match="other is not finished"):
        compare.compare(one, other)
    with pytest.raises(InputError, match="is not the folder of an evaluation"):
        compare.compare(one, tmp_path)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data=arithmetic"], "--model: missing"),
        (["--model=embedded"], "--data: missing"),
        (["--model=embedded", "--data=arithmetic,"], "--data: 'arithmetic,' has an empty name"),
        (["--model=nowhere", "--data=arithmetic"], "--model: model.path: 'nowhere' is not a folder"),
        ([*ASKED, "--data=nowhere.jsonl"], "--data: 'nowhere.jsonl' does not exist; allowed: arithmetic, the folder"),
        ([*ASKED, "--data=arithmetic,arithmetic"], "--data: two sets are called 'arithmetic'"),
        ([*ASKED, "--data=arithmetic", "--samples=0"], "--samples: '0'; allowed: a whole number from 1"),
        ([*ASKED, "--data=arithmetic", "--samples=many"], "--samples: 'many'; allowed"),
        ([*ASKED, "--data=arithmetic", "--temperature=nan"], "--temperature: 'nan'; allowed"),
        ([*ASKED, "--data=arithmetic", "--temperature=0"], "--samples: 4 at --temperature=0"),
        ([*ASKED, "--data=arithmetic", "--top-p=0"], "--top-p: '0'; allowed"),
        ([*ASKED, "--data=arithmetic", "--template=jinja"], "--template: 'jinja'; allowed: chat, none"),
        ([*ASKED, "--data=arithmetic", "--split=dev"], "--data: arithmetic has no split 'dev'; allowed: test"),
        ([*ASKED, "--data=arithmetic", "--stop="], "--stop: an empty text"),
        ([*ASKED, "--data=arithmetic", "--max-tokens=999999"], "--max-tokens: 999999; allowed: below"),
        ([*ASKED, "--data=arithmetic", "--dtype=float16"], "--dtype: 'float16'; allowed: float32, bfloat16"),
        ([*ASKED, "--data=arithmetic", "--mesh=rows=2"], "--mesh: axis 'rows'; allowed"),
        ([*ASKED, "--data=arithmetic", "--mesh=tensor=3"], "--mesh: mesh.sampler.tensor: 3; allowed"),
        ([*ASKED, "--data=arithmetic", "--speed=9"], "unrecognized arguments: --speed=9; allowed: --model"),
        (["--compare", "a", "b", "--samples=3"], "--samples: given with --compare"),
        (["--compare", "a", "b"], "--compare: a is not the folder of an evaluation"),
    ],
)
def test_bad_flags_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    status, _, err = run(capsys, *argv)
    assert status == 2 and err.startswith(f"error: {said}") and err.count("\n") == 1 and "allowed: " in err


def test_a_mesh_beyond_the_devices_is_refused() -> None:
    with pytest.raises(InputError, match="--mesh: 64 devices, 8 found; allowed: 8 or fewer"):
        sampling = SamplingParams(1.0, 8, (0,))
        make_service(Subject.of("embedded"), sampling, "float32", 64, 16, {"data": 64, "expert": 1, "tensor": 1})


def test_bad_sets_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = problems(tmp_path / "twice.jsonl", [{"id": "a", "prompt": "1+1", "answer": "2"}] * 2)
    assert "twice has 2 problems with the id 'a'" in run(capsys, *ASKED, f"--data={twice}")[2]
    (tmp_path / "empty.jsonl").write_text("")
    status, _, err = run(capsys, *ASKED, f"--data={tmp_path / 'empty.jsonl'}")
    assert status == 2 and "empty" in err and err.count("\n") == 1
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "notes.txt").write_text("mine")
    assert "holds something else" in run(capsys, *ASKED, "--data=arithmetic", f"--out={tmp_path / 'thing'}")[2]
    lacking = problems(tmp_path / "lacking.jsonl", [{"prompt": "1+1"}])
    assert run(capsys, *ASKED, f"--data={lacking}")[0] == 2


def test_a_response_ends_before_a_stop_string() -> None:
    assert answers._until("7\nQ: 3 + 4", ["\n", "Q"]) == "7"
    assert answers._until("7", ["\n"]) == "7"


def test_a_run_logs_the_same_figures() -> None:
    right = np.asarray([[True, False], [True, True], [False, False]])
    found = estimates.metrics("set", right)
    average = estimates.avg_at_k(right)
    assert found == {
        "eval/set/avg_at_2": 0.5,
        "eval/set/avg_at_2_ci": average.half_width,
        "eval/set/pass_at_2": pytest.approx(2 / 3),
        "eval/set/pass_at_2_ci": estimates.pass_at_k(right, 2).half_width,
    }


def test_model_of_a_run_is_named_by_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "12").mkdir(parents=True)
    (tmp_path / "checkpoints" / "8").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": "embedded", "dtype": "float32"}}))
    found = Subject.of(str(tmp_path))
    assert (found.source, found.files) == ("embedded", "checkpoint 12")
    assert found.checkpoint == tmp_path / "checkpoints" / "12"
    assert Subject.of(str(embedded.model_path())).files.count("@") == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, a work folder whose newest checkpoint has other weights than its model, and `exported`, those weights."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    config, params = model.load_hf(str(embedded.model_path()), "float32")
    changed = jax.tree.map(lambda leaf: leaf * jnp.asarray(rng.uniform(0.7, 1.3, leaf.shape), leaf.dtype), params)
    checkpoints = Checkpointer(folder / "run" / "checkpoints", keep=None)
    for step, weights in ((2, params), (3, changed)):
        checkpoints.save(TrainState(params=weights, opt_state={}, step=jnp.int32(step), skipped=jnp.int32(0)), {})
    checkpoints.close()
    described = {"model": {"path": "embedded", "dtype": "float32"}}
    (folder / "run" / "config.json").write_text(json.dumps(described))
    model.save_hf(folder / "exported", config, changed)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(embedded.model_path() / name, folder / "exported" / name)
    return folder


def test_a_run_is_asked_with_the_weights_of_its_newest_checkpoint(whole: Path, sums: Path, trained: Path) -> None:
    """Its answers are those of the same weights in a Hugging Face folder, and not those of the model it began with."""
    for name in ("run", "exported"):
        asked = [*ASKED, f"--model={trained / name}", f"--data={sums}", f"--out={trained / 'out' / name}"]
        assert evaluate.main(asked) == 0
    assert table(trained / "out" / "run", "sums") == table(trained / "out" / "exported", "sums")
    assert table(trained / "out" / "run", "sums") != table(whole, "sums")
    summary = json.loads((trained / "out" / "run" / "summary.json").read_text())
    assert summary["settings"]["model"]["files"] == "checkpoint 3"


def test_a_run_without_a_checkpoint_that_can_be_read_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    shutil.copy(trained / "run" / "config.json", tmp_path / "new")
    shutil.copytree(trained / "run", tmp_path / "cut")
    largest = max((tmp_path / "cut" / "checkpoints" / "3").rglob("*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-9])
    for name, said in (
        ("new", "new/checkpoints has no checkpoint; allowed: the work folder of a run that"),
        ("cut", "checkpoint 3 in .* is damaged"),
    ):
        status, _, err = run(capsys, *ASKED, f"--model={tmp_path / name}", "--data=arithmetic")
        assert status == 2 and re.search(f"^error: --model: .*{said}", err.strip().splitlines()[-1]), err

"""The command that prepares data: its flags, what it leaves and what it does not."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_sat.data.prepare import Source
from jaxrl_sat.tools.prepare_data import main, read_source
from jaxrl_sat.types import InputError


def problems(file: Path, count: int = 3) -> Path:
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(count)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_a_source_in_words() -> None:
    assert read_source("a/GSM-8k.jsonl") == Source(Path("a/GSM-8k.jsonl"), "gsm_8k")
    spelt = "odd,file.parquet,name=n,split=test,schema=dapo"
    assert read_source(spelt) == Source(Path("odd,file.parquet"), "n", "dapo", None, "test")
    assert read_source("a.json,weight=.5").weight == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.json,wieght=1", "wieght=1; allowed: each of name, split, weight, schema once"),
        ("a.json,name=a,name=b", "name=a; allowed"),
        ("a.json,name=A b", "name 'A b', .*allowed: small letters"),
        ("a.json,schema=mmlu", "schema 'mmlu'; allowed: dapo, dolci, gsm8k, aime, math, plain"),
        ("a.json,weight=0", "weight '0'; allowed: a number from"),
        ("a.json,weight=nan", "weight 'nan'; allowed"),
        ("a.json,weight=1_0", "weight '1_0'; allowed"),
    ],
)
def test_a_source_that_is_none(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_source(text)


def test_what_the_command_says_and_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = problems(tmp_path / "a.jsonl"), tmp_path / "sets" / "mine"
    given = [f"--out={out}", "--tokenizer=embedded", "--max-tokens=6", f"{file},weight=2"]
    assert main(given) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["source  split  weight  read  kept", "a       train  2.0     3     3"]
    assert said[-1] == f"written to {out}: --config.data.path={out}"
    assert [entry.name for entry in out.parent.iterdir()] == ["mine"]
    names = {entry.name for entry in out.iterdir()}
    assert {"dataset_info.json", "features.json", "metadata.json", "report.json"} < names
    assert json.loads((out / "metadata.json").read_text()) == {"weights": {"a": 2.0}}


def test_mistakes_end_it_with_one_line_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = problems(tmp_path / "a.jsonl"), problems(tmp_path / "b.jsonl")
    (tmp_path / "bad.jsonl").write_text("nothing")
    before = sorted(tmp_path.iterdir())
    out = f"--out={tmp_path / 'out'}"
    mistakes = {
        (out, str(tmp_path / "bad.jsonl")): "bad.jsonl: begins with b'nothing'; allowed",
        (f"--out={file}", str(file)): "a.jsonl exists; allowed: a folder that does not yet",
        (f"--out={file}/deeper", str(file)): "--out: .* is not a path .Not a directory",
        ("--out=/proc/deeper/out", str(file)): "--out: .* cannot be written .No such file",
        ("--out=~no-such-user/out", str(file)): "--out: '~no-such-user/out' is not a path",
        (out, "~no-such-user/a.jsonl"): "SOURCE: '~no-such-user/a.jsonl' is not a path",
        (out, f"{'n' * 300}.jsonl"): "SOURCE: 'nnn.* is not a path .File name too long",
        (out, f"--name={'n' * 250}", str(file)): "nnn cannot be written .*File name too long.*; allowed",
        (out, f"{file},split=all"): "split 'all'; allowed: .*not all, which TFDS",
        (out,): "the following arguments are required: SOURCE; allowed",
        (out, "--max-tokens=4", str(file)): "--max-tokens: 4; allowed: .*--tokenizer=MODEL",
        (out, "--name=9", str(file)): "--name: '9'; allowed",
        (out, f"{file},weight=1", str(other)): "b.jsonl: no weight, while others have one",
        (out, f"{file},weight=1,split=test"): "a.jsonl: weight in split 'test'",
        (out, f"{file},name=b", f"{other},split=test"): "are both called 'b'; allowed: names of their own",
        (out, "--tokenizer=/nowhere", str(file)): "--tokenizer: .*/nowhere",
        (out, "--on-bad-row=ignore", str(file)): "invalid choice: 'ignore'",
    }
    for arguments, said in mistakes.items():
        assert main(list(arguments)) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert re.search(said, line), line
        assert sorted(tmp_path.iterdir()) == before


def test_two_at_once_and_what_a_killed_one_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = problems(tmp_path / "a.jsonl"), tmp_path / ".out.building"
    (folder / "half").mkdir(parents=True)
    (folder / "waiting").write_text("half a li")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main([f"--out={tmp_path / 'out'}", str(file)]) == 2
        assert "is being built by another process" in capsys.readouterr().err
    assert main([f"--out={tmp_path / 'out'}", str(file)]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "out"]


@pytest.mark.slow
def test_kill_at_any_moment_leaves_no_set_or_all_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = [sys.executable, "-m", "jaxrl_sat.tools.prepare_data", f"--out={out}"]
    command = [*given, str(problems(tmp_path / "a.jsonl", 4_000))]
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole, names = time.monotonic() - began, sorted(entry.name for entry in out.iterdir())
    for part in (0.5, 0.7, 0.9):
        subprocess.run(["rm", "-r", str(out)], check=False)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(part * whole)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not out.exists() or sorted(entry.name for entry in out.iterdir()) == names
    subprocess.run(["rm", "-r", str(out)], check=False)
    subprocess.run(command, check=True, capture_output=True)
    assert sorted(entry.name for entry in out.iterdir()) == names
    assert not (tmp_path / ".out.building").exists()

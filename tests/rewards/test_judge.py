"""Users' reward functions that behave and that do not, and the judge's sums and metrics, against counts by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxrl_sat.rewards import Example, judge, plugin
from jaxrl_sat.rewards.functions import parse
from jaxrl_sat.rewards.judge import Judge
from jaxrl_sat.rewards.plugin import PlugIn
from jaxrl_sat.types import InputError, Prompt, Request, Rollout, TopK

BREVITY = Path(__file__).resolve().parents[1] / "fixtures" / "rewards" / "brevity.py"
EXAMPLE = Example("4", "s/7", "s", "set", {"prompt": b"2+2", "level": np.int32(3)}, "stop", 5)

MOODY = """
import os, sys, time
import numpy as np
from helper_beside import HALF

class Number:
    pass

class Silent(Exception):
    def __str__(self): raise RuntimeError("no words")

def moody(prompt, response, example):
    if response == "raise": raise ValueError("no\\nsuch thing")
    if response == "exit": sys.exit(3)
    if response == "hang": time.sleep(600)
    if response == "die": os._exit(3)
    if response == "silent": raise Silent
    if response == "fork": return 0.25 if os.fork() else 0.75
    if response == "grow": return {f"part{i}": 1.0 for i in range(100)}
    if response == "print": print("{}"); os.write(1, b"{}\\n"); return 1
    if response == "input": return float(len(sys.stdin.read()))
    if response == "seen": return {"id": example.id == "s/7", "record": example.record == {"prompt": "2+2", "level": 3},
                                   "rest": (prompt, example.source, example.num_tokens) == ("p", "s", 5)}
    return {"nan": float("nan"), "text": "1", "none": None, "list": [1.0], "object": Number(), "true": True,
            "numpy": np.float32(0.25), "parts": {"a": HALF, "b": 0.25}, "bad part": {"a b": 1.0}}[response]

def two(prompt, response): return 0.0
number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rewards")
    (made / "moody.py").write_text(MOODY)
    (made / "helper_beside.py").write_text("HALF = 0.5\n")
    (made / "broken.py").write_text("def f(:\n")
    return made


@pytest.fixture(scope="module")
def moody(folder: Path) -> Iterator[PlugIn]:
    made = PlugIn(f"{folder / 'moody.py'}:moody", 1, 3.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("response", "value", "parts"),
    [
        ("true", 1.0, {}),
        ("numpy", 0.25, {}),
        ("fork", 0.25, {}),
        ("print", 1.0, {}),
        ("input", 0.0, {}),
        ("parts", 0.75, {"a": 0.5, "b": 0.25}),
        ("seen", 3.0, {"id": 1.0, "record": 1.0, "rest": 1.0}),
    ],
)
def test_what_a_function_may_return(moody: PlugIn, response: str, value: float, parts: dict[str, float]) -> None:
    score = moody("p", response, EXAMPLE)
    assert (score.value, score.parts, score.failure) == (value, parts, "")
    assert moody("p", "none", EXAMPLE).failure, "nothing is left of it, to be taken for the next one's"


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("raise", "ValueError: no such thing"),
        ("exit", "SystemExit: 3"),
        ("silent", "Silent:"),
        ("nan", "ValueError: returned nan; a finite number allowed"),
        ("text", "TypeError: returned str; a number or a mapping of numbers allowed"),
        ("none", "TypeError: returned NoneType"),
        ("list", "TypeError: returned list"),
        ("object", "TypeError: returned Number"),
        ("bad part", "ValueError: a part is called 'a b'"),
        ("grow", "ValueError: 100 parts; at most 16 allowed"),
        ("die", "its process died"),
        ("hang", "no answer in 3 s"),
    ],
)
def test_a_failure_costs_one_response(moody: PlugIn, response: str, why: str) -> None:
    score = moody("p", response, EXAMPLE)
    assert score.value == 0.0 and score.failure.startswith(why)
    assert moody("p", "numpy", EXAMPLE).value == 0.25


def test_one_that_never_answers_is_asked_less_and_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "IN_A_ROW", 2)
    made = PlugIn(f"{folder / 'moody.py'}:moody", 1, 3.0)
    asked: list[str] = []

    def unanswered(line: str) -> str:
        asked.append(line)
        return "no answer"

    answered = made._ask
    monkeypatch.setattr(made, "_ask", unanswered)
    said = [made("p", "numpy", EXAMPLE).failure for _ in range(6)]
    assert [text == "no answer" for text in said] == [True, True, True, False, True, False] and len(asked) == 4
    monkeypatch.setattr(made, "_ask", answered)
    assert [made("p", "numpy", EXAMPLE).value for _ in range(3)] == [0.25] * 3
    made.close()
    assert made("p", "numpy", EXAMPLE).failure == "its process died"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("moody.py:absent", "has no attribute 'absent'"),
        ("moody.py:number", "is not a callable"),
        ("moody.py:two", "too many positional arguments"),
        ("broken.py:f", "SyntaxError"),
        ("nowhere.py:f", "FileNotFoundError"),
    ],
)
def test_a_function_that_cannot_be_called_is_named_before_the_run(folder: Path, target: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        judge.check(parse(f"math,{folder / target}"), 1.0)
    assert str(caught.value).startswith("rewards.functions: ") and why in str(caught.value)


def test_a_module_that_does_not_exist() -> None:
    with pytest.raises(InputError, match=r"rewards\.functions: f of no\.such:f cannot be used \(ModuleNotFoundError"):
        Judge(parse("no.such:f"), str, "set", 1, 1.0)


def rollout(text: str, answer: str, group: int = 0, finish_reason: str = "stop") -> Rollout:
    """A response of the characters of `text`."""
    tokens = np.array([ord(letter) for letter in text], np.int32)
    nothing = np.zeros((len(tokens), 0))
    prompt = Prompt(group, "p", answer, np.zeros(1, np.int32), record={"prompt": "p"})
    return Rollout(
        request=Request(prompt, group, 0),
        tokens=tokens,
        logp=np.zeros(len(tokens), np.float32),
        topk=TopK(nothing.astype(np.int32), nothing.astype(np.float32)),
        nucleus_ids=nothing.astype(np.int32),
        expert_ids=np.zeros((0, len(tokens), 0), np.uint8),
        versions=np.zeros(len(tokens), np.int32),
        prefill_version=0,
        finish_reason=finish_reason,
    )


def letters(tokens: np.ndarray) -> str:
    return "".join(map(chr, tokens))


def test_rewards_are_sums_by_weight_and_all_is_counted() -> None:
    made = Judge(parse(f"math=2,format=0.5,{BREVITY}:brevity=0.25"), letters, "set", 1, 30.0)
    batch = [
        rollout(r"it is \boxed{4}", "4"),  # 2 + 0.5 + 0.25 / 3
        rollout(r"\boxed{5}", "4"),  # 0 + 0.5 + 0.25
        rollout("4 and", "4", finish_reason="length"),  # 2 + 0 + 0.25 (1/2 - 1/2)
    ]
    other = rollout("4", "4")
    made.expect([one.request for one in batch])
    for one in [other, *batch[::-1]]:
        made.begin(one)
    judged = made.finish(batch)
    made.close()
    assert judged is not None
    np.testing.assert_allclose(judged.rewards, [2.5 + 0.25 / 3, 0.75, 2.0], rtol=1e-6)
    assert judged.rewards.dtype == np.float32
    assert judged.scores["math"].tolist() == [1, 0, 1] and judged.scores["format"].tolist() == [1, 1, 0]
    wanted = {
        "reward/mean": (2.5 + 0.25 / 3 + 0.75 + 2.0) / 3,
        "reward/math": 2 / 3,
        "reward/format": 2 / 3,
        "reward/brevity": (1 / 3 + 1) / 3,
        "reward/brevity/short": (1 / 3 + 1 + 1 / 2) / 3,
        "reward/brevity/cut": -0.5 / 3,
        "reward/math/failed": 0,
        "reward/format/failed": 0,
        "reward/brevity/failed": 0,
    }
    assert set(judged.metrics) == set(wanted) and judged.failures == {} and judged.seconds > 0
    for name, value in wanted.items():
        assert judged.metrics[name] == pytest.approx(value, rel=1e-6), name


def test_failures_count_and_a_stop_does_not_wait(folder: Path) -> None:
    made = Judge(parse(f"math,{folder / 'moody.py'}:moody"), letters, "set", 1, 600.0)
    batch = [rollout("raise", "4"), rollout("numpy", "4"), rollout("none", "4")]
    made.expect([one.request for one in batch])
    for one in batch:
        made.begin(one)
    judged = made.finish(batch)
    assert judged is not None and judged.rewards.tolist() == [0, 0.25, 0]
    assert judged.failures == {"moody": (2, "ValueError: no such thing")}
    assert judged.metrics["reward/moody/failed"] == 2

    stuck = rollout("hang", "4")
    made.expect([stuck.request])
    made.begin(stuck)
    assert made.finish([stuck], lambda: True) is None
    while not made._plug_ins["moody"]._busy:
        time.sleep(0.01)
    [process] = [one.process for one in made._plug_ins["moody"]._busy]
    made.close()
    assert process.returncode is not None
    made.close()


def test_the_page_shows_the_function_that_is_tested() -> None:
    page = BREVITY.parents[3] / "docs" / "rewards.md"
    assert BREVITY.read_text(encoding="utf-8").strip() in page.read_text(encoding="utf-8")


def test_a_function_ends_with_a_run_that_is_killed(folder: Path) -> None:
    """Its process looks whether the one that started it is still there."""
    code = (
        "import os, sys, threading, time; from jaxrl_sat.rewards import Example; "
        "from jaxrl_sat.rewards.plugin import PlugIn; made = PlugIn(sys.argv[1], 1, 600.0); assert not made.problem(); "
        "example = Example('4', '', '', '', {}, 'stop', 1); "
        "threading.Thread(target=made, args=('p', 'hang', example)).start(); time.sleep(0.3); "
        "print(made._busy.pop().process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, f"{folder / 'moody.py'}:moody"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=120)
    until = time.monotonic() + 30
    while _runs(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _runs(int(done.stdout))


def _runs(process: int) -> bool:
    """Whether it is there and no mere entry that nobody has collected yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

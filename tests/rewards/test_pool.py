"""The workers: killed, out of time, asked from threads, remembered, stopped, and gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl_sat import rewards
from jaxrl_sat.rewards import Outcome, pool
from jaxrl_sat.rewards.pool import Pool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def one() -> Iterator[Pool]:
    made = Pool(1)
    yield made
    made.close()


def test_right_wrong_and_readable(one: Pool) -> None:
    assert one.ask("same", "(x+1)^2", "x^2+2x+1") is Outcome.RIGHT
    assert one.ask("same", "(x+1)^2", "x^2+2x+2") is Outcome.WRONG
    assert one.ask("readable", "", r"\frac{1}{2}") is Outcome.RIGHT
    assert one.ask("readable", "", "__import__") is Outcome.WRONG


def test_what_was_asked_before_is_remembered(one: Pool) -> None:
    first = one.ask("same", "x+x", "2x")
    worker = one._idle[0]
    os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        assert one.ask("same", "x+x", "2x") is first is Outcome.RIGHT
    finally:
        os.kill(worker.process.pid, signal.SIGCONT)


def test_a_worker_killed_idle_or_at_work_is_replaced(one: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one.ask("same", "x+1", "1+x") is Outcome.RIGHT
    started, idle = one.started, one._idle[0].process
    idle.kill()
    assert one.ask("same", "x+2", "2+x") is Outcome.RIGHT
    assert one.started == started + 1 and idle.returncode == -signal.SIGKILL

    victim = one._idle[0].process
    os.kill(victim.pid, signal.SIGSTOP)  # it will be at work when it is killed
    killer = threading.Timer(0.3, victim.kill)
    killer.start()
    assert one.ask("same", "x+3", "3+x") is Outcome.RIGHT
    assert one.started == started + 2 and victim.returncode == -signal.SIGKILL


def test_a_case_over_its_time_is_ended_by_the_pool(one: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one.ask("same", "x+4", "4+x") is Outcome.RIGHT
    stuck = one._idle[0].process
    monkeypatch.setattr(pool, "SECONDS", 0.2)
    os.kill(stuck.pid, signal.SIGSTOP)
    assert one.ask("same", "x+5", "5+x") is Outcome.TIMED_OUT
    assert stuck.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert one.ask("same", "x+6", "6+x") is Outcome.RIGHT


LIMITS = """
import sys
from jaxrl_sat.rewards import equivalence, worker
assert "jax" not in sys.modules
worker.CPU_SECONDS = 0.3
def equivalent(found, answer):
    if found == "time":
        9 ** 9 ** 9  # one long operation, in which no handler of Python's would run
    return bool(bytearray(600 * 2 ** 20))
equivalence.equivalent = equivalent
worker.main()
"""


@pytest.mark.parametrize("which", ["time", "memory"])
def test_a_worker_ends_over_its_limits(which: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITS],
        input=f'["same", "{which}", ""]\n',
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "ready\n"
    assert done.returncode == -signal.SIGPROF if which == "time" else "MemoryError" in done.stderr


def test_threads_progress_and_stop(one: Pool) -> None:
    found: dict[int, Outcome] = {}

    def ask(i: int) -> None:
        found[i] = one.ask("same", f"{i}x+x", f"{i + 1 + i % 2}x")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: Outcome.WRONG if i % 2 else Outcome.RIGHT for i in range(8)}

    counts: list[int] = []
    stop = threading.Event()

    def progress(done: int) -> None:
        counts.append(done)
        if done == 3:
            stop.set()

    said = one.map([("same", f"{i}y+y", f"{i + 1}y") for i in range(6)], progress, stop)
    assert counts == [1, 2, 3]
    assert said == [Outcome.RIGHT] * 3 + [Outcome.OPEN] * 3


def test_a_closed_pool_has_no_process_and_says_nothing() -> None:
    made = Pool(1)
    assert made.ask("same", "z+1", "1+z") is Outcome.RIGHT
    process = made._idle[0].process
    made.close()
    assert process.returncode is not None
    assert made.ask("same", "z+2", "2+z") is Outcome.OPEN
    assert made.ask("same", "z+1", "1+z") is Outcome.RIGHT  # remembered


SCRIPT = r"""
import subprocess, sys, threading
from jaxrl_sat import rewards
from jaxrl_sat.rewards.verify import shared_pool
assert "jax" not in sys.modules and shared_pool().started == 0
assert rewards.verify("so 12", "12") and not rewards.verify("so 13", "12") and shared_pool().started == 0
found = []
thread = threading.Thread(target=lambda: found.append(rewards.verify(r"\boxed{\frac{2x}{4}}", r"\frac{x}{2}")))
thread.start(); thread.join()
assert found == [True]
print(*[worker.process.pid for worker in shared_pool()._idle])
"""


def test_a_script_without_a_main_guard_in_another_folder(tmp_path: Path) -> None:
    """Importing starts nothing, text needs no worker, and at the end no process is left."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for pid in map(int, done.stdout.split()):
        until = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()


def test_outcomes_and_readable_keep_the_order() -> None:
    responses = [r"\boxed{x+x}", "so 5", r"\boxed{x+x}", "none", r"\boxed{0.5}"]
    assert rewards.outcomes(responses, ["2x", "5", "3x", "5", r"\frac12"]) == [
        Outcome.RIGHT,
        Outcome.RIGHT,
        Outcome.WRONG,
        Outcome.WRONG,
        Outcome.RIGHT,
    ]
    assert rewards.readable([r"\frac{1}{2}", "a__b", "9" * 100_000]) == [True, False, False]


def test_a_long_answer_is_not_read() -> None:
    assert not rewards.verify("so 5", "5" * 50_000_000)
    assert not rewards.verify("5" * 50_000_000, "5")

"""The order in which waiting requests are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_policy as tiny

from jaxrl_sat.sampler.waiting import Job, Waiting
from jaxrl_sat.types import Prompt, Request, SamplingParams


def job(name: str, tokens: int, group: int, response: int = 4) -> Job:
    """A job whose prompt is its group number, `tokens` times."""
    prompt = Prompt(0, name, "", np.full(tokens, group, np.int32))
    return Job(Request(prompt, group, 0), SamplingParams(1.0, response, (tiny.STOP,)))


def bucket(length: int) -> int:
    return 16 if length <= 16 else 32


def filled(order: Any, jobs: list[Job]) -> Waiting[Job]:
    waiting: Waiting[Job] = Waiting(bucket, order)
    for one in jobs:
        waiting.add(one)
    return waiting


def take(waiting: Waiting[Job], count: int, rows: int = 3) -> tuple[str, dict[int, list[int]]]:
    """Names of the jobs taken, and the group numbers ahead by bucket."""
    taken = waiting.take(count, lambda _: rows)
    ahead = {size: [int(group.tokens[0]) for group in groups] for size, groups in taken.ahead.items()}
    return "".join(one.request.prompt.text for one, _ in taken.jobs), ahead


MIXED = [("a", 3, 0), ("b", 20, 1), ("c", 3, 0), ("d", 9, 2), ("e", 20, 1), ("f", 17, 3)]


@pytest.mark.parametrize(("order", "names"), [("fifo", "acbedf"), ("longest", "befdac"), ("shortest", "acdfbe")])
def test_groups_come_together_and_in_order(order, names):
    waiting = filled(order, [job(*one) for one in MIXED])
    assert len(waiting) == 6
    assert take(waiting, 4)[0] + take(waiting, 4)[0] == names
    assert len(waiting) == 0 and take(waiting, 4) == ("", {})


def test_the_size_of_a_job_is_its_prompt_and_what_it_may_answer():
    waiting = filled("longest", [job("a", 9, 0, response=4), job("b", 3, 1, response=11)])
    assert take(waiting, 1)[0] == "b"


def test_the_next_groups_of_the_bucket_are_to_be_read_with_it():
    waiting = filled("fifo", [job(*one) for one in [*MIXED, ("g", 2, 4), ("h", 16, 5), ("i", 5, 6)]])
    assert take(waiting, 1) == ("a", {16: [0, 2, 4]})
    assert take(waiting, 2) == ("cb", {16: [2, 4, 5], 32: [1, 3]})
    assert take(waiting, 1, rows=1) == ("e", {32: [3]})


def test_a_group_that_was_begun_is_joined_by_nobody():
    """Else one that is asked for again and again would keep all others waiting."""
    waiting = filled("fifo", [job("a", 3, 0), job("b", 3, 0), job("x", 3, 1)])
    assert take(waiting, 1)[0] == "a"
    waiting.add(job("c", 3, 0))
    assert take(waiting, 9)[0] == "bxc"


def test_one_number_and_another_prompt_is_another_group():
    waiting = filled("fifo", [job("a", 3, 0), job("x", 3, 1), job("b", 4, 0), job("c", 4, 0)])
    assert take(waiting, 2) == ("ax", {16: [0]})
    assert take(waiting, 2) == ("bc", {16: []})


def test_removed_jobs_are_not_taken():
    jobs = [job("a", 3, 0), job("b", 3, 0), job("c", 3, 1)]
    waiting = filled("fifo", jobs)
    assert waiting.remove(jobs[0]) and not waiting.remove(jobs[0])
    assert waiting.remove(jobs[2])
    assert (len(waiting), take(waiting, 3)) == (1, ("b", {16: []}))
    assert not waiting.remove(jobs[1])


@pytest.mark.parametrize(
    ("free", "everywhere", "share"), [(4, 4, 4), (4, 8, 3), (2, 8, 2), (1, 8, 1), (8, 9, 6), (0, 8, 0), (0, 0, 0)]
)
def test_an_engine_takes_its_part_of_what_waits(free, everywhere, share):
    """Of six jobs; rounded up, so that somebody takes the last."""
    waiting = filled("fifo", [job(str(i), 3, i) for i in range(6)])
    assert waiting.share(free, everywhere) == share
    assert filled("fifo", []).share(free, everywhere) == 0

"""Requests are functions of the run's seed and the update: repeatable, and never the same seed twice by design."""

import numpy as np

from jaxrl_sat.pipeline import requests
from jaxrl_sat.types import Prompt

PROMPTS = [Prompt(i, str(i), str(i), np.asarray([1, i], np.int32)) for i in range(5)]


def test_groups_stand_together_and_in_order():
    wanted = requests.training_requests(PROMPTS, 4, seed=0, update=3)
    assert [request.group for request in wanted] == [g for g in range(5) for _ in range(4)]
    assert [request.prompt.id for request in wanted] == [g for g in range(5) for _ in range(4)]
    assert len({request.seed for request in wanted}) == 20


def test_seeds_depend_on_run_update_and_purpose_alone():
    seeds = [r.seed for r in requests.training_requests(PROMPTS, 4, seed=0, update=3)]
    assert seeds == [r.seed for r in requests.training_requests(PROMPTS, 4, seed=0, update=3)]
    others = [
        requests.training_requests(PROMPTS, 4, seed=0, update=4),
        requests.training_requests(PROMPTS, 4, seed=1, update=3),
        requests.evaluation_requests(PROMPTS, 4, seed=0),
    ]
    for other in others:
        assert not set(seeds) & {r.seed for r in other}

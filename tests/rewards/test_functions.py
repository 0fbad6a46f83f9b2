"""The text that names a run's rewards; the reward for form; which groups dynamic sampling uses."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_sat.rewards.format import well_formed
from jaxrl_sat.rewards.functions import RewardFunction, parse
from jaxrl_sat.rewards.selection import with_signal
from jaxrl_sat.types import InputError


def test_names_weights_and_targets() -> None:
    assert parse("math") == (RewardFunction("math", 1.0),)
    assert parse(" math=2, format=0.1 ,my.rewards:brief=-.5,~/a b/own.py:late") == (
        RewardFunction("math", 2.0),
        RewardFunction("format", 0.1),
        RewardFunction("brief", -0.5, "my.rewards:brief"),
        RewardFunction("late", 1.0, "~/a b/own.py:late"),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' names no reward"),
        ("maths", "'maths'; allowed: NAME=WEIGHT"),
        ("math=x", "'x' is no weight"),
        ("math=nan", "'nan' is no weight"),
        ("math=1_0", "'1_0' is no weight"),
        ("math=1e9", "'1e9' is no weight"),
        ("math=0,format=0", "no weight but 0"),
        ("math,math=0.5", "two are called 'math'"),
        ("a.b:f,c:f", "two are called 'f'"),
        ("my.rewards:mean", "has a name that other metrics have"),
        ("my.rewards:math", "has a name that other metrics have"),
        ("my rewards:f", "'my rewards:f'; allowed"),
        ("import os:f", "allowed"),
    ],
)
def test_text_that_names_no_rewards(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert str(caught.value).startswith("rewards.functions: ") and said in str(caught.value)
    assert "allowed:" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"So \boxed{4}.", True),
        (r"<think>2 and 2, \boxed{5}?</think> It is \boxed{\frac{1}{2}}.", True),
        ("\n<think>x</think>\\boxed{4}", True),
        ("So 4.", False),
        (r"So \boxed 4", False),
        (r"So \boxed{4", False),
        (r"\boxed{4} or \boxed{5}", False),
        (r"\boxed{4} and so \boxed{4}", False),
        (r"I write \boxed{...}: \boxed{4}", True),  # a box that is only mentioned
        (r"\boxed{}", False),
        (r"\boxed{\text{maybe } 4}", False),
        (r"\boxed{4 \text{ or } 5}", True),  # a set, which the verifier reads
        (r"<think>x \boxed{4}", False),
        (r"x</think>\boxed{4}", False),
        (r"<think>x</think><think>y</think>\boxed{4}", False),
        (r"First <think>x</think>\boxed{4}", False),
        (r"<think>\boxed{4}</think>", False),
        ("", False),
    ],
)
def test_form(response: str, right: bool) -> None:
    assert well_formed("What is it?", response) == right


def test_a_thought_that_the_prompt_opens_is_to_be_closed() -> None:
    assert well_formed("Q<think>\n", r"x</think>\boxed{4}")
    assert not well_formed("Q<think>\n", r"\boxed{4}")
    assert not well_formed("Q<think>\n", r"<think>x</think>\boxed{4}")
    assert well_formed("<think>\n</think>Q", r"\boxed{4}")


def test_the_first_groups_with_unequal_rewards_are_used() -> None:
    rewards = np.array([1, 1, 0, 1, 0, 0, 0.5, 1, 0, 1, 0, 1], np.float32)
    groups = np.repeat(np.arange(6), 2)  # 0 and 2 are equal; 1, 3, 4 and 5 are not
    found = with_signal(rewards, groups, 3)
    assert found.used.tolist() == [2, 3, 6, 7, 8, 9]
    assert (found.groups_used, found.groups_dropped, found.groups_spare) == (3, 2, 1)
    few = with_signal(rewards[:6], groups[:6], 3)
    assert (few.used.tolist(), few.groups_used, few.groups_dropped, few.groups_spare) == ([2, 3], 1, 2, 0)
    none = with_signal(rewards[:2], groups[:2], 3)
    assert (none.used.tolist(), none.groups_used, none.groups_dropped) == ([], 0, 1)

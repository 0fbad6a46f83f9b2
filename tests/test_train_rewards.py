"""Whole runs, small: rewards of several functions, those that fail, and dynamic sampling, which resumes exactly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from test_train import model_folder, read, reward_even_starts, run, starts_even, timeless

from jaxrl_sat import main
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.rewards import judge
from jaxrl_sat.rewards.plugin import Score
from jaxrl_sat.types import InputError
from tests.run_configs import CONFIGS

__all__ = ["model_folder", "reward_even_starts"]  # fixtures

OWN = """
def first(prompt, response, example):
    assert prompt and example.answer and example.record["prompt"] and example.data_set == "arithmetic"
    if response[:1].isdigit():
        raise RuntimeError("digits")
    return {"letter": float(response[:1].isalpha()), "long": 0.25 * (example.num_tokens > 2)}
"""
DYNAMIC: dict[str, Any] = {
    "pipeline__mode": "fixed",
    "pipeline__lag": 2,
    "updates": 4,
    "eval__every": 0,
    "data__dynamic_sampling": True,
    "data__oversample": 1.5,
}


def test_rewards_of_several_functions_and_one_that_fails(tmp_path, model_folder):
    """Every figure is counted again from the words of all responses."""
    (tmp_path / "own.py").write_text(OWN)
    functions = f"math=1,{tmp_path / 'own.py'}:first=0.5"
    settings = {"rewards__functions": functions, "updates": 2, "eval__every": 0, "log__rollouts": 16}
    settings |= {"rewards__overlong_buffer": 2, "rewards__overlong_penalty": 0.5, "rewards__timeout": 60.0}
    last = run(tmp_path / "run", model_folder, **settings)[-1]
    lines = (tmp_path / "run" / "rollouts" / "update_000002.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    assert len(said) == 16
    firsts = np.array([one["rewards"]["first"] for one in said])
    evens = np.array([one["rewards"]["math"] for one in said])
    assert [one["reward"] for one in said] == pytest.approx(evens + 0.5 * firsts)
    assert last["reward/mean"] == pytest.approx(np.mean(evens + 0.5 * firsts))
    assert (last["reward/first"], last["reward/math"]) == pytest.approx((firsts.mean(), evens.mean()))
    assert last["reward/first/letter"] + last["reward/first/long"] == pytest.approx(last["reward/first"])
    assert set(firsts) <= {0, 0.25, 1, 1.25}
    tokenizer = Tokenizer.load(model_folder)
    tokens = [tokenizer.encode(one["response"]) for one in said]
    failed = sum(tokenizer.decode(each)[:1].isdigit() for each in tokens)  # without special tokens, as it was asked
    assert last["reward/first/failed"] == failed > 0
    lengths = np.array([len(each) for each in tokens])
    assert lengths.mean() == last["rollout/length_mean"]
    # Of four tokens two are left alone, and the last two cost 0.25 each.
    assert last["reward/overlong"] == pytest.approx(np.mean(-0.25 * np.maximum(0, lengths - 2)))

    with pytest.raises(InputError) as caught:
        run(tmp_path / "stopped", model_folder, **settings | {"rewards__on_failure": "stop"})
    assert "update 1: rewards.functions: first gave no score for" in str(caught.value)
    assert "(RuntimeError: digits); allowed: a score for each, or rewards.on_failure=zero" in str(caught.value)
    assert read(tmp_path / "stopped") == []


def test_dynamic_sampling_resumes_to_the_same_numbers(tmp_path, model_folder):
    whole = run(tmp_path / "whole", model_folder, **DYNAMIC)
    run(tmp_path / "parts", model_folder, **DYNAMIC | {"updates": 2})
    parts = run(tmp_path / "parts", model_folder, **DYNAMIC)
    assert timeless(parts) == timeless(whole)
    assert [r["staleness/lag_mean"] for r in whole] == [0, 1, 2, 2]
    for record in whole:
        used, dropped, spare = (record[f"rollout/groups_{name}"] for name in ("used", "dropped", "spare"))
        assert used + dropped + spare == 6 and used <= 4 and (not spare or used == 4)
    assert len({r["time/sampler_compilations"] for r in whole}) == 1


def test_an_update_without_a_group_left_is_skipped(tmp_path, model_folder, monkeypatch, capfd):
    calls: list[float] = []

    def all_right_at_first(prompt: str, response: str, example: Any) -> Score:
        calls.append(1.0)
        return Score(1.0 if len(calls) <= 16 else starts_even(response))

    monkeypatch.setattr(judge, "_math", all_right_at_first)
    settings = DYNAMIC | {"data__oversample": 1.0, "updates": 2, "pipeline__mode": "sync", "pipeline__lag": 0}
    first, second = run(tmp_path, model_folder, **settings)
    assert (first["rollout/groups_used"], first["rollout/groups_dropped"], first["train/skipped"]) == (0, 4, 1)
    assert (first["reward/mean"], first["train/tokens"], first["staleness/lag_max"]) == (1, 0, 0)
    assert second["rollout/groups_used"] > 0 and second["train/skipped"] == 1 and second["train/tokens"] > 0
    # Nothing was learnt from the first: the second is on the weights that the run began with.
    assert second["kl/ref"] == pytest.approx(0, abs=1e-6)
    assert "update 1 skipped: no group with unequal rewards" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sat_gspo"])
def test_log_probs_scored_by_the_sampler_follow_the_groups_used(tmp_path, model_folder, recipe):
    settings = DYNAMIC | {"recipe": recipe, "objective__denominator": "recomputed", "pipeline__lag": 1, "updates": 3}
    trainer = run(tmp_path / "trainer", model_folder, **settings)
    scored = run(tmp_path / "sampler", model_folder, **settings, sampler__score=True)
    assert timeless(scored) == timeless(trainer)


def test_a_dry_run_shows_the_rewards_and_refuses_one_that_is_not_there(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    command = [f"--config={CONFIGS / 'sat_grpo.py'}:cpu", "--dry-run"]
    target = f"{tmp_path / 'own.py'}:first"
    assert main.main([*command, f"--config.rewards.functions=math=1,{target}=0.5"]) == 0
    shown = json.loads(capsys.readouterr().out)["plan"]["rewards"]
    assert shown["reward"] == "1 math + 0.5 first" and shown["users' functions"] == {"first": target}
    assert main.main([*command, f"--config.rewards.functions={tmp_path / 'own.py'}:last"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: rewards.functions: last of ") and said.count("\n") == 1 and "allowed:" in said
    assert main.main([*command, "--config.data.oversample=2"]) == 2
    assert "data.oversample: 2.0; allowed: 1, or data.dynamic_sampling=true" in capsys.readouterr().err

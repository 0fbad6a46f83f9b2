"""Whole runs, small: lag as configured, exact resume, clean stops, and a kill at any moment that loses nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_sat import embedded, main, model, sampler, train
from jaxrl_sat.config import from_config_dict
from jaxrl_sat.rewards import judge
from jaxrl_sat.rewards.plugin import Score
from jaxrl_sat.types import InputError
from tests.run_configs import CONFIGS, flagship

SMALL: dict[str, Any] = {
    "updates": 4,
    "data.prompts_per_update": 4,
    "data.max_prompt_tokens": 40,  # more than any text has bytes: no prompt need be tokenised to be sure it fits
    "sampler.group_size": 4,
    "sampler.max_response_tokens": 4,
    "sampler.slots": 16,
    "learner.row_tokens": 48,
    "learner.microbatch_rows": 8,
    "optimizer.learning_rate": 1e-3,
    "eval.every": 2,
    "eval.problems": 4,
    "eval.samples": 2,
    "checkpoint.every": 2,
    "log.rollouts_every": 2,
    "log.rollouts": 3,
}
NAMES = """reward/mean train/loss train/grad_norm train/entropy train/skipped staleness/abs_d_mean staleness/abs_d_max
staleness/var_d staleness/k3 staleness/is_deviation staleness/lag_mean staleness/lag_max clip/fraction sat/q
sat/gate_rate sat/newly_clipped_fraction kl/ref rollout/length_mean rollout/truncated rollout/tokens_per_s
train/tokens_per_s time/step_s time/rollout_wait_s time/handoff_s time/sampler_compilations reward/math
reward/math/failed time/reward_s time/reward_wait_s""".split()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-layer Qwen3-MoE that speaks the embedded tokenizer's words."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(embedded.model_path() / name, folder / name)
    words = json.loads((embedded.model_path() / "config.json").read_text())["vocab_size"]
    config = model.ModelConfig(
        vocab_size=words,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        norm_topk_prob=True,
    )
    rng = np.random.default_rng(0)
    shapes = model.abstract_params(config, "float32")
    params = jax.tree.map(lambda s: rng.normal(0, 0.3, s.shape).astype(np.float32), shapes)
    model.save_hf(folder, config, params)
    return folder


def starts_even(response: str) -> float:
    return float(ord(response[:1] or "\0") % 2 == 0)


@pytest.fixture(autouse=True)
def reward_even_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model never answers a problem; this it can learn."""
    monkeypatch.setattr(judge, "_math", lambda prompt, response, example: Score(starts_even(response)))
    monkeypatch.setattr(
        train,
        "score",
        lambda rollouts, tokenizer: np.asarray([starts_even(tokenizer.decode(r.tokens)) for r in rollouts], np.float32),
    )


def run(folder: Path, model_folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Train in `folder` and read back its metrics. Dots in keys are written as double underscores."""
    config = flagship()
    config.update_from_flattened_dict(SMALL | {"model.path": str(model_folder)})
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    train.run(from_config_dict(config), folder)
    return read(folder)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith("time/") and "tokens_per_s" not in k} for r in records]


def test_run_leaves_what_the_design_names(tmp_path, model_folder):
    records = run(tmp_path, model_folder, pipeline__mode="interval", pipeline__lag=2)
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
    judged = {f"eval/arithmetic/{name}_at_2{end}" for name in ("avg", "pass") for end in ("", "_ci")}
    assert set(records[0]) == {"step"} | judged
    for record in records[1:]:
        assert set(NAMES) <= set(record), set(NAMES) - set(record)
        assert ("eval/arithmetic/avg_at_2" in record) == (record["step"] % 2 == 0)
    assert [r["staleness/lag_mean"] for r in records[1:]] == [0, 1, 2, 1]
    assert len({r["time/sampler_compilations"] for r in records[1:]}) == 1
    assert records[1]["staleness/abs_d_max"] < 1e-4  # the first batch is on-policy
    assert min(r["staleness/abs_d_mean"] for r in records[2:]) > 1e-4
    assert {p.name for p in tmp_path.iterdir()} >= {
        "config.json", "metrics.jsonl", "checkpoints", "rollouts", "tensorboard", "curves.png"
    }  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text())["pipeline"] == {"mode": "interval", "lag": 2}
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts" / "update_000004.jsonl").read_text().splitlines()]
    assert len(rollouts) == 3 and {r["finish_reason"] for r in rollouts} <= {"stop", "length"}
    assert all(r["lag"] == [1, 1] for r in rollouts)


@pytest.mark.slow
def test_one_device_trains_and_samples_in_turns_to_the_same_numbers(tmp_path, model_folder, monkeypatch):
    settings = {"pipeline__mode": "fixed", "pipeline__lag": 1, "updates": 3}
    two = run(tmp_path / "two", model_folder, **settings)
    monkeypatch.setattr(train.jax, "devices", lambda: jax.local_devices()[:1])
    one = run(tmp_path / "one", model_folder, **settings)
    assert timeless(one) == timeless(two)


def test_sync_in_float32_is_on_policy(tmp_path, model_folder):
    records = run(tmp_path, model_folder, pipeline__mode="sync", pipeline__lag=0, loss__kl_coef=0.0)[1:]
    assert all(r["staleness/lag_max"] == 0 for r in records)
    assert max(r["staleness/abs_d_max"] for r in records) < 1e-4
    assert all(r["clip/fraction"] == 0 and r["kl/ref"] is None for r in records)


@pytest.mark.slow
def test_log_probs_scored_by_the_sampler_are_the_trainers_own(tmp_path, model_folder):
    """The same run to the last bit, be log-probs at the sampling weights computed on one mesh or the other; of tokens
    that the current weights sampled they are those of the update itself."""
    settings = {"recipe": "sat_gspo", "pipeline__mode": "fixed", "pipeline__lag": 1, "updates": 3, "eval__every": 0}
    settings |= {"objective__denominator": "recomputed"}
    trainer = run(tmp_path / "trainer", model_folder, **settings)
    scored = run(tmp_path / "sampler", model_folder, **settings, sampler__score=True)
    assert timeless(scored) == timeless(trainer)
    assert [r["time/score_s"] > 0 for r in scored] == [True] * 3
    assert scored[0]["staleness/abs_policy_mean"] == 0 < scored[2]["staleness/abs_policy_mean"]


@pytest.mark.slow
def test_several_engines_sample_what_one_does(tmp_path, model_folder, monkeypatch):
    """Through the command: the same run to the last bit, log-probs scored on the sampler included."""
    settings = {"pipeline.mode": "fixed", "pipeline.lag": 1, "updates": 3, "sampler.score": True}
    one = run(tmp_path / "one", model_folder, **{key.replace(".", "__"): value for key, value in settings.items()})
    at_work, advance = set(), sampler.RolloutEngine.advance

    def noted(self: sampler.RolloutEngine, *arguments: Any) -> Any:
        at_work.add(self.mesh.devices.item().id)
        return advance(self, *arguments)

    monkeypatch.setattr(sampler.RolloutEngine, "advance", noted)
    changes = SMALL | settings | {"model.path": model_folder, "sampler.engines": 2, "sampler.order": "longest"}
    flags = [f"--config.{key}={value}" for key, value in changes.items()]
    folder = tmp_path / "several"
    assert main.main([f"--config={CONFIGS / 'sat_grpo.py'}:cpu", f"--workdir={folder}", *flags]) == 0
    several = read(folder)
    assert timeless(several) == timeless(one)
    assert [r["staleness/lag_mean"] for r in several[1:]] == [0, 1, 1]
    assert at_work == {1, 2}
    texts = [(path / "rollouts" / "update_000002.jsonl").read_text() for path in (tmp_path / "one", folder)]
    assert texts[0] == texts[1]


def test_weights_that_are_not_finite_end_the_run_by_name(tmp_path, model_folder, monkeypatch):
    """The sampler never gets them, and what was saved before stays."""
    learn = train.learn

    def poisoned(run: Any, state: Any, *rest: Any) -> Any:
        new, *others = learn(run, state, *rest)
        if int(new.step) == 3:
            new = dataclasses.replace(
                new, params=new.params | {"embedding": new.params["embedding"].at[0, 0].set(np.nan)}
            )
        return new, *others

    monkeypatch.setattr(train, "learn", poisoned)
    with pytest.raises(InputError) as caught:
        run(tmp_path, model_folder, pipeline__lag=1, eval__every=0)
    message = "update 3: weights of version 3: embedding not finite; finite numbers alone allowed"
    assert str(caught.value) == f"{message}; the same command goes on from update 2"
    assert [r["step"] for r in read(tmp_path)] == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


def test_fixed_lag_resumes_to_the_same_numbers(tmp_path, model_folder):
    settings = {"pipeline__mode": "fixed", "pipeline__lag": 2, "updates": 6}
    whole = run(tmp_path / "whole", model_folder, **settings)
    run(tmp_path / "parts", model_folder, **settings | {"updates": 3})
    parts = run(tmp_path / "parts", model_folder, **settings)
    assert [r["staleness/lag_mean"] for r in whole[1:]] == [0, 1, 2, 2, 2, 2]
    # The shorter run also evaluated after its own last update.
    parts[3] = {k: v for k, v in parts[3].items() if not k.startswith("eval/")}
    assert timeless(parts) == timeless(whole)
    before = (tmp_path / "parts" / "metrics.jsonl").read_text()
    run(tmp_path / "parts", model_folder, **settings)
    assert (tmp_path / "parts" / "metrics.jsonl").read_text() == before  # nothing left to do changes nothing
    # A stop that came before the last evaluation leaves it to be made, with the update's own numbers kept.
    *lines, last = before.splitlines()
    unjudged = {k: v for k, v in json.loads(last).items() if not k.startswith("eval/")}
    (tmp_path / "parts" / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(unjudged)]) + "\n")
    run(tmp_path / "parts", model_folder, **settings)
    assert [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()] == [
        json.loads(line) for line in before.splitlines()
    ]


def test_recomputed_denominator_takes_the_weights_that_sampled(tmp_path, model_folder):
    common = {"pipeline__mode": "fixed", "pipeline__lag": 2, "recipe": "grpo", "log__tensorboard": False}
    behaviour = run(tmp_path / "behaviour", model_folder, **common)
    recomputed = run(tmp_path / "recomputed", model_folder, **common, objective__denominator="recomputed")
    # Sampler and trainer agree to rounding here, so both denominators must give the same run.
    for a, b in zip(behaviour[1:], recomputed[1:], strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
        assert a["staleness/abs_d_mean"] == pytest.approx(b["staleness/abs_d_mean"], abs=1e-5)
        # The mismatch splits into policy lag and implementation, and here it is all lag.
        parts = b["staleness/var_policy"] + b["staleness/var_impl"] + 2 * b["staleness/cov"]
        assert b["staleness/var_d"] == pytest.approx(parts, abs=1e-6)
        assert b["staleness/abs_impl_mean"] < 1e-5
    assert recomputed[-1]["staleness/abs_policy_mean"] > 1e-4


def test_sigterm_saves_and_the_same_command_goes_on(tmp_path, model_folder):
    def stop_after_two_updates():
        while not (tmp_path / "metrics.jsonl").exists() or len(read_lines(tmp_path)) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=stop_after_two_updates)
    watcher.start()
    stopped = run(tmp_path, model_folder, updates=1000, checkpoint__every=0)
    watcher.join()
    done = stopped[-1]["step"]
    assert 2 <= done < 1000
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [str(done)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    went_on = run(tmp_path, model_folder, updates=done + 1)
    assert went_on[: done + 1] == stopped and went_on[-1]["step"] == done + 1


def read_lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


@pytest.mark.slow
def test_stop_before_the_first_update_is_not_begun(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(train.StopSignal, "requested", property(lambda _: True, lambda *_: None), raising=False)
    run(tmp_path, model_folder, updates=1)
    monkeypatch.undo()
    assert [r["step"] for r in run(tmp_path, model_folder, updates=1)] == [0, 1]


@pytest.mark.slow
def test_kill_at_any_moment_goes_on_from_the_last_checkpoint(tmp_path, model_folder):
    changes = SMALL | {"model.path": str(model_folder), "checkpoint.every": 1, "eval.every": 0, "updates": 1000}
    flags = [f"--config.{key}={value}" for key, value in changes.items()]
    code = (
        "import sys, jax; from jaxrl_sat.main import main; "
        f"jax.config.update('jax_compilation_cache_dir', {jax.config.jax_compilation_cache_dir!r}); "  # pyright: ignore
        "status = main(sys.argv[1:]); assert 'tensorflow' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, f"--config={CONFIGS / 'sat_grpo.py'}:cpu", f"--workdir={tmp_path}", *flags]
    done = 0
    for lines in (3, 7):  # killed twice, the second time while going on from the first
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 300
        while not (tmp_path / "metrics.jsonl").exists() or len(read_lines(tmp_path)) < lines:
            assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
            time.sleep(0.02)
        process.kill()
        process.communicate()
    kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    done = kept[-1] + 2
    last = subprocess.run([*command, f"--config.updates={done}"], capture_output=True, text=True, timeout=300)
    assert last.returncode == 0, last.stderr
    assert [r["step"] for r in read(tmp_path)] == list(range(1, done + 1))


def test_input_that_cannot_be_used_is_named_before_anything_is_lost(tmp_path, model_folder):
    run(tmp_path / "run", model_folder, updates=1)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match=r"optimizer\.learning_rate: 0\.5, but the run in .* was started with 0\.001"):
        run(tmp_path / "run", model_folder, updates=3, optimizer__learning_rate=0.5)
    with pytest.raises(InputError, match=r"model\.path|folder"):
        run(tmp_path / "other", tmp_path / "missing")
    with pytest.raises(InputError, match="3"):
        run(tmp_path / "other", model_folder, data__max_prompt_tokens=3)
    small = tmp_path / "small"
    shutil.copytree(model_folder, small)
    config, params = model.load_hf(small)
    cut = {name: value[:9] if name in ("embedding", "head") else value for name, value in params.items()}
    model.save_hf(small, type(config)(**{**vars(config), "vocab_size": 9}), cut)
    with pytest.raises(InputError, match=r"model\.path: the tokenizer in .* words; allowed: 9 or fewer"):
        run(tmp_path / "other", small)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before

"""Every rule of the config is met by the presets and told to who breaks it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxrl_sat import cli, mesh, plan, schema, sources
from jaxrl_sat import config as config_lib
from jaxrl_sat.config import RunConfig, from_config_dict
from jaxrl_sat.data import catalogue
from jaxrl_sat.objectives.recipes import RECIPES
from jaxrl_sat.types import InputError
from tests.run_configs import CONFIGS, data_folder, flagship


def changed(values: dict[str, Any], name: str = "sat_grpo") -> RunConfig:
    config = flagship(name=name)
    for key, value in values.items():
        group, _, last = key.rpartition(".")
        holder = config
        for part in filter(None, group.split(".")):
            holder = holder[part]
        with holder.ignore_type(), holder.unlocked():
            holder[last] = value
    return from_config_dict(config)


def refused(values: dict[str, Any], name: str = "sat_grpo") -> str:
    with pytest.raises(InputError) as caught:
        changed(values, name)
    message = str(caught.value)
    assert "\n" not in message and "allowed:" in message
    return message


@pytest.mark.parametrize("file", sorted(path.stem for path in CONFIGS.glob("*.py")))
def test_a_config_file_is_named_for_its_recipe_and_replays_unless_it_says_no(file: str) -> None:
    run = from_config_dict(flagship(name=file))
    assert run.recipe == file.removesuffix("_no_r3")
    assert run.learner.replay == (not file.endswith("_no_r3"))
    exact = {"quantile": 0.9} if file.startswith("sat") else {}
    own = RECIPES[run.recipe](**exact)
    assert config_lib.make_objective(run) == dataclasses.replace(own, reduce=dataclasses.replace(own.reduce, norm=8.0))


def test_every_row_of_the_papers_tables_has_a_config_file() -> None:
    seed_000 = {f"{family}{tis}{r3}" for family in ("grpo", "gspo") for tis in ("", "_tis") for r3 in ("", "_no_r3")}
    seed_000 |= {"dppo_no_r3", "sat_grpo", "sat_grpo_no_r3", "sat_gspo", "sat_gspo_no_r3"}
    seed_001 = {"clip_higher", "dppo_topk_kl", "predictive_kl_agg", "predictive_kl_uni"}
    assert len(seed_000) == 13
    assert seed_000 | seed_001 | {"dppo"} == {path.stem for path in CONFIGS.glob("*.py")}


@pytest.mark.parametrize("file", ["clip_higher", "dppo_topk_kl", "predictive_kl_agg", "predictive_kl_uni"])
def test_settings_of_seed_001(file: str) -> None:
    config = flagship("tpu", file)
    config.model.path, config.data.path = "m", "d"
    run = from_config_dict(config)
    assert (run.eval.samples, run.sampler.topk) == (16, 20)
    assert run.objective.delta == (None if file == "clip_higher" else 0.15)
    assert (run.objective.eps_low, run.objective.eps_high) == ((0.2, 0.28) if file == "clip_higher" else (None, None))


@pytest.mark.parametrize(("preset", "chips"), [("tpu", 128), ("tpu_4b", 32), ("tpu_8b", 64)])
def test_the_papers_presets(preset: str, chips: int) -> None:
    config = flagship(preset)
    config.model.path, config.data.path = "m", "d"
    run = from_config_dict(config)
    assert (run.data.prompts_per_update, run.sampler.group_size, run.sampler.temperature) == (256, 16, 0.95)
    assert (run.updates, run.eval.every, run.eval.samples, run.learner.row_tokens) == (544, 5, 8, 32768)
    assert mesh.devices_wanted(run) == chips


@pytest.mark.parametrize("preset", ["gpu", "tpu", "tpu_4b", "tpu_8b"])
def test_accelerator_presets_ask_for_model_and_data(preset: str) -> None:
    with pytest.raises(InputError, match=r"model\.path and data\.path: not given") as caught:
        from_config_dict(flagship(preset))
    assert "--config.model.path=DIR" in str(caught.value) and "--config.data.path=DIR" in str(caught.value)


def test_accelerator_presets_ask_for_the_one_that_lacks() -> None:
    config = flagship("gpu")
    config.model.path = "somewhere"
    with pytest.raises(InputError, match=r"^data\.path: not given"):
        from_config_dict(config)


def test_tpu_preset_has_the_papers_settings() -> None:
    config = flagship("tpu")
    config.model.path, config.data.path = "m", "d"
    run = from_config_dict(config)
    assert (run.data.prompts_per_update, run.sampler.group_size, run.sampler.max_response_tokens) == (256, 16, 30720)
    assert (run.optimizer.learning_rate, run.optimizer.b1, run.optimizer.b2) == (1e-6, 0.9, 0.98)
    assert (run.loss.kl_coef, run.loss.kl_kind, run.loss.entropy_coef) == (1e-3, "low_var_kl", 0.0)
    assert run.sampler.temperature == 0.95
    assert dataclasses.astuple(run.objective)[:7] == (0.2, 0.2, "token-mean", "behaviour", 0.9, 2.0, 0.0)


def test_resolved_config_is_plain_and_holds_the_recipes_own_values() -> None:
    resolved = json.loads(json.dumps(config_lib.to_dict(changed({"objective.eps_high": 0.28}))))
    assert resolved["objective"] == {
        "eps_low": 0.2,
        "eps_high": 0.28,
        "aggregation": "token-mean",
        "denominator": "behaviour",
        "quantile": 0.9,
        "exponent": 2.0,
        "q_floor": 0.0,
        "scope": "microbatch",
    }
    again = from_config_dict(ConfigDict(resolved))
    assert config_lib.to_dict(again) == resolved


def test_parameters_reach_the_objective() -> None:
    run = changed({"objective.quantile": 0.75, "objective.exponent": 3.0})
    assert config_lib.make_objective(run).radii == RECIPES["sat_grpo"](quantile=0.75, exponent=3.0).radii


def test_misspelt_key_names_the_closest() -> None:
    config = flagship()
    with config.sampler.unlocked():
        config.sampler.temprature = 1.0
    with pytest.raises(InputError, match=r"sampler\.temprature: no such key; did you mean sampler\.temperature\?"):
        from_config_dict(config)


@pytest.mark.parametrize("key", ["seed", "optimizer", "optimizer.b2", "mesh.sampler.tensor"])
def test_missing_key(key: str) -> None:
    config = flagship()
    group, _, last = key.rpartition(".")
    holder = config
    for part in filter(None, group.split(".")):
        holder = holder[part]
    with holder.unlocked():
        del holder[last]
    with pytest.raises(InputError, match=f"^{key}: missing; allowed: "):
        from_config_dict(config)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("seed", -1, "a whole number, 0 or more"),
        ("seed", 2**32, "at most 4294967295"),
        ("updates", 0, "1 or more"),
        ("updates", 1.5, "a whole number"),
        ("updates", True, "a whole number"),
        ("updates", None, "a whole number"),
        ("recipe", "sat", "gspo_tis, icepop"),
        ("model.dtype", "float16", "float32, bfloat16"),
        ("sampler.group_size", 1, "2 or more"),
        ("sampler.temperature", 0.0, "above 0"),
        ("sampler.topk", 0, "1 or more"),
        ("sampler.top_p", 0.0, "a number, above 0, at most 1"),
        ("sampler.top_p", 1.5, "a number, above 0, at most 1"),
        ("sampler.nucleus", 0, "1 or more"),
        ("sampler.cache_dtype", "int4", "float32, bfloat16, int8"),
        ("sampler.prefill_chunk", 24, "0, which reads prompts whole, or powers of two from 16"),
        ("sampler.prefix_cache_bytes", 1000, "0 where sampler.prefill_chunk is 0"),
        ("pipeline.mode", "async", "sync, fixed, interval"),
        ("pipeline.lag", 0, "1 or more"),
        ("objective.eps_low", 1.5, "0 or more, at most 1"),
        ("objective.quantile", 0.0, "above 0, at most 1"),
        ("objective.aggregation", "mean", "token-mean"),
        ("loss.kl_kind", "k4", "k1, k2, k3, low_var_kl"),
        ("loss.advantage", "mean", "group, centred, rloo"),
        ("rewards.timeout", 0.0, "a number, above 0"),
        ("rewards.workers", 0, "1 or more, at most 256"),
        ("rewards.on_failure", "ignore", "zero, stop"),
        ("data.oversample", 0.5, "1 or more, at most 64"),
        ("optimizer.learning_rate", float("nan"), "above 0"),
        ("optimizer.learning_rate", float("inf"), "above 0"),
        ("optimizer.b1", 1.0, "below 1"),
        ("mesh.trainer.fsdp", 0, "1 or more"),
        ("eval.temperature", -0.5, "0 or more"),
        ("checkpoint.keep", 0, "1 or more"),
        ("log.tensorboard", "yes", "true or false"),
        ("data", 3, "a group of keys"),
    ],
)
def test_impossible_value(key: str, value: Any, allowed: str) -> None:
    message = refused({key: value})
    assert message.startswith(f"{key}: {value!r}") or key == "pipeline.lag"
    assert allowed in message


def test_whole_numbers_do_for_numbers() -> None:
    assert changed({"loss.kl_coef": 1}).loss.kl_coef == 1.0


def test_parameter_that_the_recipe_does_not_take() -> None:
    message = refused({"objective.quantile": 0.9}, "gspo")
    assert message.startswith("objective.quantile: 0.9, but recipe 'gspo' takes no quantile; allowed: eps_low")


def test_rules_between_keys() -> None:
    assert refused({"learner.row_tokens": 23}).startswith("learner.row_tokens: 23; allowed: 24 or more")
    assert "a multiple of 3" in refused({"mesh.trainer.fsdp": 3})
    assert "a multiple of 3" in refused({"mesh.sampler.data": 3})
    assert refused({"rewards.overlong_buffer": 9}).startswith("rewards.overlong_buffer: 9; allowed: at most 8")
    assert refused({"rewards.functions": "mathh"}).startswith("rewards.functions: 'mathh'; allowed: NAME=WEIGHT")
    assert refused({"data.oversample": 1.5}).startswith(
        "data.oversample: 1.5; allowed: 1, or data.dynamic_sampling=true"
    )
    third = {"data.oversample": 1.1, "data.dynamic_sampling": True, "data.prompts_per_update": 10}
    assert config_lib.prompts_asked(changed(third)) == 11
    assert refused({"pipeline.mode": "sync"}).startswith("pipeline.lag: 1 with pipeline.mode 'sync'")
    assert refused({"optimizer.master_copy": True}).startswith("optimizer.master_copy: True with model.dtype 'float32'")
    assert changed({"optimizer.master_copy": True, "model.dtype": "bfloat16"}).optimizer.master_copy


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("updates", "7", 7),
        ("loss.kl_coef", "1e-4", 1e-4),
        ("log.tensorboard", "False", False),
        ("learner.replay", "true", True),
        ("objective.quantile", ".95", 0.95),
        ("objective.denominator", "recomputed", "recomputed"),
        ("model.path", "a=b", "a=b"),
    ],
)
def test_text_to_value(key: str, text: str, value: Any) -> None:
    assert schema.parse_text(RunConfig, key, text) == value


@pytest.mark.parametrize(("key", "text"), [("updates", "1e3"), ("loss.kl_coef", "x"), ("learner.replay", "on")])
def test_text_that_is_no_value(key: str, text: str) -> None:
    with pytest.raises(InputError, match=f"^{key}: {text!r}; allowed: "):
        schema.parse_text(RunConfig, key, text)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("sampler.temperature", "1_0", "a number"),
        ("sampler.temperature", "\u0661", "a number"),
        ("objective.quantile", "0.123456789", r"objective\.quantile: .*four decimals"),
        ("optimizer.eps", "1e-40", "of a size that float32 holds"),
        ("", "1", r"--config\.: no key"),
    ],
)
def test_numbers_as_text(key: str, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        command = cli.parse([f"--config={CONFIGS / 'sat_grpo.py'}:cpu", f"--config.{key}={text}"])
        from_config_dict(cli.load(command, "cpu"))


def test_a_whole_number_beyond_any_float_is_refused() -> None:
    optimizer = changed({}).optimizer
    with pytest.raises(InputError, match=r"^eps: 10{400}; allowed: .*of a size that float32 holds"):
        schema.build(type(optimizer), {**dataclasses.asdict(optimizer), "eps": 10**400})


def test_evaluation_sets_have_names_of_their_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        data_folder(tmp_path / folder / "gsm")
    run = changed({"eval.path": f"{tmp_path / 'a' / 'gsm'}, {tmp_path / 'b' / 'gsm'}"})
    with pytest.raises(InputError, match=r"eval\.path: two sets are called 'gsm'; allowed: "):
        plan.plan(run, sources.read_model_config("embedded"))
    with pytest.raises(InputError, match=r"eval\.path: '/nowhere' holds no data set"):
        plan.plan(changed({"eval.path": "/nowhere"}), sources.read_model_config("embedded"))


@pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 5000, "a\0b"])
def test_what_is_no_path_is_said(path: str) -> None:
    with pytest.raises(InputError, match=r"model\.path: .* is not a path .*; allowed"):
        sources.model_folder(path)
    with pytest.raises(InputError, match=r"data\.path: .* is not a path .*; allowed"):
        catalogue.read_data_set(path)

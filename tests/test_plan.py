"""The figures of the dry run against counts made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl_sat import model, plan, sources
from jaxrl_sat.config import from_config_dict
from jaxrl_sat.types import InputError
from tests.run_configs import data_folder, model_folder, small


def planned(folder: Path, **changes: Any) -> dict[str, Any]:
    config = small(model_folder(folder))
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    run = from_config_dict(config)
    return plan.plan(run, sources.read_model_config(run.model.path))


def test_model(tmp_path: Path) -> None:
    facts = planned(tmp_path)["model"]
    config = sources.read_model_config(from_config_dict(small(tmp_path)).model.path)
    made = model.init_params(config, jax.random.key(0), "float32")
    assert facts["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(made))
    assert facts["bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    assert planned(tmp_path, model__dtype="bfloat16")["model"]["bytes"] == facts["bytes"] / 2


def test_rollouts(tmp_path: Path) -> None:
    facts = planned(tmp_path)["rollouts"]
    assert facts["responses an update"] == 16 * 16
    assert facts["new tokens an update at most"] == 256 * 8
    # token, log-prob and version; 20 ids and log-probs; 2 layers of 2 expert ids in a byte each
    assert facts["record bytes a token at most"] == 12 + 20 * 8 + 4
    assert planned(tmp_path, sampler__topk=500)["rollouts"]["log-probs recorded a token"] == 32
    assert facts["prompts are read"] == "whole"
    kept = planned(tmp_path, sampler__prefill_chunk=16, sampler__prefix_cache_bytes=1000)
    assert (
        kept["rollouts"]["prompts are read"]
        == "in pieces of 16 tokens, shared beginnings once until the weights change"
    )
    assert kept["memory"]["sampler, a device"] == planned(tmp_path)["memory"]["sampler, a device"] + 1000


def test_a_nucleus_takes_an_id_for_each_of_its_words(tmp_path: Path) -> None:
    facts = planned(tmp_path, sampler__top_p=0.9, sampler__nucleus=8)
    assert facts["rollouts"]["record bytes a token at most"] == 12 + 20 * 8 + 4 + 4 * 8
    assert facts["rollouts"]["record bytes a token without a nucleus"] == 12 + 20 * 8 + 4
    assert facts["evaluation"]["drawn"] == "at temperature 1, top-p 0.9"
    # 32 words in all
    assert planned(tmp_path, sampler__top_p=0.9)["rollouts"]["words of a nucleus at most"] == 32
    assert planned(tmp_path)["rollouts"]["words of a nucleus at most"] == 0


def test_learner(tmp_path: Path) -> None:
    facts = planned(tmp_path)["learner"]
    assert facts["rows an update at most"] == 128  # 24 tokens each: two a row of 64
    assert facts["microbatches an update at most"] == 32
    assert facts["advantage of the only right answer of a group"] == 3.75  # (1 - 1/16) / (1/4)
    centred = planned(tmp_path, loss__advantage="centred")["learner"]
    assert centred["advantage of the only right answer of a group"] == 0.9375


def test_lag(tmp_path: Path) -> None:
    facts = planned(tmp_path, pipeline__lag=3, updates=9)["lag"]
    assert facts["version that samples each of the first updates"] == "0 0 0 0 3 3 3 6 6"
    assert facts["realised lag of the first updates"] == "0 1 2 3 1 2 3 1 2"
    assert facts["handoffs to the sampler"] == 3


def test_steps(tmp_path: Path) -> None:
    facts = planned(tmp_path, updates=20, eval__every=8, checkpoint__every=0, log__rollouts_every=0)["steps"]
    assert facts["evaluations"] == "0, 8, 16, 20"
    assert facts["checkpoints"] == "20"
    assert facts["readable rollouts"] == "never"


def test_memory(tmp_path: Path) -> None:
    facts = planned(tmp_path)
    copy = facts["model"]["bytes"]
    assert facts["memory"]["reference policy"] == copy
    assert planned(tmp_path, loss__kl_coef=0.0)["memory"]["reference policy"] == 0
    # 2 layers x keys and values x 8 slots x (16 prompt bucket + 8) x 2 heads x 8 x 4 bytes
    assert facts["memory"]["sampler's cache"] == 2 * 2 * 8 * 24 * 2 * 8 * 4


def test_engines(tmp_path: Path) -> None:
    config: Any = small(model_folder(tmp_path))
    config.sampler.update({"engines": 3, "order": "longest"})
    config.mesh.sampler.tensor = 2
    devices = plan.meshes(from_config_dict(config))
    assert devices["sampler"]["devices"] == "1 to 6" and devices["devices wanted"] == 7
    assert devices["sampler"]["engines"] == ["1 to 2", "3 to 4", "5 to 6"]
    one, three = planned(tmp_path), planned(tmp_path, sampler__engines=3, sampler__order="longest")
    assert (one["rollouts"]["responses a slot"], three["rollouts"]["responses a slot"]) == (32, 10.667)
    assert one["rollouts"]["a free slot is given to"] == "the oldest request"
    assert three["rollouts"]["a free slot is given to"].startswith("the request with most prompt tokens")
    for name in ("sampler's cache", "sampler's copies of the versions in flight"):
        assert three["memory"][name] == 3 * one["memory"][name]
    assert three["memory"]["sampler, a device"] == one["memory"]["sampler, a device"]


def test_memory_of_bfloat16_parameters(tmp_path: Path) -> None:
    wide = planned(tmp_path)
    narrow = planned(tmp_path, model__dtype="bfloat16", optimizer__master_copy=True)
    count = wide["model"]["parameters"]
    # Moments and the gradient are float32 whatever the parameters are.
    assert wide["memory"]["parameters, Adam's moments and gradient"] == (4 + 3 * 4) * count
    assert narrow["memory"]["parameters, Adam's moments and gradient"] == (2 + 3 * 4) * count
    assert (wide["memory"]["float32 master copy"], narrow["memory"]["float32 master copy"]) == (0, 4 * count)
    # At lag 1 two versions are in flight, of which one is the state's own.
    assert wide["memory"]["checkpoint on disk"] == (2 * 4 + 2 * 4) * count
    assert narrow["memory"]["checkpoint on disk"] == (2 * 2 + 2 * 4 + 4) * count


def test_memory_of_quantised_weights(tmp_path: Path) -> None:
    plain = planned(tmp_path)
    copy, versions = plain["model"]["bytes"], plain["lag"]["versions in flight at most"]
    assert plain["memory"]["sampler's copies of the versions in flight"] == (versions + 1) * copy
    quantised = planned(tmp_path, sampler__quantise="fp8")["memory"]["sampler's copies of the versions in flight"]
    # Each of two layers: queries, keys and values, output; gate and up, down of four experts.
    products = 16 * (32 + 16 + 16) + 32 * 16 + 4 * 3 * 16 * 16
    scales = (32 + 16 + 16) + 16 + 4 * 3 * 16
    # Values are one byte instead of four, and a scale has four.
    assert quantised == versions * (copy - 2 * 3 * products + 2 * 4 * scales) + copy


def test_data_set_by_its_folder(tmp_path: Path) -> None:
    data = data_folder(tmp_path / "gsm", train=3200, test=5)
    facts = planned(tmp_path / "m", data__path=str(data))
    assert facts["data"]["epochs"] == 1.5  # 300 updates x 16 prompts over 3200
    assert facts["evaluation"] == {
        "metrics": "eval/gsm/avg_at_8",
        "problems": 5,
        "responses": 40,
        "drawn": "at temperature 1",
    }


def test_missing_data_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.path: '/no/where' holds no data set; allowed: "):
        planned(tmp_path, data__path="/no/where")


def test_broken_config_json(tmp_path: Path) -> None:
    config = from_config_dict(small(model_folder(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"model\.path: .* has no readable config\.json"):
        sources.read_model_config(config.model.path)

"""Programs for TPUs that are not there: topologies, models, meshes, and the bytes that their state should take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl_sat import mesh, model
from jaxrl_sat.aot import programs, published, topology
from jaxrl_sat.config import RunConfig, from_config_dict
from jaxrl_sat.types import InputError
from tests.run_configs import TINY, flagship, model_folder, small

# ------------------------------------------------------------------------------------------ topologies


def test_a_topology_is_a_kind_and_a_shape() -> None:
    assert topology.parse("v5p:4x4x4") == ("v5p", (4, 4, 4))
    assert topology.parse("v6e:16x16") == ("v6e", (16, 16))


@pytest.mark.parametrize(
    "name",
    ["", "v5p", "v5p:4", "v5p:4x4", "v5p:0x4x4", "h100:8x8", "v5p:4x4x4x4", "v5p:4x4x4 ", "v6e:4x4x4", "v5e:32x8"],
)
def test_no_topology(name: str) -> None:
    with pytest.raises(InputError, match=r"--topology: .*; allowed: .*v5p:4x4x4"):
        topology.parse(name)


def test_the_compiler_is_told_what_to_ask_nobody_about() -> None:
    environment = {"JAX_PLATFORMS": "tpu", "HOME": "/"}
    topology.prepare(environment, "v5p:4x4x4")
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["TPU_ACCELERATOR_TYPE"].startswith("v5p-")
    assert environment["TPU_WORKER_HOSTNAMES"] == "localhost"


def test_without_the_tpu_compiler_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^libtpu: not installed; allowed: pip install -e '.\[tpu\]'"):
        topology.describe("v5p:2x2x1", 1)


def target(devices: int, slices: int = 1) -> topology.Topology:
    """CPU devices in the place of TPUs."""
    return topology.Topology("v5p:2x2x1", slices, tuple(jax.devices()[:devices]), 1 << 30)


# ---------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.6),
        ("Qwen3-1.7B", 1.7),
        ("Qwen3-4B", 4.0),
        ("Qwen3-8B", 8.2),
        ("Qwen3-14B", 14.8),
        ("Qwen3-32B", 32.8),
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235.1),
    ],
)
def test_published_models_have_the_published_size(name: str, billions: float) -> None:
    shapes = jax.tree.leaves(model.abstract_params(published.read(name)))
    assert round(sum(math.prod(x.shape) for x in shapes) / 1e9, 1) == billions


def test_every_published_model_is_tested_above() -> None:
    assert len(published.configs()) == 8


def test_a_model_may_be_a_folder_too(tmp_path: Path) -> None:
    assert published.read(str(model_folder(tmp_path))) == model.ModelConfig.from_hf(TINY)
    with pytest.raises(InputError, match="Qwen3-30B-A3B"):
        published.read("Qwen3-31B")


# ---------------------------------------------------------------------------------------------- meshes


def run(**trainer: int) -> RunConfig:
    config = flagship()
    config.mesh.trainer.update(trainer)
    return from_config_dict(config)


def test_a_mesh_has_to_be_as_large_as_the_topology() -> None:
    programs.check_devices(run(fsdp=4), target(4), "train")
    with pytest.raises(InputError, match=r"^mesh\.trainer: data 1 x fsdp 2 x .* is 2 devices; allowed: .* product 4"):
        programs.check_devices(run(fsdp=2), target(4), "train")
    with pytest.raises(InputError, match=r"^mesh\.sampler: .* is 1 devices; allowed: .* product 4"):
        programs.check_devices(run(fsdp=4), target(4), "generate")


def test_slices_repeat_the_data_axis_of_a_mesh_that_fills_one() -> None:
    spread = programs.over_slices(run(fsdp=4), target(8, slices=2))
    assert mesh.axes(spread)["trainer"] | {"data": 2, "fsdp": 4} == mesh.axes(spread)["trainer"]
    assert spread.learner.microbatch_rows == 2 * run().learner.microbatch_rows
    assert mesh.axes(spread)["sampler"]["data"] == 1 and spread.sampler.slots == run().sampler.slots


def test_slices_leave_a_mesh_alone_that_fills_all() -> None:
    whole = run(fsdp=4, data=2)
    assert programs.over_slices(whole, target(8, slices=2)) == whole


# ---------------------------------------------------------------------------------------- the programs


def tiny(tmp_path: Path, **changes: Any) -> tuple[RunConfig, model.ModelConfig]:
    config = small(model_folder(tmp_path))
    config.update_from_flattened_dict(changes)
    read = from_config_dict(config)
    return read, published.read(read.model.path)


def test_an_update_has_room_for_the_longest_responses(tmp_path: Path) -> None:
    config, _ = tiny(tmp_path)
    # 256 responses of at most 24 tokens, two a row of 64, four rows a microbatch
    assert programs.most_microbatches(config) == 32


def test_state_of_the_train_step(tmp_path: Path) -> None:
    config, model_config = tiny(tmp_path, **{"mesh.trainer.fsdp": 2})
    program = programs.make("train", config, model_config, target(2), 3)
    parameters = jax.tree.leaves(model.abstract_params(model_config))
    assert all(x.shape[axis] % 2 == 0 for x in parameters for axis in range(1, x.ndim) if x.shape[axis] == 16)
    whole = sum(math.prod(x.shape) * 4 for x in parameters)
    # The norms of heads have no axis that fsdp cuts.
    uncut = 2 * 2 * 8 * 4
    assert program.state["parameters"] == (whole - uncut) // 2 + uncut
    assert program.state["gradient"] == program.state["reference policy"] == program.state["parameters"]
    assert program.state["optimizer"] == 2 * program.state["parameters"] + 4  # two moments and a count
    # 12 rows of 64 tokens on two devices: six numbers, two marks, 2 layers of 2 expert ids in a byte each
    assert program.state["batch"] == 6 * 64 * (6 * 4 + 2 + 2 * 2)
    assert (program.rows, program.tokens) == (4, 4 * 64)


def test_state_of_decoding(tmp_path: Path) -> None:
    config, model_config = tiny(tmp_path, **{"mesh.sampler.data": 2})
    program = programs.make("generate", config, model_config, target(2), None)
    # 2 layers x keys and values x 4 slots x (16 prompt bucket + 8) x 2 heads x 8 x 4 bytes
    assert program.state["cache"] == 2 * 2 * 4 * 24 * 2 * 8 * 4
    assert program.state["weights"] == sum(
        math.prod(x.shape) * 4 for x in jax.tree.leaves(model.abstract_params(model_config))
    )
    assert (program.rows, program.tokens) == (8, 8 * 24)


def test_operations_of_the_model(tmp_path: Path) -> None:
    config, model_config = tiny(tmp_path, **{"loss.kl_coef": 0.0})
    program = programs.make("train", config, model_config, target(1), 1)
    # Weights that a token meets: attention 16 x (4 + 2 + 2 + 4) x 8, router 16 x 4, 2 experts of 3 x 16 x 16, 2 layers;
    # head 32 x 16. Each row is one sequence of 64: 4 heads of 8, scores and values, half of 64 x 64.
    weights = 2 * (16 * 12 * 8 + 16 * 4 + 2 * 3 * 16 * 16) + 32 * 16
    attention = 2 * (2 * 2 * 4 * 8 * 64 * 64 / 2)
    assert program.model_flops == 3 * (2 * 4 * 64 * weights + 4 * attention)


def test_the_batch_is_shaped_like_a_packed_one(tmp_path: Path) -> None:
    config, model_config = tiny(tmp_path, **{"log.direction_every": 1})
    batch = programs.batch_shapes(config, model_config, 8)
    assert batch.tokens.shape == (8, 64)
    assert batch.topk_ids.shape == batch.topk_logp.shape == (8, 64, 20)
    assert batch.routing.expert_ids.shape == (2, 8, 64, 2) and batch.routing.expert_ids.dtype == "uint8"

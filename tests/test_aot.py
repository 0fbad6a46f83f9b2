"""Compilation for TPUs that are not there: names, meshes, expected bytes, the compiler's reports, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl_sat import mesh, model
from jaxrl_sat.aot import hints, memory, programs, published, topology
from jaxrl_sat.aot.__main__ import main
from jaxrl_sat.config import RunConfig, from_config_dict
from jaxrl_sat.types import InputError
from tests.run_configs import CONFIGS, TINY, flagship, model_folder, small

FLAGSHIP = str(CONFIGS / "sat_grpo.py")


# ------------------------------------------------------------------------------------------------ topologies


def test_a_topology_is_a_kind_and_a_shape() -> None:
    assert topology.parse("v5p:4x4x4") == ("v5p", (4, 4, 4))
    assert topology.parse("v6e:16x16") == ("v6e", (16, 16))


@pytest.mark.parametrize("name", ["", "v5p", "v5p:4", "v5p:0x4x4", "h100:8x8", "v5p:4x4x4x4", "v5p:4x4x4 "])
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


# ---------------------------------------------------------------------------------------------------- models


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


# ---------------------------------------------------------------------------------------------------- meshes


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


# ------------------------------------------------------------------------------------------------ the programs


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


# ---------------------------------------------------------------------------------------- the compiler's reports

EXHAUSTED = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (100.00G) exceeds "
    "available HBM (95.74G)."
)
EXHAUSTED_OTHERWISE = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.46G of 15.48G hbm."


def test_the_error_states_two_numbers() -> None:
    assert memory.exhausted(EXHAUSTED) and not memory.exhausted("INVALID_ARGUMENT: bad")
    assert memory.required_bytes(EXHAUSTED) == 100 * 2**30
    assert memory.limit_bytes(EXHAUSTED) == round(95.74 * 2**30)
    assert memory.required_bytes(EXHAUSTED_OTHERWISE) == round(19.46 * 2**30)
    assert memory.limit_bytes(EXHAUSTED_OTHERWISE) == round(15.48 * 2**30)
    assert memory.limit_bytes("RESOURCE_EXHAUSTED: too many") is None


ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce_sum.5 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 8192, maybe-live-out:
 value: <64 convert_add_fusion @0> (size=8192,offset=0): f32[2,1024]{1,0:T(8,128)}
allocation 2: size 4096, parameter 2, shape |f32[1024]| at ShapeIndex {}:
 value: <53 b.1 @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
allocation 3: size 64, color 6, parameter 3, shape |s32[]| at ShapeIndex {}:
 value: <54 n.1 @0> (size=64,offset=0): s32[]{:T(128)}
allocation 4: size 6144, preallocated-temp:
 value: <58 fusion{1} @0> (size=4096,offset=0): bf16[8,20]{1,0:T(8,128)(2,1)}
 value: <59 gather.3 @0> (size=2048,offset=4096): f32[512]{0:T(512)}
 value: <60 gather.4 @0> (size=2048,offset=4096): f32[512]{0:T(512)}

Total bytes used: 18432
"""
LIVE_RANGE = """HloLiveRange (max 12):
  InstructionSequence:
    0:b.1
  BufferLiveRange:
    b.1{}:0-12
  Live ranges at 10 (peak):
    convert_add_fusion{}: 8192 bytes (cumulative: 8192 bytes)
    b.1{}: 4096 bytes (cumulative: 12288 bytes)
    gather.3{}: 2048 bytes (cumulative: 14336 bytes)
    gather.4{}: 2048 bytes (cumulative: 14336 bytes)
    fusion{1}: 320 bytes (cumulative: 14656 bytes)
  Stack trace breakdown for peak usage: 14 656 bytes
    b.1: 9 bytes (cumulative: 9 bytes)
"""
PROGRAM = """HloModule jit_step
ENTRY %main (b.1: f32[1024]) -> f32[2,1024] {
  %b.1 = f32[1024]{0:T(1024)} parameter(2), metadata={op_name="params[\\'embedding\\']"}
  %gather.3 = f32[512]{0} all-gather(%b.1), metadata={op_name="jit(step)/gather" stack_frame_id=5}
  %gather.4 = f32[512]{0} all-gather(%b.1), metadata={op_name="jit(step)/gather" stack_frame_id=5}
  ROOT %convert_add_fusion = f32[2,1024]{1,0} fusion(%b.1), metadata={op_name="jit(step)/add"}
}
"""


def dumped(folder: Path) -> memory.Usage:
    stem = "module_0001.jit_step.cl_9.after_optimizations"
    (folder / f"{stem}-buffer-assignment.txt").write_text(ASSIGNMENT)
    (folder / f"{stem}-live-range.txt").write_text(LIVE_RANGE)
    (folder / f"{stem}.txt").write_text(PROGRAM)
    used = memory.usage(folder)
    assert used is not None
    return used


def test_the_buffers_at_the_peak(tmp_path: Path) -> None:
    used = dumped(tmp_path)
    assert (used.argument_bytes, used.temp_bytes) == (4096, 6144)
    assert [buffer.bytes for buffer in used.largest] == [8192, 4096, 4096, 2048, 2048]
    first, *_, last = used.largest
    assert first == memory.Buffer(8192, "f32[2,1024]", "jit(step)/add")
    assert last == memory.Buffer(2048, "f32[512]", "jit(step)/gather")
    padded = next(buffer for buffer in used.largest if buffer.shape == "bf16[8,20]")
    assert padded.bytes == 4096  # what its tiles take, not 8 x 20 x 2


def test_alike_buffers_are_one_line_of_the_table(tmp_path: Path) -> None:
    rows = memory.table(dumped(tmp_path).largest, rows=4)
    assert [row["bytes"] for row in rows] == [8192, 4096, 4096, 4096]
    assert {"bytes": 4096, "count": 2, "shape": "f32[512]", "of": "jit(step)/gather"} in rows


def test_no_files_no_buffers(tmp_path: Path) -> None:
    assert memory.usage(tmp_path) is None


# ----------------------------------------------------------------------------------------------------- hints

QWEN = published.read("Qwen3-30B-A3B")


@pytest.mark.parametrize(
    ("shape", "of", "kind"),
    [
        ("f32[48,2,2048,768]", "rest.opt_state[1][0].mu['run0']['mlp']['gate']", "optimizer's state and gradients"),
        ("f32[151936,32]", "params['head']", "parameters"),
        ("u8[48,64,32768,8]", "batch.routing.expert_ids", "records of the batch"),
        ("bf16[48,1,32768,2048]", "jit(step)/while/body/checkpoint", "kept for the backward pass"),
        ("f32[48,2,2048,768]", "jit(step)/while/body/add", "optimizer's state and gradients"),
        ("bf16[262144,768]", "jit(step)/while/body/ragged_dot", "activations"),
    ],
)
def test_what_a_buffer_of_the_train_step_is(shape: str, of: str, kind: str) -> None:
    assert hints.kind(memory.Buffer(1, shape, of), False, QWEN) == kind


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        ("state.cache[0][3]", "cache"),
        ("decode_params['layers'][0]['mlp']['up']", "sampler's weights"),
        ("jit(_generate_program)/dot_general", "activations of decoding"),
    ],
)
def test_what_a_buffer_of_decoding_is(of: str, kind: str) -> None:
    assert hints.kind(memory.Buffer(1, "bf16[64,32768,4,128]", of), True, QWEN) == kind


def test_the_hint_follows_what_is_large() -> None:
    kept = memory.Buffer(3 * 2**30, "bf16[48,1,32768,2048]", "jit(step)/while")
    records = memory.Buffer(2**30, "s32[64,32768,20]", "batch.topk_ids")
    config = run()
    text = hints.hint([records, kept, kept], config, QWEN, generates=False)
    assert text.startswith("kept for the backward pass: 6.0 GiB, see learner.remat (products), ")
    assert "records of the batch: 1.0 GiB, see data.prompts_per_update (16)" in text
    assert hints.hint([], config, QWEN, generates=False) == ""


def test_every_key_of_a_hint_is_one_of_the_config() -> None:
    keys = {key for knobs in hints.KNOBS.values() for key in knobs}
    tree = dataclasses.asdict(run())
    for key in keys:
        node: Any = tree
        for name in key.split("."):
            node = node[name]


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "allowed: --config=FILE[:PRESET], --topology=KIND:AxBxC"),
        (["--topology=v5p:4x4x4", "--workdir=x"], "--workdir=x: no such flag; allowed: --config=FILE"),
        (["--topology=v5p:4x4x4", "--slices=0"], "--slices: 0; allowed: 1 to 10000"),
        (["--topology=v5p:4x4x4", "--program=both"], "--program"),
        (["--topology=gpu:8x8"], "--topology: 'gpu:8x8'; allowed: "),
        (["--topology=v5p:4x4x4", "--config.model.path=/no/where"], "/no/where"),
    ],
)
def test_mistake(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main([f"--config={FLAGSHIP}:tpu", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


ANSWER = {
    "name": str,
    "rows": int,
    "tokens_per_device": int,
    "argument_bytes": int,
    "temp_bytes": int,
    "peak_bytes": int,
    "state_bytes_expected": int,
    "flops": float,
    "compile_s": float,
    "fits": bool,
}


@pytest.mark.skipif(topology.importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_the_command_compiles(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, head_dim=128)
    command = [sys.executable, "-m", "jaxrl_sat.aot", f"--config={FLAGSHIP}:cpu", "--topology=v5e:2x2"]
    command += [f"--config.model.path={folder}", "--config.mesh.trainer.fsdp=4", "--config.mesh.sampler.data=4"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["topology"], found["devices"], found["hbm_bytes"]) == ("v5e:2x2", 4, round(15.75 * 2**30))
    assert [program["name"] for program in found["programs"]] == ["train", "generate", "prefill"]
    for program in found["programs"]:
        assert {key: type(program[key]) for key in ANSWER} == ANSWER
        assert program["fits"]
        assert program["peak_bytes"] >= program["state_bytes_expected"] > 0

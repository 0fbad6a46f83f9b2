"""What the compiler says of programs that do not fit, and the keys that would make them smaller."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sat.aot import hints, memory, published
from jaxrl_sat.config import from_config_dict
from tests.run_configs import flagship

# ------------------------------------------------------------------------------ the compiler's reports

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
 value: <61 loop.6{} (phi) @0> (size=160,offset=5): (s32[]{:T(128)}, bf16[48,64]{1,0:T(8,128)}, /*index=5*/u8[3]{0})

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
    loop.6{1}: 1024 bytes (cumulative: 15680 bytes)
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
    assert [buffer.bytes for buffer in used.largest] == [8192, 4096, 4096, 2048, 2048, 1024]
    first, *_, gathered, last = used.largest
    assert first == memory.Buffer(8192, "f32[2,1024]", "jit(step)/add")
    assert gathered == memory.Buffer(2048, "f32[512]", "jit(step)/gather")
    assert last == memory.Buffer(1024, "bf16[48,64]", "")  # what a loop carries has the shape of its place in the tuple
    padded = next(buffer for buffer in used.largest if buffer.shape == "bf16[8,20]")
    assert padded.bytes == 4096  # what its tiles take, not 8 x 20 x 2


def test_alike_buffers_are_one_line_of_the_table(tmp_path: Path) -> None:
    rows = memory.table(dumped(tmp_path).largest, rows=4)
    assert [row["bytes"] for row in rows] == [8192, 4096, 4096, 4096]
    assert {"bytes": 4096, "count": 2, "shape": "f32[512]", "of": "jit(step)/gather"} in rows


def test_no_files_no_buffers(tmp_path: Path) -> None:
    assert memory.usage(tmp_path) is None


# ----------------------------------------------------------------------------------------------- hints

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
        ("f32[151936,2048]", "jit(step)/shard_map/scatter-add", "weights gathered for use, and their gradients"),
        ("bf16[128,2048,768]", "jit(step)/while/body/all_gather", "weights gathered for use, and their gradients"),
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
    config = from_config_dict(flagship())
    text = hints.hint([records, kept, kept], config, QWEN, generates=False)
    assert text.startswith("kept for the backward pass: 6.0 GiB, see learner.remat (products), ")
    assert "records of the batch: 1.0 GiB, see data.prompts_per_update (16)" in text
    assert hints.hint([], config, QWEN, generates=False) == ""


def test_every_key_of_a_hint_is_one_of_the_config() -> None:
    keys = {key for knobs in hints.KNOBS.values() for key in knobs}
    tree = dataclasses.asdict(from_config_dict(flagship()))
    for key in keys:
        node: Any = tree
        for name in key.split("."):
            node = node[name]

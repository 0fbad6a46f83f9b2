"""What is read of a checkpoint, and how much memory that takes: a process's own shards, once, and little besides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl_sat.model import ModelConfig, abstract_params, hf
from jaxrl_sat.model.folder import Folder
from jaxrl_sat.model.hf import read_boxes
from jaxrl_sat.model.hf_names import Parameter, parameters
from jaxrl_sat.model.tensor_files import Checkpoint

E, D, F, L, H, HD = 8, 12, 10, 3, 4, 6
CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=D,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=H,
    num_key_value_heads=H,
    head_dim=HD,
    num_experts=E,
    num_experts_per_tok=2,
    moe_intermediate_size=F,
)
FUSED = {
    f"model.layers.{layer}.mlp.experts.{name}": shape
    for layer in range(L)
    for name, shape in (("gate_up_proj", (E, 2 * F, D)), ("down_proj", (E, D, F)))
}


@pytest.fixture(scope="module", params=["per expert", "fused"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    stored = FUSED.get if request.param == "fused" else lambda name: None
    shapes = {s.tensor: s.shape for p in parameters(CONFIG, abstract_params(CONFIG), stored) for s in p.sources}
    rng = np.random.default_rng(0)
    save_file({n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    return Checkpoint(Folder(folder))


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def parameter(checkpoint: Checkpoint, *path: str) -> Parameter:
    found = parameters(CONFIG, abstract_params(CONFIG), checkpoint.shape)
    return next(parameter for parameter in found if parameter.path == path)


@pytest.mark.parametrize(
    ("path", "box", "floats"),
    [
        # One expert of eight, on all layers: an eighth of the bytes.
        (("run0", "mlp", "gate"), ((0, L), (5, 6), (0, D), (0, F)), L * D * F),
        (("run0", "mlp", "down"), ((0, L), (0, 2), (0, F), (0, D)), 2 * L * D * F),
        # Part of an expert's width too: whole rows of it.
        (("run0", "mlp", "up"), ((0, L), (4, 6), (0, D), (2, 7)), 2 * L * 5 * D),
        # Words 8 to 15.
        (("embedding",), ((8, 16), (0, D)), 8 * D),
        # Two heads of four are rows of q; of o they are columns.
        (("run0", "attention", "q"), ((0, L), (0, D), (2, 4), (0, HD)), L * 2 * HD * D),
        (("run0", "attention", "o"), ((0, L), (2, 4), (0, HD), (0, D)), L * 2 * HD * D),
        (("final_norm",), ((0, D),), D),
    ],
)
def test_only_the_ranges_of_a_shard_are_read(
    checkpoint: Checkpoint,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    path: tuple[str, ...],
    box: hf.Box,
    floats: int,
) -> None:
    wanted = parameter(checkpoint, *path)
    whole = tuple((0, size) for size in wanted.shape)
    (expected,) = read_boxes(checkpoint, wanted, [whole], np.dtype(np.float32), pool)
    lengths = []
    read = Folder.read

    def counted(self: Folder, name: str, start: int = 0, stop: int | None = None) -> bytes:
        found = read(self, name, start, stop)
        lengths.append(len(found))
        return found

    monkeypatch.setattr(Folder, "read", counted)
    monkeypatch.setattr(hf, "GAP_BYTES", 4)
    boxes = [box, box] if len(box) == 1 else [box]  # who needs the same ranges shares them
    for found in read_boxes(checkpoint, wanted, boxes, np.dtype(np.float32), pool):
        np.testing.assert_array_equal(found, expected[tuple(slice(*part) for part in box)])
    assert sum(lengths) == 4 * floats


def test_columns_that_are_short_are_read_with_their_rows(checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
    """Every half of the model's width, of q stored with that axis last, needs every row: both halves read them once."""
    wanted = parameter(checkpoint, "run0", "attention", "q")
    halves = [((0, L), (start, start + D // 2), (0, H), (0, HD)) for start in (0, D // 2)]
    whole = tuple((0, size) for size in wanted.shape)
    first, second, both = read_boxes(checkpoint, wanted, [*halves, whole], np.dtype(np.float32), pool)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), both)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5)])
@pytest.mark.parametrize("most", [1, 4, 7, 1000])
def test_parts_cover_a_box_once_and_lie_together(shape: tuple[int, ...], most: int) -> None:
    rng = np.random.default_rng(most)
    for _ in range(20):
        box = tuple(sorted(rng.choice(size + 1, 2, replace=False).tolist()) for size in shape)
        box = tuple((start, stop) for start, stop in box)
        for gap in (1, 4, 1000):
            widened = hf._widened(box, shape, gap)  # the itemsize decides what is short
            assert all(a <= c and d <= b for (a, b), (c, d) in zip(widened, box, strict=True))
            seen = np.zeros(shape, int)
            for part in hf._cut(widened, shape, most):
                index = tuple(slice(*bounds) for bounds in part)
                places = np.arange(seen.size).reshape(shape)[index].ravel()
                assert 0 < len(places) <= max(most, 1)
                np.testing.assert_array_equal(places, np.arange(places[0], places[0] + len(places)))
                seen[index] += 1
            expected = np.zeros(shape, int)
            expected[tuple(slice(*bounds) for bounds in widened)] = 1
            np.testing.assert_array_equal(seen, expected)


MEASURE = """
import json, sys
import jax
from jaxrl_sat.model import ModelConfig, abstract_params, load_hf

def kibibytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

folder, dtype = sys.argv[1:]
with open(f"{folder}/config.json") as file:
    abstract_params(ModelConfig.from_hf(json.load(file)))
jax.block_until_ready(jax.numpy.zeros(8))
before = kibibytes("VmRSS:")
params = load_hf(folder, dtype)[1]
jax.block_until_ready(params)
held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(1024 * (kibibytes("VmHWM:") - before) - held)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by Linux's /proc")
@pytest.mark.parametrize(("stored", "loaded"), [("float32", "float32"), ("bfloat16", "float32")])
def test_loading_takes_little_memory_beside_the_parameters(stored: str, loaded: str, tmp_path: Path) -> None:
    config = ModelConfig(
        vocab_size=16000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
    )
    sources = [source for p in parameters(config, abstract_params(config)) for source in p.sources]
    dtype = np.dtype(ml_dtypes.bfloat16) if stored == "bfloat16" else np.dtype(np.float32)
    tensors = {source.tensor: np.full(source.shape, 0.5, dtype) for source in sources}
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert sum(tensor.nbytes for tensor in tensors.values()) > 130e6
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), loaded]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    above = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert above < 2 * largest

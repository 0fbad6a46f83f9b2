"""Import and export: every spelling of a checkpoint gives the same parameters, every fault one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from jaxrl_sat.model import abstract_params, hf_export, load_hf, param_axes, save_hf
from jaxrl_sat.model.folder import Folder
from jaxrl_sat.types import InputError
from tests.model.helpers import FIXTURES, NAMES


def assert_same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def copy(name: str, folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """The fixture with its tensors changed."""
    shutil.copytree(FIXTURES / name, folder, dirs_exist_ok=True)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    config, params = load_hf(FIXTURES / name)
    save_hf(tmp_path / "out", config, params)
    again_config, again = load_hf(tmp_path / "out")
    assert again_config == config
    assert_same(again, params)
    # The same tensors under the same names as transformers itself wrote.
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", FIXTURES / name))
    assert_same(ours, theirs)


def test_shapes_are_the_declared_ones() -> None:
    config, params = load_hf(FIXTURES / "moe", "bfloat16")
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract_params(config, "bfloat16")
    )


def test_bfloat16_round_trip(tmp_path: Path) -> None:
    config, params = load_hf(FIXTURES / "moe", "bfloat16")
    save_hf(tmp_path, config, params)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(load_hf(tmp_path, "bfloat16")[1], params)
    assert load_hf(tmp_path)[1]["embedding"].dtype == jnp.float32


def fuse(tensors: dict[str, np.ndarray], output_first: bool) -> dict[str, np.ndarray]:
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name}):
        count = len({name for name in tensors if name.startswith(prefix) and "gate_proj" in name})
        gate, up, down = (
            np.stack([tensors[f"{prefix}{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        )
        fused = np.concatenate([gate, up], axis=1)
        swap = (lambda x: x) if output_first else (lambda x: np.ascontiguousarray(x.swapaxes(1, 2)))
        out[prefix + "gate_up_proj"], out[prefix + "down_proj"] = swap(fused), swap(down)
    return out


@pytest.mark.parametrize("output_first", [True, False])
def test_fused_experts(output_first: bool, tmp_path: Path) -> None:
    """Here 2 F = D, so the layout of gate_up_proj alone cannot be told from its shape: down_proj decides."""
    config, expected = load_hf(FIXTURES / "moe")
    assert 2 * config.moe_intermediate_size == config.hidden_size
    folder = copy("moe", tmp_path, lambda tensors: fuse(tensors, output_first))
    assert_same(load_hf(folder)[1], expected)


def test_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, params = load_hf(FIXTURES / "moe")
    monkeypatch.setattr(hf_export, "MAX_SHARD_BYTES", 15_000)
    save_hf(tmp_path, config, params)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(load_hf(tmp_path)[1], params)
    shards[1].unlink()
    with pytest.raises(InputError, match=f"{shards[1].name} does not exist"):
        load_hf(tmp_path)


def test_export_over_an_older_one_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, params = load_hf(FIXTURES / "dense")
    with monkeypatch.context() as patch:
        patch.setattr(hf_export, "MAX_SHARD_BYTES", 9_000)
        save_hf(tmp_path, config, jax.tree.map(jnp.zeros_like, params))
    save_hf(tmp_path, config, params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(load_hf(tmp_path)[1], params)


def test_parameters_go_where_they_belong() -> None:
    config, _ = load_hf(FIXTURES / "dense")
    device = jax.devices()[2]
    shardings = jax.tree.map(lambda _: SingleDeviceSharding(device), abstract_params(config))
    _, params = load_hf(FIXTURES / "dense", shardings=shardings)
    assert {leaf.device for leaf in jax.tree.leaves(params)} == {device}


def without(name: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def halved(name: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {**tensors, name: np.ascontiguousarray(tensors[name][: len(tensors[name]) // 2])}


EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("lm_head.weight"), "no tensor 'lm_head.weight'"),
        (without(EXPERT), f"no tensor '{EXPERT}'"),
        (without("model.norm.weight"), "no tensor 'model.norm.weight'"),
        (halved(EXPERT), rf"'{EXPERT}' has shape \(4, 16\); config.json calls for \(8, 16\)"),
        (halved("model.embed_tokens.weight"), r"shape \(14, 16\); config.json calls for \(29, 16\)"),
        (lambda tensors: {**tensors, "model.layers.0.self_attn.q_proj.bias": np.zeros(24)}, "q_proj.bias"),
        (lambda tensors: {**tensors, "model.layers.3.input_layernorm.weight": np.zeros(16)}, "layers.3"),
    ],
)
def test_tensors_that_do_not_fit_the_config(change: Callable, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_hf(copy("moe", tmp_path, change))
    assert "\n" not in str(error.value)


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_hf(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        load_hf(tmp_path)
    shutil.copy(FIXTURES / "dense" / "config.json", tmp_path)
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="weight_map"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load_hf(tmp_path)
    with pytest.raises(InputError, match=r"'int8' is not one of float32, bfloat16, float16"):
        load_hf(FIXTURES / "dense", "int8")


def with_head(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {**tensors, "lm_head.weight": change(tensors["model.embed_tokens.weight"].copy())}


def test_tied_checkpoint_may_repeat_its_head_but_not_have_one_of_its_own(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path / "same", with_head(lambda head: head))
    assert_same(load_hf(folder)[1], load_hf(FIXTURES / "llama")[1])
    other = copy("llama", tmp_path / "other", with_head(lambda head: head + (np.arange(29) == 28)[:, None]))
    with pytest.raises(InputError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'; .*tie_word"):
        load_hf(other)
    cut = copy("llama", tmp_path / "cut", with_head(lambda head: head[:3]))
    with pytest.raises(InputError, match=r"'lm_head\.weight' has shape \(3, 16\); config.json calls for \(29, 16\)"):
        load_hf(cut)


@pytest.mark.parametrize(
    ("stored", "loaded"), [("float16", "float32"), ("bfloat16", "float16"), ("float32", "bfloat16")]
)
def test_every_dtype_is_read_as_every_other(stored: str, loaded: str, tmp_path: Path) -> None:
    narrow = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
    folder = copy("dense", tmp_path, lambda t: {name: tensor.astype(narrow[stored]) for name, tensor in t.items()})
    embedding = load_file(FIXTURES / "dense" / "model.safetensors")["model.embed_tokens.weight"]
    found = load_hf(folder, loaded)[1]["embedding"]
    assert found.dtype == loaded
    np.testing.assert_array_equal(found, embedding.astype(narrow[stored]).astype(narrow[loaded]))


def test_export_that_fails_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, params = load_hf(FIXTURES / "dense")
    save_hf(tmp_path, config, params)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    to_host, taken = hf_export._to_host, []

    def fails_half_way(block: Any) -> np.ndarray:
        taken.append(block)
        if len(taken) > 9:
            raise OSError("no space left on device")
        return to_host(block)

    monkeypatch.setattr(hf_export, "MAX_SHARD_BYTES", 9_000)
    monkeypatch.setattr(hf_export, "_to_host", fails_half_way)
    with pytest.raises(InputError, match=r"model-00002-of-\d+.safetensors.partial cannot be written .*no space left"):
        save_hf(tmp_path, config, jax.tree.map(jnp.zeros_like, params))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("before", "after"), [("one", "one"), ("shards", "shards"), ("one", "shards"), ("shards", "one")]
)
def test_export_that_is_killed_leaves_the_old_weights_or_the_new(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rename or removal is the last that happens."""
    limits = {"one": 1 << 30, "shards": 9_000}
    config, old = load_hf(FIXTURES / "dense")
    new = jax.tree.map(lambda leaf: leaf + 1, old)

    class Killed(BaseException):
        pass

    def limited(change: Callable, left: list[int]) -> Callable:
        def step(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            change(*arguments)

        return step

    seen = []
    for steps in range(30):
        folder = tmp_path / str(steps)
        monkeypatch.setattr(hf_export, "MAX_SHARD_BYTES", limits[before])
        save_hf(folder, config, old)
        with monkeypatch.context() as patch:
            patch.setattr(hf_export, "MAX_SHARD_BYTES", limits[after])
            left = [steps]
            for change in ("rename", "remove"):
                patch.setattr(Folder, change, limited(getattr(Folder, change), left))
            try:
                save_hf(folder, config, new)
            except Killed:
                pass
        found = load_file_or_shards(folder)
        seen.append(found["model.norm.weight"][0] == new["final_norm"][0])
        for name, leaf in (("embed_tokens", "embedding"), ("norm", "final_norm")):
            np.testing.assert_array_equal(found[f"model.{name}.weight"], (new if seen[-1] else old)[leaf])
        if left[0] >= 0:
            break
    assert left[0] >= 0
    assert seen == sorted(seen) and not seen[0] and seen[-1]
    assert not list(folder.glob("*.partial"))
    assert_same(load_hf(folder)[1], new)


def load_file_or_shards(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, as transformers finds them: a single file, else what the index names."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {file: load_file(folder / file) for file in set(index.values())}
    assert index.keys() == {name for found in tensors.values() for name in found}
    return {name: tensors[file][name] for name, file in index.items()}


def test_export_of_sharded_parameters(tmp_path: Path) -> None:
    config, params = load_hf(FIXTURES / "dense")
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    names = {"embed": "x", "heads": "y"}
    cuts = jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*map(names.get, axes))),
        param_axes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    sharded = load_hf(FIXTURES / "dense", shardings=cuts)[1]
    q = sharded["run0"]["attention"]["q"]
    assert (q.sharding, q.addressable_shards[0].data.shape) == (cuts["run0"]["attention"]["q"], (2, 8, 1, 6))
    assert_same(sharded, params)
    save_hf(tmp_path, config, sharded)
    assert_same(*(load_file(folder / "model.safetensors") for folder in (tmp_path, FIXTURES / "dense")))


def test_export_of_other_parameters_than_the_configs(tmp_path: Path) -> None:
    config, params = load_hf(FIXTURES / "dense")
    with pytest.raises(ValueError, match=r"parameter final_norm is \(15,\); config says \(16,\)"):
        save_hf(tmp_path / "out", config, {**params, "final_norm": params["final_norm"][1:]})
    assert not (tmp_path / "out").exists()


def test_memory_address(tmp_path: Path) -> None:
    """Shards with an index, there and back, where nothing is a file of this machine."""
    config, params = load_hf(FIXTURES / "moe", "bfloat16")
    address = f"memory://{tmp_path.name}/model"
    save_hf(address, config, params)
    again_config, again = load_hf(address, "bfloat16")
    assert again_config == config
    assert_same(again, params)
    with pytest.raises(InputError, match="model folder 'memory://nowhere' does not exist"):
        load_hf("memory://nowhere")
    with pytest.raises(InputError, match="nosuch://a/b cannot be opened .*nosuch"):
        load_hf("nosuch://a/b")


def test_file_address(tmp_path: Path) -> None:
    config, params = load_hf(f"file://{FIXTURES / 'dense'}")
    assert_same(params, load_hf(FIXTURES / "dense")[1])
    save_hf(f"file://{tmp_path}/deep/er", config, params)
    assert sorted(path.name for path in (tmp_path / "deep" / "er").iterdir()) == ["config.json", "model.safetensors"]

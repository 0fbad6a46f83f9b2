"""Import from and export to Hugging Face folders: config.json and safetensors, one file or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_sat.model.config import ModelConfig, Run
from jaxrl_sat.model.params import abstract_params
from jaxrl_sat.types import InputError, Params, reading

DTYPES = ("float32", "bfloat16", "float16")
MAX_SHARD_BYTES = 5 << 30

# Our name in a layer -> Hugging Face's. Matrices are stored output first there, input first here.
_Names = dict[tuple[str, ...], str]
_NORMS: _Names = {
    ("attention_norm",): "input_layernorm",
    ("mlp_norm",): "post_attention_layernorm",
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
}
_ATTENTION: _Names = {("attention", x): f"self_attn.{x}_proj" for x in "qkvo"}
_MLP: _Names = {("mlp", x): f"{x}_proj" for x in ("gate", "up", "down")}


def load_hf(path: str | Path, dtype: str = "float32", shardings: Params | None = None) -> tuple[ModelConfig, Params]:
    """The model in a Hugging Face folder, as (config, parameters in `dtype`).

    Reads one stacked parameter at a time and puts it on its sharding (a pytree like the parameters) if given. Raises
    InputError for a missing folder, file or tensor, for a wrong shape, and for a field of config.json not supported.
    """
    if dtype not in DTYPES:
        raise InputError(f"model dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"model folder {str(folder)!r} does not exist; give a folder with config.json and safetensors")
    config = ModelConfig.from_hf(_read_json(folder / "config.json"))
    with reading(f"model folder {folder}"):
        checkpoint = Checkpoint(folder)

    def read(key_path: tuple[Any, ...], shape: jax.ShapeDtypeStruct, sharding: Any = None) -> jax.Array:
        array = _read(checkpoint, config, tuple(entry.key for entry in key_path), shape)
        return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)

    trees = (abstract_params(config, dtype), *(() if shardings is None else (shardings,)))
    params = jax.tree_util.tree_map_with_path(read, *trees)
    checkpoint.refuse_unread()
    return config, params


class Checkpoint:
    """Tensors of a folder by name, read when asked for; the files stay mapped, not loaded."""

    def __init__(self, folder: Path):
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise InputError(f"{index}: 'weight_map' is missing; it must map tensor names to files")
            names = sorted(set(weight_map.values()))
        elif single.is_file():
            names = [single.name]
        else:
            raise InputError(f"model folder {str(folder)!r} has no model.safetensors and no index of shards")
        self._where: dict[str, Any] = {}
        for name in names:
            file = _open(folder / name)
            self._where.update(dict.fromkeys(file.keys(), file))
        self._unread = set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str, *allowed: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, which must be one of those allowed."""
        if name not in self._where:
            raise InputError(f"model folder {str(self.folder)!r} has no tensor {name!r}, which config.json calls for")
        shape = tuple(self._where[name].get_slice(name).get_shape())
        if shape not in allowed:
            wanted = " or ".join(str(shape) for shape in allowed)
            raise InputError(f"tensor {name!r} has shape {shape}; config.json calls for {wanted}")
        return shape

    def read(self, name: str, *allowed: tuple[int, ...]) -> np.ndarray:
        """The tensor; its shape must be one of those allowed."""
        self.shape(name, *allowed)
        self._unread.discard(name)
        return self._where[name].get_tensor(name)

    def refuse_unread(self) -> None:
        """A tensor nobody asked for (a bias, a layer too many) means that this is another model than config.json's."""
        for name in sorted(self._unread):
            # Tied checkpoints may repeat their head; old ones hold the frequencies of the rotary embedding.
            if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                raise InputError(f"model folder {str(self.folder)!r} has {name!r}, which config.json does not call for")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path} does not exist; a model folder needs it")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is not JSON: {error}".replace("\n", " ")) from None
    if not isinstance(fields, dict):
        raise InputError(f"{path} holds {type(fields).__name__}; it must be a JSON object")
    return fields


def _open(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} does not exist; the model's index names it")
    try:
        return safe_open(str(path), framework="np")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors: {error}".replace("\n", " ")) from None


# ------------------------------------------------------------------------------------------------ one parameter


def _read(checkpoint: Checkpoint, config: ModelConfig, path: tuple[str, ...], want: jax.ShapeDtypeStruct) -> np.ndarray:
    if path[0] == "head":
        return checkpoint.read("lm_head.weight", want.shape).astype(want.dtype)
    if path[0] == "embedding":
        return checkpoint.read("model.embed_tokens.weight", want.shape).astype(want.dtype)
    if path[0] == "final_norm":
        return checkpoint.read("model.norm.weight", want.shape).astype(want.dtype)
    run = next(run for run in config.runs if run.name == path[0])
    out = np.empty(want.shape, want.dtype)
    for layer in range(run.start, run.stop):
        out[layer - run.start] = _read_layer(checkpoint, run, layer, path[1:], want.shape[1:])
    return out


def _read_layer(checkpoint: Checkpoint, run: Run, layer: int, path: tuple[str, ...], shape: tuple) -> np.ndarray:
    prefix = f"model.layers.{layer}."
    if path in _NORMS:
        return checkpoint.read(f"{prefix}{_NORMS[path]}.weight", shape)
    if path in _ATTENTION:
        flat = _flat(path[1], shape)
        return checkpoint.read(f"{prefix}{_ATTENTION[path]}.weight", flat[::-1]).T.reshape(shape)
    if path == ("mlp", "router"):
        return checkpoint.read(f"{prefix}mlp.gate.weight", shape[::-1]).T
    if not run.sparse:
        return checkpoint.read(f"{prefix}mlp.{_MLP[path]}.weight", shape[::-1]).T
    if f"{prefix}mlp.experts.gate_up_proj" in checkpoint:
        return _read_fused(checkpoint, f"{prefix}mlp.experts.", path[1], shape)
    names = [f"{prefix}mlp.experts.{expert}.{_MLP[path]}.weight" for expert in range(shape[0])]
    return np.stack([checkpoint.read(name, shape[:0:-1]).T for name in names])


def _flat(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix (input, output) behind an attention weight: o joins its first two axes, the others their last two."""
    return (shape[0] * shape[1], shape[2]) if name == "o" else (shape[0], shape[1] * shape[2])


def _read_fused(checkpoint: Checkpoint, prefix: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One of gate, up and down from fused experts: [E, 2F, D] and [E, D, F], or both with their last axes swapped.

    The two layouts look alike in one tensor if 2F = D, or in the other if F = D, but never in both.
    """
    e, d, f = shape if name != "down" else (shape[0], shape[2], shape[1])
    gate_up = checkpoint.shape(f"{prefix}gate_up_proj", (e, 2 * f, d), (e, d, 2 * f))
    down = checkpoint.shape(f"{prefix}down_proj", (e, d, f), (e, f, d))
    output_first = (gate_up, down) == ((e, 2 * f, d), (e, d, f))
    if not output_first and (gate_up, down) != ((e, d, 2 * f), (e, f, d)):
        raise InputError(f"'{prefix}gate_up_proj' {gate_up} and 'down_proj' {down} disagree in layout")
    fused = f"{prefix}down_proj" if name == "down" else f"{prefix}gate_up_proj"
    tensor = checkpoint.read(fused, down if name == "down" else gate_up)
    tensor = tensor.swapaxes(1, 2) if output_first else tensor
    return {"gate": tensor[..., :f], "up": tensor[..., f:], "down": tensor}[name]


# ------------------------------------------------------------------------------------------------ export


def save_hf(path: str | Path, config: ModelConfig, params: Params) -> None:
    """Writes config.json and safetensors (shards of at most 5 GiB with an index) that transformers loads.

    Experts are written one by one, under the names of the published Qwen3-MoE checkpoints.
    """
    folder = Path(path)
    fields = config.to_hf()
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(jnp.dtype(params["embedding"].dtype))
    fields |= {"torch_dtype": dtype, "dtype": dtype}
    shards: list[dict[str, np.ndarray]] = [{}]
    used = 0
    for name, tensor in _tensors(config, params):
        if used and used + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = np.ascontiguousarray(tensor)
        used += tensor.nbytes
    for stale in (*folder.glob("model*.safetensors"), *folder.glob("model*.safetensors.index.json")):
        stale.unlink()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_shards(folder, shards)
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_shards(folder: Path, shards: list[dict[str, np.ndarray]]) -> None:
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(folder / name), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _tensors(config: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    host: Callable[[Any], np.ndarray] = lambda array: np.asarray(jax.device_get(array))  # noqa: E731
    yield "model.embed_tokens.weight", host(params["embedding"])
    for run in config.runs:
        for layer in range(run.start, run.stop):
            sliced = jax.tree.map(lambda leaf, i=layer - run.start: leaf[i], params[run.name])
            for name, tensor in _layer_tensors(run, jax.tree.map(host, sliced)):
                yield f"model.layers.{layer}.{name}", tensor
    yield "model.norm.weight", host(params["final_norm"])
    if not config.tie_word_embeddings:
        yield "lm_head.weight", host(params["head"])


def _layer_tensors(run: Run, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    for (group, *rest), theirs in _NORMS.items():
        value = params[group] if not rest else params[group].get(rest[0])
        if value is not None:
            yield f"{theirs}.weight", value
    for (group, name), theirs in _ATTENTION.items():
        value = params[group][name]
        yield f"{theirs}.weight", value.reshape(_flat(name, value.shape)).T
    for (group, name), theirs in _MLP.items():
        value = params[group][name]
        if not run.sparse:
            yield f"mlp.{theirs}.weight", value.T
            continue
        for expert in range(value.shape[0]):
            yield f"mlp.experts.{expert}.{theirs}.weight", value[expert].T
    if run.sparse:
        yield "mlp.gate.weight", params["mlp"]["router"].T

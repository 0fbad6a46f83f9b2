"""Export to Hugging Face folders: config.json and safetensors, one file or shards with an index, at any address.

Tensors leave the devices a layer at a time and go straight into their file. Files are written beside their places and
renamed when all are complete; one rename (or removal, where shards follow a single file) makes the new weights those of
the folder. Up to it what lay there before is whole, after it what was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.folder import Folder
from jaxrl_sat.model.hf_names import Parameter, Source, parameters
from jaxrl_sat.model.params import abstract_params
from jaxrl_sat.model.tensor_files import INDEX, SINGLE, header_bytes
from jaxrl_sat.types import InputError, Params

MAX_SHARD_BYTES = 5 << 30
PARTIAL = ".partial"
"""Ends the name of a file that is being written."""


@dataclasses.dataclass(frozen=True)
class _Block:
    """What leaves the devices at a time: one layer of a stacked parameter (`layer` its index), or a whole one."""

    leaf: Any
    layer: int | None
    sources: tuple[Source, ...]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(source.shape) for source in self.sources) * np.dtype(self.leaf.dtype).itemsize


def save_hf(
    path: str | Path, config: ModelConfig, params: Params, beside: Mapping[str, bytes | None] | None = None
) -> None:
    """Writes config.json and safetensors (shards of at most 5 GiB with an index) that transformers loads.

    `path` is a folder or an address that fsspec opens. Experts are written one by one, under the names of the published
    Qwen3-MoE checkpoints. `beside`: other files of the model, by name; None for one that it has not, so that none of an
    earlier model stays. In a job of several processes all must call this: each gives its shards, the first writes.
    Raises InputError where the folder cannot be written; what lay there is then as it was.
    """
    folder, fields = Folder(path), config.to_hf()
    dtype = np.dtype(params["embedding"].dtype).name
    fields |= {"torch_dtype": dtype, "dtype": dtype}
    shards = _shards(_blocks(config, params))
    if jax.process_index() == 0:
        _write(folder, shards, fields, beside or {})
    else:
        for block in itertools.chain.from_iterable(shards):
            _to_host(block)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"save_hf {folder}")


def _blocks(config: ModelConfig, params: Params) -> list[_Block]:
    """All of the model, the layers in their order; each parameter checked against the shape config calls for."""
    keyed: list[tuple[int, _Block]] = []
    abstract = abstract_params(config)
    leaves = jax.tree.structure(abstract).flatten_up_to(params)
    for parameter, leaf in zip(parameters(config, abstract), leaves, strict=True):
        if tuple(leaf.shape) != parameter.shape:
            raise ValueError(f"parameter {'.'.join(parameter.path)} is {leaf.shape}; config says {parameter.shape}")
        keyed += _layers(config, parameter, leaf)
    return [block for _, block in sorted(keyed, key=lambda entry: entry[0])]


def _layers(config: ModelConfig, parameter: Parameter, leaf: Any) -> Iterator[tuple[int, _Block]]:
    """The blocks of one parameter, with what they are sorted by: the embedding, then the layers, then the rest."""
    starts = {run.name: run.start for run in config.runs}
    name = parameter.path[0]
    if name not in starts:
        yield -1 if name == "embedding" else config.num_hidden_layers, _Block(leaf, None, parameter.sources)
        return
    for layer, sources in itertools.groupby(parameter.sources, key=lambda source: source.at[0]):
        yield starts[name] + layer, _Block(leaf, layer, tuple(sources))


def _shards(blocks: list[_Block]) -> list[list[_Block]]:
    """The blocks in files of at most MAX_SHARD_BYTES, a block never apart."""
    shards: list[list[_Block]] = [[]]
    used = 0
    for block in blocks:
        if used and used + block.nbytes > MAX_SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(block)
        used += block.nbytes
    return shards


def _to_host(block: _Block) -> np.ndarray:
    """The block's array on the host. All processes of a job take part."""
    leaf = block.leaf
    if block.layer is not None:
        # A slice of its own: NumPy's view of the whole parameter would stay in memory with it.
        leaf = jax.lax.dynamic_index_in_dim(leaf, block.layer, keepdims=False)
    if getattr(leaf, "is_fully_addressable", True):
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def _write(
    folder: Folder, shards: list[list[_Block]], fields: dict[str, Any], beside: Mapping[str, bytes | None]
) -> None:
    """All files beside their places, then their renames: the last one makes the new weights those of the folder."""
    names = _names(folder, len(shards))
    contents = {name: content for name, content in beside.items() if content is not None}
    contents["config.json"] = _json(fields)
    if len(shards) > 1:
        of = zip(names, shards, strict=True)
        index = {source.tensor: name for name, blocks in of for block in blocks for source in block.sources}
        total = sum(block.nbytes for blocks in shards for block in blocks)
        contents[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": index})
    begun: list[str] = []
    try:
        for name, blocks in zip(names, shards, strict=True):
            begun.append(name)
            with _beginning(folder, name) as file:
                tensors = [(s.tensor, s.shape, np.dtype(block.leaf.dtype)) for block in blocks for s in block.sources]
                file.write(header_bytes(tensors))
                for block in blocks:
                    array = _to_host(block)
                    for source in block.sources:
                        file.write(_as_stored(source, array))
        for name, content in contents.items():
            begun.append(name)
            with _beginning(folder, name) as file:
                file.write(content)
    except BaseException:
        for name in begun:
            with contextlib.suppress(Exception):
                folder.remove(name + PARTIAL)
        raise
    for name in (*names, *contents) if INDEX in contents else (*contents, *names):
        folder.rename(name + PARTIAL, name)
    for name in folder.names():
        whole = name.removesuffix(PARTIAL)
        ours = whole in (SINGLE, INDEX, "config.json", *beside) or fnmatch.fnmatch(whole, "model-*.safetensors")
        if ours and name not in begun:
            folder.remove(name)


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"


@contextlib.contextmanager
def _beginning(folder: Folder, name: str) -> Iterator[IO[bytes]]:
    """The file that is to become `name`. A folder of that name would take it in instead, so it is refused."""
    if folder.has_folder(name):
        raise InputError(f"{folder.of(name)} is a folder; it must be a file, or not be there")
    with folder.writing(name + PARTIAL) as file:
        yield file


def _names(folder: Folder, count: int) -> list[str]:
    """Names for so many files; where these are shards, none that an earlier index may still point to."""
    if count == 1:
        return [SINGLE]
    taken = set(folder.names()) if folder.exists() else set()
    stem, version = "model", 1
    while True:
        names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if taken.isdisjoint(names):
            return names
        version += 1
        stem = f"model-v{version}"


def _as_stored(source: Source, array: np.ndarray) -> bytes | memoryview:
    """The bytes of one tensor from a block's array."""
    theirs = [source.order.index(axis) for axis in range(len(source.order))]
    tensor = np.ascontiguousarray(array[source.at[1:]].transpose(theirs))
    return tensor.reshape(-1).view(np.uint8).data

"""Import from Hugging Face folders: config.json and safetensors, one file or shards with an index, at any address.

Everything is checked from the headers before the first tensor is read. Tensors are then read in ranges, each straight
into its place in the shards that this process's devices hold: beyond these, memory holds a few ranges at a time, and
what belongs to other processes is not read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.folder import Folder
from jaxrl_sat.model.hf_names import EMBEDDING, HEAD, Parameter, Source, parameters
from jaxrl_sat.model.params import abstract_params
from jaxrl_sat.model.tensor_files import DTYPES, READERS, Checkpoint
from jaxrl_sat.types import InputError, Params

PARAM_DTYPES: dict[str, np.dtype] = {dtype.name: dtype for dtype in DTYPES.values()}
"""What parameters may be loaded in."""

RANGE_BYTES = 4 << 20
"""What is read at a time, at most."""

GAP_BYTES = 64 << 10
"""Stretches shorter than this are not read one by one: the rows that they lie in are read whole."""

ALIGNMENT = 64
"""Host memory aligned so is taken over by a CPU device as it stands; anything else it copies."""

Box = tuple[tuple[int, int], ...]
"""Part of an array: where it starts and stops on each axis."""


def load_hf(path: str | Path, dtype: str = "float32", shardings: Params | None = None) -> tuple[ModelConfig, Params]:
    """The model in a Hugging Face folder (a path, or an address that fsspec opens), as (config, parameters in `dtype`).

    `shardings` (a pytree like the parameters) says where each parameter lies: this process reads its own shards only.
    Raises InputError for a missing folder, file or tensor, a wrong shape or dtype, a file that is cut or corrupt, and
    a field of config.json not supported; nothing has been loaded then.
    """
    if dtype not in PARAM_DTYPES:
        raise InputError(f"model dtype {dtype!r} is not one of {', '.join(PARAM_DTYPES)}")
    folder = Folder(path)
    if not folder.exists():
        raise InputError(f"model folder {str(folder)!r} does not exist; give a folder with config.json and safetensors")
    config = ModelConfig.from_hf(folder.read_json("config.json"))
    checkpoint = Checkpoint(folder)
    abstract = abstract_params(config, dtype)
    treedef, wanted = jax.tree.structure(abstract), parameters(config, abstract, checkpoint.shape)
    places = [None] * len(wanted) if shardings is None else treedef.flatten_up_to(shardings)
    with ThreadPoolExecutor(READERS) as pool:
        _check(checkpoint, config, wanted, pool)
        leaves = [
            _load(checkpoint, parameter, PARAM_DTYPES[dtype], sharding, pool)
            for parameter, sharding in zip(wanted, places, strict=True)
        ]
    return config, jax.tree.unflatten(treedef, leaves)


def _check(checkpoint: Checkpoint, config: ModelConfig, wanted: Sequence[Parameter], pool: Executor) -> None:
    """Raise InputError unless the checkpoint holds what config.json calls for, and nothing else."""
    called_for = set()
    for source in itertools.chain.from_iterable(parameter.sources for parameter in wanted):
        checkpoint.check(source.tensor, source.shape)
        called_for.add(source.tensor)
    # A tensor nobody asks for (a bias, a layer too many) means that this is another model than config.json's.
    for name in sorted(checkpoint.tensors.keys() - called_for):
        if name == HEAD and config.tie_word_embeddings:
            _check_tied(checkpoint, pool)
        elif not name.endswith("rotary_emb.inv_freq"):  # which old checkpoints hold, and rope_theta gives
            raise InputError(
                f"model folder {str(checkpoint.folder)!r} has {name!r}, which config.json does not call for"
            )


def _check_tied(checkpoint: Checkpoint, pool: Executor) -> None:
    """A tied checkpoint may repeat its head, as it may leave it out; a head of its own would be lost."""
    shape = checkpoint.tensors[EMBEDDING].shape
    checkpoint.check(HEAD, shape)

    def same(part: tuple[int, int]) -> bool:
        one, other = (checkpoint.read(name, *part).astype(np.float32) for name in (HEAD, EMBEDDING))
        return np.array_equal(one, other)

    count, step = math.prod(shape), _range_bytes(checkpoint) // 8
    if not all(pool.map(same, ((start, min(start + step, count)) for start in range(0, count, step)))):
        raise InputError(
            f"model folder {str(checkpoint.folder)!r}: {HEAD!r} differs from {EMBEDDING!r}; config.json ties them "
            "(tie_word_embeddings), so they must be the same"
        )


# ------------------------------------------------------------------------------------------------ one parameter


def _load(checkpoint: Checkpoint, parameter: Parameter, dtype: np.dtype, sharding: Any, pool: Executor) -> jax.Array:
    """One parameter on its devices; without a sharding on the default one."""
    shape = parameter.shape
    if sharding is None:
        whole = tuple((0, size) for size in shape)
        return jax.device_put(read_boxes(checkpoint, parameter, [whole], dtype, pool)[0])
    devices: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices.setdefault(box, []).append(device)
    buffers = read_boxes(checkpoint, parameter, list(devices), dtype, pool)
    shards = [jax.device_put(b, d) for b, of in zip(buffers, devices.values(), strict=True) for d in of]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)


def read_boxes(
    checkpoint: Checkpoint, parameter: Parameter, boxes: Sequence[Box], dtype: np.dtype, pool: Executor
) -> list[np.ndarray]:
    """Parts of a parameter, in `dtype`; a range of the checkpoint that several of them need is read once."""
    arrays = [_aligned(tuple(stop - start for start, stop in box), dtype) for box in boxes]
    most = _range_bytes(checkpoint)

    def ranges() -> Iterator[tuple[Source, Box, list[tuple[Box, np.ndarray]]]]:
        for source in parameter.sources:
            itemsize = DTYPES[checkpoint.tensors[source.tensor].dtype].itemsize
            for box, targets in _targets(source, boxes, arrays, itemsize).items():
                yield from ((source, part, targets) for part in _cut(box, source.split, most // itemsize))

    def copy(job: tuple[Source, Box, list[tuple[Box, np.ndarray]]]) -> None:
        source, part, targets = job
        start = np.ravel_multi_index([first for first, _ in part], source.split)
        sizes = [stop - first for first, stop in part]
        found = checkpoint.read(source.tensor, int(start), int(start) + math.prod(sizes)).reshape(sizes)
        for box, array in targets:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part, strict=True)]
            if all(first < stop for first, stop in both):
                array[_relative(both, box)] = found[_relative(both, part)]

    for _ in pool.map(copy, ranges()):
        pass  # which raises what a reader raised
    return arrays


def _targets(
    source: Source, boxes: Sequence[Box], arrays: Sequence[np.ndarray], itemsize: int
) -> dict[Box, list[tuple[Box, np.ndarray]]]:
    """What of a tensor is to be read -> the parts of it that go into which arrays, these with its axes."""
    out: dict[Box, list[tuple[Box, np.ndarray]]] = {}
    depth = len(source.at)
    theirs = [source.order.index(axis) for axis in range(len(source.order))]
    for box, array in zip(boxes, arrays, strict=True):
        if not all(start <= i < stop for i, (start, stop) in zip(source.at, box, strict=False)):
            continue
        view = array[tuple(i - start for i, (start, _) in zip(source.at, box, strict=False))].transpose(theirs)
        part = [box[depth + axis] for axis in theirs]
        part[source.cut] = (part[source.cut][0] + source.first, part[source.cut][1] + source.first)
        out.setdefault(_widened(tuple(part), source.split, itemsize), []).append((tuple(part), view))
    return out


def _widened(box: Box, shape: tuple[int, ...], itemsize: int) -> Box:
    """The box with its last axes made whole until what lies together in the file is worth a read of its own."""
    out, together = list(box), itemsize
    for axis in range(len(shape) - 1, 0, -1):
        start, stop = out[axis]
        if stop - start < shape[axis] and (stop - start) * together >= GAP_BYTES:
            break
        out[axis] = (0, shape[axis])
        together *= shape[axis]
    return tuple(out)


def _cut(box: Box, shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """The box in parts that lie together in the file, in C order, each of at most `most` elements if its rows are."""
    partial = [axis for axis, (part, size) in enumerate(zip(box, shape, strict=True)) if part != (0, size)]
    axis = partial[-1] if partial else 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) > most:
        axis += 1
    rows = max(1, most // math.prod(shape[axis + 1 :]))
    start, stop = box[axis]
    for outer in itertools.product(*(range(*part) for part in box[:axis])):
        for first in range(start, stop, rows):
            yield (*((i, i + 1) for i in outer), (first, min(first + rows, stop)), *box[axis + 1 :])


def _relative(part: Sequence[tuple[int, int]], box: Box) -> tuple[slice, ...]:
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(part, box, strict=True))


def _range_bytes(checkpoint: Checkpoint) -> int:
    """Bytes to read at a time: all readers together hold no more than the largest tensor."""
    largest = max(stored.nbytes for stored in checkpoint.tensors.values())
    return min(RANGE_BYTES, max(GAP_BYTES, largest // READERS))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that a CPU device takes over without a copy."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)

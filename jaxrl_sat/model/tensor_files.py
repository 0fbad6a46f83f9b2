"""Safetensors: the headers of a checkpoint's files, checked whole before any tensor is read, and tensors by ranges.

A file is 8 bytes (the header's length), the header (JSON: name -> dtype, shape, data_offsets) and the tensors, one
behind the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_sat.model.folder import Folder
from jaxrl_sat.types import InputError, reading

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

READERS = 8
"""Threads that read ranges: what an object store needs to be fast."""

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
"""Those that are read as parameters."""

# Bytes of an element of every other dtype that the format names, so that a header with one of them can be checked.
_ITEMSIZE = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_ITEMSIZE |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}
_ITEMSIZE |= {name: dtype.itemsize for name, dtype in DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor: its file, the dtype as the format spells it, its shape, and where its bytes begin in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


class Checkpoint:
    """The tensors of a model folder by name: `tensors` from the headers, their elements when asked for."""

    def __init__(self, folder: Folder):
        """Reads and checks every header. Raises InputError that names the file."""
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        files, index = _files(folder)
        with ThreadPoolExecutor(READERS) as pool:
            headers = list(pool.map(lambda file: read_header(folder, file), files))
        for stored in headers:
            for name in stored.keys() & self.tensors.keys():
                both = f"{self.tensors[name].file} and {stored[name].file}"
                raise InputError(f"tensor {name!r} lies in two files of {folder}, {both}; only one may hold it")
            self.tensors |= stored
        for name, file in index.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise InputError(f"{folder.of(file)} has no tensor {name!r}, which {INDEX} says it holds")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None where the checkpoint has no such tensor."""
        return self.tensors[name].shape if name in self.tensors else None

    def check(self, name: str, *allowed: tuple[int, ...]) -> None:
        """Raise InputError unless there is such a tensor, of one of these shapes and in a dtype of `DTYPES`."""
        stored = self.tensors.get(name)
        if stored is None:
            raise InputError(f"model folder {str(self.folder)!r} has no tensor {name!r}, which config.json calls for")
        where = self.folder.of(stored.file)
        if stored.shape not in allowed:
            wanted = " or ".join(str(shape) for shape in allowed)
            raise InputError(f"{where}: tensor {name!r} has shape {stored.shape}; config.json calls for {wanted}")
        if stored.dtype not in DTYPES:
            raise InputError(f"{where}: tensor {name!r} is {stored.dtype}; supported are {', '.join(DTYPES)}")

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements start..stop-1 of a tensor as it lies in the file, flat, in its own dtype."""
        stored = self.tensors[name]
        dtype = DTYPES[stored.dtype]
        first, last = (stored.start + at * dtype.itemsize for at in (start, stop))
        return np.frombuffer(self.folder.read(stored.file, first, last), dtype)


def _files(folder: Folder) -> tuple[list[str], dict[str, str]]:
    """The files with tensors, and what the index says of where each tensor lies (nothing if it is a single file).

    A single file is taken before an index, as transformers does.
    """
    if folder.has(SINGLE):
        return [SINGLE], {}
    if not folder.has(INDEX):
        raise InputError(f"model folder {str(folder)!r} has no {SINGLE} and no index of shards")
    index = folder.read_json(INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise InputError(f"{folder.of(INDEX)}: 'weight_map' is missing; it must map tensor names to files")
    for name, file in index.items():
        if not isinstance(file, str) or not file or "/" in file:
            raise InputError(f"{folder.of(INDEX)}: {name!r} lies in {file!r}; it must be a file's name")
    files = sorted(set(index.values()))
    for file in files:
        if not folder.has(file):
            raise InputError(f"{folder.of(file)} does not exist; {INDEX} names it")
    return files, index


def read_header(folder: Folder, file: str) -> dict[str, Stored]:
    """What one file holds. Raises InputError for a header that is cut, corrupt or at odds with the file's size."""
    where, size = folder.of(file), folder.size(file)
    if size < 8:
        raise InputError(f"{where} cannot be read as safetensors: {size} bytes; the header's length alone takes 8")
    length = int.from_bytes(folder.read(file, 0, 8), "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise InputError(
            f"{where} cannot be read as safetensors: its header should take {length} bytes; the file has {size - 8} "
            f"behind the length, and at most {_MAX_HEADER_BYTES} are allowed"
        )
    try:
        header = json.loads(folder.read(file, 8, 8 + length).decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{where} cannot be read as safetensors: its header is not JSON ({reason})") from None
    if not isinstance(header, dict):
        raise InputError(f"{where} cannot be read as safetensors: its header must be a JSON object")
    header.pop("__metadata__", None)
    stored, ends = {}, {}
    for name, entry in header.items():
        with reading(f"{where}: the header's entry of tensor {name!r}"):
            stored[name], ends[name] = _entry(where, file, name, entry, 8 + length)
    # Each tensor begins where the one before it ends, the first behind the header, and the last ends with the file.
    expected = 8 + length
    for name in sorted(stored, key=lambda name: (stored[name].start, ends[name])):
        if stored[name].start != expected:
            found = f"begins at byte {stored[name].start}; the tensor before it ends at {expected}"
            raise InputError(f"{where}: tensor {name!r} {found}: they must lie one behind the other")
        expected = ends[name]
    if expected != size:
        what = "it is cut short" if size < expected else "it has bytes that belong to no tensor"
        raise InputError(f"{where} has {size} bytes; its header calls for {expected}: {what}")
    return stored


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name stands in it twice")
    return out


def _entry(where: str, file: str, name: str, entry: Any, data: int) -> tuple[Stored, int]:
    """The tensor of one entry and where it ends in the file."""
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise InputError(f"{where}: tensor {name!r} has shape {shape} and data_offsets {start}, {stop}; whole numbers")
    if dtype not in _ITEMSIZE:
        raise InputError(f"{where}: tensor {name!r} is {dtype!r}; supported are {', '.join(DTYPES)}")
    stored = Stored(file, dtype, shape, data + start)
    if stop - start != stored.nbytes:
        found = f"data_offsets {start} to {stop}, {stop - start} bytes"
        raise InputError(f"{where}: tensor {name!r} has {found}; {dtype} of shape {shape} takes {stored.nbytes}")
    return stored, data + stop


# ------------------------------------------------------------------------------------------------ writing

_SPELLING = {dtype: name for name, dtype in DTYPES.items()}


def header_bytes(tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]]) -> bytes:
    """What a file of these tensors (name, shape, dtype) begins with: length and header, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape, dtype in tensors:
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _SPELLING[dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

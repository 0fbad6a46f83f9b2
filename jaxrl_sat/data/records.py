"""Rows of the files that problems come in: JSON lines, a JSON array, Parquet, array_record. One at a time.

What a file is, its first bytes say; its name must agree. No row over `ROW_BYTES` is ever held whole (of Parquet, whose
values are read in one piece, a few rows at once), so memory does not grow with what a file holds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import tensorflow_datasets as tfds

ROW_BYTES = 4 * 2**20
"""The largest row that is read; one above it is unusable and passed over."""
CHUNK = 2**20
PARQUET_BYTES = 4 * 2**20
"""About how much of a Parquet file is held at once."""

LINES, ARRAY, PARQUET, ARRAY_RECORD = "JSON lines", "a JSON array", "Parquet", "array_record"
NAMED = {".jsonl": {LINES}, ".ndjson": {LINES}, ".json": {LINES, ARRAY}, ".parquet": {PARQUET}}
"""What a file of this name may hold; of any other name, whatever its first bytes say."""

_STRING = re.compile(rb'(?:[^"\\]|\\.)*+("?)', re.DOTALL)
_MARK = re.compile(rb'["{}\[\],]')


class BadFile(Exception):
    """A file cannot be read, or only up to a row: why."""


class Unusable(Exception):
    """A row cannot be used: why, in a few words that are the same for all rows of its kind."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row and its number in the file, from 1 (of JSON lines the line's). Without fields, `problem` says why."""

    number: int
    fields: Mapping[str, Any] | None
    problem: str = ""


def rows(path: Path, split: str = "train", columns: Collection[str] = ()) -> Iterator[Row]:
    """The rows of a file, or of one split of a prepared set's folder. Of Parquet, values of `columns` alone, if named.

    Raises `BadFile` for one that is missing, empty, cut off, or not what its name says.
    """
    try:
        kind = _kind(path)
        allowed = NAMED.get(path.suffix.lower(), {kind})
        if kind not in allowed:
            raise BadFile(f"holds {kind}; its name says {' or '.join(sorted(allowed))}")
        if kind == PARQUET:
            yield from _parquet_rows(path, columns)
        elif kind == ARRAY_RECORD:
            yield from _array_record_rows(path, split)
        else:
            yield from _line_rows(path) if kind == LINES else _array_rows(path)
    except OSError as error:
        raise BadFile(f"cannot be read ({error.strerror}); allowed: a file that can") from error


def _kind(path: Path) -> str:
    if path.is_dir() or ".array_record" in path.name:
        return ARRAY_RECORD
    if path.exists() and not path.is_file():  # what a pipe has can be read only once
        raise BadFile("is not a regular file; allowed: one that can be read twice")
    with path.open("rb") as file:
        start = file.read(4096)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    kinds = {b"PAR1": PARQUET, b"[": ARRAY, b"{": LINES}
    kind = next((kind for first, kind in kinds.items() if text.startswith(first)), None)
    if kind is None or (kind != PARQUET and b"\0" in text):  # JSON in UTF-16 has them, in UTF-8 never
        what = "is empty" if not text else f"begins with {text[:16]!r}"
        raise BadFile(f"{what}; allowed: {LINES} or {ARRAY} in UTF-8, {PARQUET} or {ARRAY_RECORD}")
    return kind


def _parsed(number: int, text: bytes) -> Row:
    try:
        fields = json.loads(text.decode("utf-8-sig"))  # bytes it would take for UTF-16, line by line
    except (ValueError, RecursionError):
        return Row(number, None, "not JSON")
    return Row(number, fields) if isinstance(fields, dict) else Row(number, None, "not a JSON object")


def _too_large(number: int) -> Row:
    return Row(number, None, f"row over {ROW_BYTES // 2**20} MiB")


def _line_rows(path: Path) -> Iterator[Row]:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(ROW_BYTES + 1):
            number += 1
            if len(line) > ROW_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(ROW_BYTES)
                yield _too_large(number)
            elif line.strip():
                yield _parsed(number, line)


def _array_rows(path: Path) -> Iterator[Row]:
    for number, element in enumerate(_elements(path), 1):
        yield _too_large(number) if element is None else _parsed(number, element)


def _elements(path: Path) -> Iterator[bytes | None]:
    """The text of each element of a JSON array; None for one over `ROW_BYTES`."""
    element, depth, quoted, ended, held, count = _Element(), 0, False, False, b"", 0
    with path.open("rb") as file:
        for chunk in iter(functools.partial(file.read, CHUNK), b""):
            data, position, held = held + chunk, 0, b""
            while position < len(data) and not ended:
                start, mark = position, b""
                if quoted:
                    position, closed = _end_of_string(data, start)
                    quoted = not closed
                    if quoted and position < len(data):  # a backslash whose other half is in the next chunk
                        held = data[position:]
                        data = data[:position]
                else:
                    found = _MARK.search(data, start)
                    position = found.end() if found else len(data)
                    mark = found[0] if found else b""
                    quoted = mark == b'"'
                    depth += (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
                ended = mark == b"]" and depth == 0
                if ended or (mark == b"," and depth == 1):
                    element.take(data, start, position - 1)
                    if not (ended and count == 0 and element.blank):
                        count += 1
                        yield element.finish()
                elif not (mark == b"[" and depth == 1):
                    element.take(data, start, position)
            if ended and data[position:].strip():
                raise BadFile(f"goes on behind its array of {count}; allowed: one array")
    if not ended:
        raise BadFile(f"ends in the middle of element {count + 1} of its array; allowed: a whole file")


def _end_of_string(data: bytes, start: int) -> tuple[int, bool]:
    """Where the string that `start` is in ends, its quote included, and whether it does in `data`."""
    match = _STRING.match(data, start)
    assert match is not None  # it matches nothing, too
    return match.end(), bool(match[1])


class _Element:
    """The text of the element under way, let go once it is too large."""

    def __init__(self) -> None:
        self._text, self._large = bytearray(), False

    @property
    def blank(self) -> bool:
        return not self._large and not self._text.strip()

    def take(self, data: bytes, start: int, end: int) -> None:
        self._large = self._large or len(self._text) + end - start > ROW_BYTES
        if self._large:
            self._text.clear()
        else:
            self._text += data[start:end]

    def finish(self) -> bytes | None:
        text = None if self._large else bytes(self._text)
        self._text, self._large = bytearray(), False
        return text


def _parquet_rows(path: Path, columns: Collection[str]) -> Iterator[Row]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            meta, names = file.metadata, file.schema_arrow.names
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            rows_at_once = max(1, min(1024, PARQUET_BYTES * meta.num_rows // max(1, size)))
            wanted = [name for name in names if not columns or name in columns] or names
            unread = dict.fromkeys(name for name in names if name not in wanted)
            for batch in file.iter_batches(rows_at_once, columns=wanted, use_threads=False):
                small = batch.nbytes <= ROW_BYTES
                for one in [batch] if small else [batch.slice(i, 1) for i in range(batch.num_rows)]:
                    large = one.nbytes > ROW_BYTES
                    for fields in [None] if large else one.to_pylist():
                        number += 1
                        yield _too_large(number) if fields is None else Row(number, unread | fields)
    except Exception as error:  # of Arrow, or of what it was given for text
        raise BadFile(f"row {number + 1} cannot be read ({_line(error)}); allowed: a whole file") from error


def _array_record_rows(path: Path, split: str) -> Iterator[Row]:
    files = sorted(path.glob(f"*-{split}.array_record-*")) if path.is_dir() else [path]
    if not files:
        raise BadFile(
            f"holds no split {split!r}; allowed: the folder of a TFDS set that has it, stored as array_record"
        )
    number = 0
    try:
        described = (files[0].parent / "features.json").is_file()
        features: Any = tfds.features.FeatureConnector.from_config(str(files[0].parent)) if described else None
        source: Any = grain.sources.ArrayRecordDataSource([str(file) for file in files])
        for number in range(1, len(source) + 1):
            record: bytes = source[number - 1]
            if len(record) > ROW_BYTES:
                yield _too_large(number)
            elif features is None:
                yield _parsed(number, record)
            else:
                found = features.deserialize_example_np(record)
                yield Row(number, {name: _plain(value) for name, value in found.items()})
    except Exception as error:  # whatever the reader says of a file that is none
        raise BadFile(f"record {number or 1} cannot be read ({_line(error)}); allowed: a whole file") from error


def _plain(value: Any) -> Any:
    """What TFDS makes of a feature, as JSON would have it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | np.ndarray | np.generic):
        plain = value if isinstance(value, list) else value.tolist()
        return [_plain(one) for one in plain] if isinstance(plain, list) else _plain(plain)
    return value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

"""A folder of files by its address: local, or anything that fsspec opens (gs://, s3://, memory://, ...)."""

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec

from jaxrl_sat.types import InputError, reading


class Folder:
    """Files of one folder, read by ranges and written beside their place. Every error names the file's address."""

    def __init__(self, address: str | Path):
        """Raises InputError for an address that fsspec does not open, or whose package is not installed."""
        self.address = str(address).rstrip("/") or "/"
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.address)
            self._files.invalidate_cache(self._root)  # what an earlier look at this address listed
        except Exception as error:  # each file system raises what its own package raises
            raise InputError(f"{self.address} cannot be opened ({_line(error)}); give a folder's address") from error

    def __str__(self) -> str:
        return self.address

    def of(self, name: str) -> str:
        """The address of a file, for messages."""
        return posixpath.join(self.address, name)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def exists(self) -> bool:
        """Whether there is such a folder: one that can be listed, or one with a config.json."""
        with reading(self.address):
            return self._files.isdir(self._root) or self._files.isfile(self._path("config.json"))

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name."""
        with reading(self.of(name)):
            return self._files.isfile(self._path(name))

    def has_folder(self, name: str) -> bool:
        """Whether the folder has a folder of this name."""
        with reading(self.of(name)):
            return self._files.isdir(self._path(name))

    def names(self) -> list[str]:
        """Names of the files in the folder."""
        with reading(self.address):
            found = self._files.ls(self._root, detail=True, refresh=True)
        return sorted(posixpath.basename(entry["name"]) for entry in found if entry["type"] == "file")

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with reading(self.of(name)):
            return int(self._files.size(self._path(name)))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes start..stop-1 of a file (None: to its end), and no others. Raises InputError where they are not."""
        with reading(self.of(name)):
            found = self._files.cat_file(self._path(name), start=start, end=stop)
        if stop is not None and len(found) != stop - start:
            raise InputError(f"{self.of(name)}: bytes {start} to {stop} are needed, {len(found)} of them were found")
        return found

    def read_json(self, name: str) -> dict[str, Any]:
        """A file that holds a JSON object. Raises InputError where there is none."""
        if not self.has(name):
            raise InputError(f"{self.of(name)} does not exist; a model folder needs it")
        try:
            fields = json.loads(self.read(name).decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.of(name)} is not JSON: {_line(error)}") from None
        if not isinstance(fields, dict):
            raise InputError(f"{self.of(name)} holds {type(fields).__name__}; it must be a JSON object")
        return fields

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """A file to write from its start. Raises InputError where it cannot be."""
        with self._changing(name):
            self._files.makedirs(self._root, exist_ok=True)
            with self._files.open(self._path(name), "wb") as file:
                yield file

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, over one that has it."""
        with self._changing(new):
            self._files.mv(self._path(old), self._path(new))

    def remove(self, name: str) -> None:
        """Remove a file."""
        with self._changing(name):
            self._files.rm_file(self._path(name))

    @contextlib.contextmanager
    def _changing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.of(name)} cannot be written ({_line(error)}); give a folder that can") from error


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

"""TFDS builders of the arithmetic set and of sets from files, and their preparation on disk, without TensorFlow."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from jaxrl_sat.data import arithmetic
from jaxrl_sat.paths import cache_dir
from jaxrl_sat.types import InputError

SEED = 0
FIELDS = ("prompt", "answer", "source", "id")
"""Features of a prepared set."""


class Arithmetic(tfds.core.GeneratorBasedBuilder):
    """Arithmetic problems without words: `prompt` and `answer` as text, `level` 1 to 5."""

    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded, and looking for checksums beside the module needs a package that TFDS does not require.
    url_infos = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"prompt": tfds.features.Text(), "answer": tfds.features.Text(), "level": np.int32}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager
        return {split: self._generate_examples(split, size) for split, size in arithmetic.SIZES.items()}

    def _generate_examples(self, split: str, size: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, problem in enumerate(arithmetic.problems(split, size, SEED)):
            yield key, {"prompt": problem.prompt, "answer": problem.answer, "level": problem.level}


def default_data_dir() -> Path:
    """`$XDG_CACHE_HOME/jaxrl_sat/data`, or the same under `~/.cache`."""
    return cache_dir() / "data"


def prepare(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Build the arithmetic set under `data_dir` unless it is there; returns its folder, `DATA_DIR/arithmetic/VERSION`.

    The set is built beside its place and renamed into it, so a reader sees all of it or nothing, and of several
    processes that do this at once the first wins. Raises InputError where the folder cannot be written.
    """
    root = Path(data_dir) if data_dir is not None else default_data_dir()
    final = root / arithmetic.NAME / str(Arithmetic.VERSION)
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        building = tempfile.mkdtemp(prefix=".building-", dir=final.parent)
    except OSError as error:
        raise InputError(
            f"data set folder {final.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME to one that can"
        ) from error
    try:
        built = _built(Arithmetic(data_dir=building, file_format="array_record"))
        try:
            os.rename(built, final)
        except OSError:
            if not final.is_dir():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final


class Prepared(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Problems from files, in their order: `prompt`, `answer`, `source` and `id` as text."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(
        self,
        name: str,
        splits: Mapping[str, Callable[[], Iterable[dict[str, str]]]],
        weights: Mapping[str, float],
        data_dir: Path,
    ):
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]
        self._splits, self._weights = splits, weights
        super().__init__(data_dir=str(data_dir), file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({name: tfds.features.Text() for name in FIELDS}),
            metadata=tfds.core.MetadataDict(weights=dict(self._weights)),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        del dl_manager
        return {split: self._generate_examples(records) for split, records in self._splits.items()}

    def _generate_examples(
        self, records: Callable[[], Iterable[dict[str, str]]]
    ) -> Iterator[tuple[int, dict[str, str]]]:
        yield from enumerate(records())


def write_prepared(
    name: str,
    splits: Mapping[str, Callable[[], Iterable[dict[str, str]]]],
    weights: Mapping[str, float],
    data_dir: Path,
) -> Path:
    """Write a set of records with `FIELDS` under `data_dir`; returns its folder. `weights`: of sources, by name.

    Raises `InputError` where it cannot be written, on a full disk say.
    """
    try:
        return _built(Prepared(name, splits, weights, data_dir))
    except Exception as error:  # of TFDS and of the writer below it
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{data_dir}: {name} cannot be written ({reason}); allowed: a folder with room") from error


def _built(builder: tfds.core.DatasetBuilder) -> Path:
    tfds.disable_progress_bar()
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        builder.download_and_prepare()
    return Path(builder.data_dir)

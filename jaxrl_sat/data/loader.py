"""Prompts by update number: Grain over a TFDS array_record set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds

from jaxrl_sat.data.builder import prepare
from jaxrl_sat.data.catalogue import read_data_set
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.types import InputError, Prompt, reading


def _open(path: str, split: str, key: str) -> tuple[Any, Path]:
    """The random-access source of one split, and the folder it lies in."""
    folder = read_data_set(path, key).folder or prepare()
    try:
        builder: Any = tfds.builder_from_directory(folder)
    except Exception as error:
        raise InputError(f"{key} {path} is not a readable TFDS data set: {' '.join(str(error).split())}") from error
    fields = set(builder.info.features or ())
    if missing := {"prompt", "answer"} - fields:
        raise InputError(f"{key} {path} has no feature {sorted(missing)[0]!r}, only {', '.join(sorted(fields))}")
    if split not in builder.info.splits:
        raise InputError(f"{key} {path} has no split {split!r}, only {', '.join(sorted(builder.info.splits))}")
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise InputError(f"{key} {path} is stored as {builder.info.file_format.value}; it must be array_record")
    with reading(f"{key} {path}"):
        return builder.as_data_source(split=split), folder


def _text(value: Any) -> str:
    """TFDS without TensorFlow returns text as bytes."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


class PromptLoader:
    """The prompts of one split in an order that depends on the seed alone.

    Update u takes the u-th block of `prompts_per_update` problems of an endless sequence, reshuffled each epoch;
    process p of n takes every n-th of the block from p. So nothing but the update number is needed to go on after a
    stop.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str,
        tokenizer: Tokenizer,
        seed: int,
        prompts_per_update: int,
        max_prompt_tokens: int,
        process_index: int = 0,
        process_count: int = 1,
        key: str = "data.path",
    ):
        """Open the set; "arithmetic" builds the embedded one first if need be. `key` is what gave the path.

        Raises InputError for a set that cannot be used, for blocks that do not divide among the processes, and for any
        prompt of the split over `max_prompt_tokens`: now, not in the middle of the run.
        """
        if prompts_per_update < 1 or prompts_per_update % process_count:
            raise InputError(
                f"data.prompts_per_update {prompts_per_update} must be a positive multiple of the number "
                f"of processes, {process_count}"
            )
        if not 0 <= process_index < process_count:
            raise InputError(f"process {process_index} is outside 0..{process_count - 1}")
        self._tokenizer = tokenizer
        self._limit = max_prompt_tokens
        self._source, self.folder = _open(os.fspath(path), split, key)
        self._per_process = prompts_per_update // process_count
        if not len(self._source):
            raise InputError(f"{key} {path}: split {split!r} is empty")
        with reading(f"{key} {path}"):
            self._check_lengths()
        order = grain.MapDataset.range(len(self._source)).seed(seed).shuffle().repeat()
        self._mine: Any = order[process_index::process_count]

    def __len__(self) -> int:
        """Problems in the split, over all processes."""
        return len(self._source)

    def batch(self, update: int) -> list[Prompt]:
        """This process's prompts of one update (from 0). Any update can be asked for at any time."""
        first = update * self._per_process
        return self._prompts([int(self._mine[first + i]) for i in range(self._per_process)])

    def eval_prompts(self, limit: int) -> list[Prompt]:
        """The first `limit` prompts of the split in stored order, the same for every seed and process."""
        return self._prompts(list(range(min(limit, len(self)))))

    def _prompts(self, ids: list[int]) -> list[Prompt]:
        return [self._prompt(i, record) for i, record in zip(ids, self._source.__getitems__(ids), strict=True)]

    def _render(self, record: Mapping[str, Any]) -> str:
        return self._tokenizer.render([{"role": "user", "content": _text(record["prompt"])}])

    def _prompt(self, index: int, record: Mapping[str, Any]) -> Prompt:
        text = self._render(record)
        tokens = self._tokenizer.encode(text)
        if not tokens:
            raise InputError(f"prompt {index} of {self.folder} is empty; allowed: 1 to {self._limit} tokens")
        if len(tokens) > self._limit:
            raise InputError(
                f"prompt {index} of {self.folder} has {len(tokens)} tokens; data.max_prompt_tokens allows {self._limit}"
            )
        return Prompt(index, text, _text(record["answer"]), np.asarray(tokens, np.int32))

    def _check_lengths(self, chunk: int = 4096) -> None:
        """Go through the split once. A token has at least one byte, so a text of few bytes need not be encoded."""
        for start in range(0, len(self), chunk):
            ids = list(range(start, min(start + chunk, len(self))))
            for index, record in zip(ids, self._source.__getitems__(ids), strict=True):
                rendered = self._render(record)
                if not rendered or len(rendered.encode("utf-8")) > self._limit:
                    self._prompt(index, record)

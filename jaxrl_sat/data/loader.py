"""Prompts by update number: Grain over a TFDS array_record set."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds
from absl import flags
from jaxtyping import Int

from jaxrl_sat.data import mixture
from jaxrl_sat.data.builder import prepare
from jaxrl_sat.data.catalogue import read_data_set
from jaxrl_sat.data.tokenizer import Template, Tokenizer
from jaxrl_sat.types import InputError, Prompt, reading


def _open(path: str, split: str, key: str) -> tuple[Any, Path]:
    """The TFDS builder of a set that has this split, and the folder it lies in."""
    folder = read_data_set(path, key).folder or prepare()
    try:
        builder: Any = tfds.builder_from_directory(folder)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{key}: {path} cannot be read ({reason}); allowed: a TFDS data set") from error
    fields = set(builder.info.features or ())
    if missing := {"prompt", "answer"} - fields:
        found = ", ".join(sorted(fields))
        raise InputError(f"{key}: {path} has no feature {sorted(missing)[0]!r}, only {found}; allowed: one with both")
    for name in ("prompt", "answer"):
        if getattr(builder.info.features[name], "shape", None) != ():
            kind = type(builder.info.features[name]).__name__
            raise InputError(f"{key}: feature {name!r} of {path} is a {kind}; allowed: one text or number a problem")
    if split not in builder.info.splits:
        raise InputError(f"{key}: {path} has no split {split!r}; allowed: {', '.join(sorted(builder.info.splits))}")
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        stored = builder.info.file_format.value
        raise InputError(f"{key}: {path} is stored as {stored}; allowed: array_record")
    return builder, folder


def _text(value: Any) -> str:
    """TFDS without TensorFlow returns text as bytes."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


class _Reader:
    """The prompts of one split by index. Travels to Grain's workers, which open the split for themselves."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, limit: int, template: Template):
        self.folder, self._split, self._tokenizer, self._limit = folder, split, tokenizer, limit
        self._template: Template = template

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "source"}

    @functools.cached_property
    def source(self) -> Any:
        builder: Any = tfds.builder_from_directory(self.folder)
        return builder.as_data_source(split=self._split)

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at `indices`. Raises `InputError` for one of more tokens than allowed, or of none."""
        ids = [int(i) for i in indices]
        return [self._prompt(i, record) for i, record in zip(ids, self.source.__getitems__(ids), strict=True)]

    def _render(self, record: Mapping[str, Any]) -> str:
        return self._tokenizer.asked(_text(record["prompt"]), self._template)

    def _prompt(self, index: int, record: Mapping[str, Any]) -> Prompt:
        text = self._render(record)
        tokens = self._tokenizer.encode(text)
        if not tokens:
            raise InputError(f"prompt {index} of {self.folder} is empty; allowed: 1 to {self._limit} tokens")
        if len(tokens) > self._limit:
            raise InputError(
                f"prompt {index} of {self.folder} has {len(tokens)} tokens; data.max_prompt_tokens allows {self._limit}"
            )
        return Prompt(
            id=index,
            text=text,
            answer=_text(record["answer"]),
            tokens=np.asarray(tokens, np.int32),
            source=_text(record.get("source", "")),
            problem_id=_text(record.get("id", index)),
            record={
                name: value.decode("utf-8", "replace") if isinstance(value, bytes) else value
                for name, value in record.items()
            },
        )

    def by_source(self, chunk: int = 4096) -> dict[str, Int[np.ndarray, " _"]]:
        """The indices of each source's problems. Goes through the split once and raises where `prompts` would.

        A token has at least one byte, so a text of few bytes need not be encoded.
        """
        found: dict[str, list[int]] = {}
        for start in range(0, len(self.source), chunk):
            ids = list(range(start, min(start + chunk, len(self.source))))
            for index, record in zip(ids, self.source.__getitems__(ids), strict=True):
                rendered = self._render(record)
                _text(record["answer"])
                if not rendered or len(rendered.encode("utf-8")) > self._limit:
                    self._prompt(index, record)
                found.setdefault(_text(record.get("source", "")), []).append(index)
        return {name: np.asarray(ids) for name, ids in found.items()}


class PromptLoader:
    """The prompts of one split in an order that depends on the seed alone.

    Update u takes the u-th block of `prompts_per_update` problems of an endless sequence, reshuffled each epoch, with
    the sources in the shares of their weights (`jaxrl_sat.data.mixture`); process p of n takes every n-th of the block
    from p. So nothing but the update number is needed to go on after a stop. `workers` processes read ahead, spawned,
    from the first update that is asked for; the prompts are the same with any number of them.
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
        template: Template = "chat",
        workers: int = 0,
        balanced: bool = False,
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
        builder, self.folder = _open(os.fspath(path), split, key)
        self._reader = _Reader(self.folder, split, tokenizer, max_prompt_tokens, template)
        with reading(f"{key}: {path}"):
            if not len(self._reader.source):
                raise InputError(f"{key}: split {split!r} of {path} is empty; allowed: one with problems")
            sources = self._reader.by_source()
            weights = _weights(builder) if split == "train" else {}
            self.order: Any = mixture.order(sources, weights, seed, prompts_per_update, balanced)
        mine = self.order[process_index::process_count]
        self._indices: Any = mine.batch(prompts_per_update // process_count, batch_fn=list)
        self._workers = workers
        self._ahead: Any = None
        self._next = -1

    def __len__(self) -> int:
        """Problems in the split, over all processes."""
        return len(self._reader.source)

    def batch(self, update: int) -> list[Prompt]:
        """This process's prompts of one update (from 0). Any can be asked for at any time, by one thread at once."""
        if not self._workers:
            return self._reader.prompts(self._indices[update])
        if update != self._next:
            self.close()
            self._ahead = iter(self._reading_from(update))
        self._next = update + 1
        return next(self._ahead)

    def eval_prompts(self, limit: int) -> list[Prompt]:
        """The first `limit` prompts of the split in stored order, the same for every seed and process."""
        return self._reader.prompts(range(min(limit, len(self))))

    def close(self) -> None:
        """End the workers, if there are any; `batch` starts others."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._next = None, -1

    def _reading_from(self, update: int) -> Any:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain asks for flags of its own, which only a program of absl's has read
        wanted = self._indices[update:].map(self._reader.prompts)
        one_by_one = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        options = grain.MultiprocessingOptions(num_workers=self._workers, per_worker_buffer_size=2)
        return wanted.to_iter_dataset(one_by_one).mp_prefetch(options, worker_init_fn=_ignore_interrupts)


def _weights(builder: Any) -> dict[str, float]:
    """The shares of prompts by source that a prepared set was given, if any."""
    return dict((builder.info.metadata or {}).get("weights", {}))


def _ignore_interrupts(worker: int, workers: int) -> None:
    """Ctrl-C is for the run, which then ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

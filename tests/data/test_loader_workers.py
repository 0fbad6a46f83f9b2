"""The same batches whoever reads them: processes of Grain ahead of the run, one process or four, from any update on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxrl_sat.data.builder import write_prepared
from jaxrl_sat.data.loader import PromptLoader
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.types import Prompt

BLOCK = 8


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources with weights, of which neither is a multiple of a block."""
    records = [
        {"prompt": f"{i}+{i}", "answer": str(2 * i), "source": "ab"[i % 3 == 0], "id": f"{'ab'[i % 3 == 0]}/{i}"}
        for i in range(50)
    ]
    return write_prepared("mixed", {"train": lambda: records}, {"a": 1.0, "b": 1.0}, tmp_path_factory.mktemp("mixed"))


def loader(path: Path, tokenizer: Tokenizer, **changes: Any) -> PromptLoader:
    return PromptLoader(path, "train", tokenizer, 0, BLOCK, 16, **changes)


def content(prompts: list[Prompt]) -> list[Any]:
    return [(p.id, p.text, p.answer, p.source, p.problem_id, dict(p.record), p.tokens.tolist()) for p in prompts]


@pytest.mark.parametrize("balanced", [False, True])
def test_four_processes_share_the_batches_of_one(mixed: Path, tokenizer: Tokenizer, balanced: bool) -> None:
    whole = loader(mixed, tokenizer, balanced=balanced)
    shards = [loader(mixed, tokenizer, balanced=balanced, process_index=p, process_count=4) for p in range(4)]
    for update in (*range(8), 1000):
        parts = [content(shard.batch(update)) for shard in shards]
        assert [parts[i % 4][i // 4] for i in range(BLOCK)] == content(whole.batch(update))
    resumed = loader(mixed, tokenizer, balanced=balanced)
    assert content(resumed.batch(7)) == content(whole.batch(7))


def same_with_workers(path: Path, tokenizer: Tokenizer, updates: tuple[int, ...], **changes: Any) -> None:
    alone, ahead = loader(path, tokenizer, **changes), loader(path, tokenizer, workers=2, **changes)
    try:
        for update in updates:
            assert content(ahead.batch(update)) == content(alone.batch(update)), update
    finally:
        ahead.close()


def test_two_workers_resumed_read_what_none_does(mixed: Path, tokenizer: Tokenizer) -> None:
    same_with_workers(mixed, tokenizer, (9, 10, 11), balanced=True)


@pytest.mark.slow
@pytest.mark.parametrize("process", range(4))
def test_two_workers_of_each_of_four_processes(mixed: Path, tokenizer: Tokenizer, process: int) -> None:
    """Uninterrupted, resumed at a later update, and gone back to one before."""
    same_with_workers(mixed, tokenizer, (0, 1, 2, 3, 9, 10, 5), process_index=process, process_count=4)

"""The set on disk and the prompts of each update."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from jaxrl_sat.data import arithmetic
from jaxrl_sat.data.builder import default_data_dir, prepare
from jaxrl_sat.data.loader import PromptLoader
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.types import InputError, Prompt

SIZES = {"train": 1500, "test": 200}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "SIZES", SIZES)
        return prepare(tmp_path_factory.mktemp("data"))


def loader(path: Any, tokenizer: Tokenizer, **changes: Any) -> PromptLoader:
    given = {"split": "test", "seed": 0, "prompts_per_update": 8, "max_prompt_tokens": 16, **changes}
    return PromptLoader(path, tokenizer=tokenizer, **given)


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in prompts]


def test_stored_problems_are_the_generated_ones(prepared, tokenizer):
    test = loader(prepared, tokenizer)
    stored = {(p.text, p.answer) for p in test.eval_prompts(len(test))}
    made = {(f"<bos><user>{p.prompt}<assistant>", p.answer) for p in arithmetic.problems("test", SIZES["test"], 0)}
    assert stored == made


def test_splits_on_disk_share_no_operands(prepared, tokenizer):
    def operands(split: str) -> set[frozenset[str]]:
        source = loader(prepared, tokenizer, split=split)
        texts = (p.text for p in source.eval_prompts(len(source)))
        return {
            frozenset(t[len("<bos><user>") : -len("<assistant>")].replace("*", "+").replace("-", "+").split("+"))
            for t in texts
        }

    assert not operands("train") & operands("test")


def test_a_prompt_is_rendered_and_tokenised(prepared, tokenizer):
    prompt = loader(prepared, tokenizer).batch(0)[0]
    assert prompt.text.startswith("<bos><user>") and prompt.text.endswith("<assistant>")
    assert prompt.tokens.dtype == np.int32
    assert tokenizer.decode(list(prompt.tokens), skip_special_tokens=False) == prompt.text


def test_any_update_can_be_asked_for_at_any_time(prepared, tokenizer):
    first, second = loader(prepared, tokenizer), loader(prepared, tokenizer)
    whole = [ids(first.batch(update)) for update in range(6)]
    assert [ids(second.batch(update)) for update in (5, 3, 4)] == [whole[5], whole[3], whole[4]]
    assert whole != [ids(loader(prepared, tokenizer, seed=1).batch(update)) for update in range(6)]


def test_an_epoch_has_every_problem_once_and_the_next_another_order(prepared, tokenizer):
    source = loader(prepared, tokenizer, prompts_per_update=50)
    epochs = [sum((ids(source.batch(4 * epoch + i)) for i in range(4)), []) for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(200))
    assert epochs[0] != epochs[1]


def test_processes_share_a_block_without_overlap(prepared, tokenizer):
    whole = loader(prepared, tokenizer)
    shards = [loader(prepared, tokenizer, process_index=p, process_count=4) for p in range(4)]
    for update in (0, 7, 26):
        parts = [ids(shard.batch(update)) for shard in shards]
        assert all(len(part) == 2 for part in parts)
        assert [parts[i % 4][i // 4] for i in range(8)] == ids(whole.batch(update))


def test_a_prompt_may_be_read_as_it_stands(prepared, tokenizer):
    plain, chat = (loader(prepared, tokenizer, template=template).batch(3) for template in ("none", "chat"))
    assert [f"<bos><user>{p.text}<assistant>" for p in plain] == [p.text for p in chat]
    assert [p.text for p in plain] == [tokenizer.decode(p.tokens) for p in plain]


def test_evaluation_prompts_are_the_same_for_every_seed(prepared, tokenizer):
    assert ids(loader(prepared, tokenizer).eval_prompts(20)) == list(range(20))
    one, other = (loader(prepared, tokenizer, seed=seed).eval_prompts(20) for seed in (1, 2))
    assert [p.text for p in one] == [p.text for p in other]


def test_errors_name_key_value_and_what_is_allowed(prepared, tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"prompt \d+ of .* has \d+ tokens; data.max_prompt_tokens allows 8"):
        loader(prepared, tokenizer, max_prompt_tokens=8)
    with pytest.raises(InputError, match="data.path: .*nowhere' holds no data set"):
        loader(tmp_path / "nowhere", tokenizer)
    with pytest.raises(InputError, match="data.path: .* holds no data set; allowed"):
        loader(tmp_path, tokenizer)
    with pytest.raises(InputError, match="data.path: .* has no split 'dev'; allowed: test, train"):
        loader(prepared, tokenizer, split="dev")
    with pytest.raises(InputError, match="prompts_per_update 8 .* 3"):
        loader(prepared, tokenizer, process_count=3)
    with pytest.raises(InputError, match="process 2 is outside 0..1"):
        loader(prepared, tokenizer, process_index=2, process_count=2)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(InputError, match="dataset_info.json cannot be read .KeyError.; allowed: one that TFDS wrote"):
        loader(tmp_path, tokenizer)


class Renamed(tfds.core.GeneratorBasedBuilder):
    """A set of somebody else, with features under other names."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None  # pyright: ignore

    def _info(self):
        features = {"question": tfds.features.Text(), "answer": tfds.features.Text()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"question": "1+1", "answer": "2"}


def test_a_set_without_prompts_is_refused_by_the_feature_it_lacks(tokenizer, tmp_path):
    Renamed(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    with pytest.raises(InputError, match="no feature 'prompt', only answer, question"):
        loader(tmp_path / "renamed", tokenizer, split="train")


class Listed(Renamed):
    """A set of somebody else, with several answers a problem."""

    def _info(self):
        features = {"prompt": tfds.features.Text(), "answer": tfds.features.Sequence(tfds.features.Text())}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _generate_examples(self):
        yield 0, {"prompt": "1+1", "answer": ["2", "two"]}


class Torn(Listed):
    """A set of somebody else, with an answer that is not text."""

    def _info(self):
        features = {"prompt": tfds.features.Text(), "answer": tfds.features.Text()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _generate_examples(self):
        yield 0, {"prompt": "1+1", "answer": b"\xff"}


@pytest.mark.parametrize(
    ("builder", "said"),
    [(Listed, "feature 'answer' of .* is a Sequence; allowed: one text or number"), (Torn, "UnicodeDecodeError")],
)
def test_answers_that_are_none_are_refused_before_the_run(tokenizer, tmp_path, builder, said):
    built = builder(data_dir=tmp_path, file_format="array_record")
    built.download_and_prepare()
    with pytest.raises(InputError, match=f"data.path: .*{said}"):
        loader(built.data_dir, tokenizer, split="train")


def test_the_default_place_is_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "jaxrl_sat" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".cache" / "jaxrl_sat" / "data"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/arithmetic cannot be written .*XDG_CACHE_HOME"):
        prepare(tmp_path / "file")


def test_a_failed_build_leaves_nothing(monkeypatch, tmp_path):
    def fail(split: str, size: int, seed: int):
        yield next(iter(arithmetic.split_space(split)))
        raise RuntimeError("disk full")

    monkeypatch.setattr(arithmetic, "problems", fail)
    with pytest.raises(RuntimeError):
        prepare(tmp_path)
    assert list((tmp_path / "arithmetic").iterdir()) == []


PREPARE = """
import sys
from jaxrl_sat.data import arithmetic, builder
arithmetic.SIZES = {"train": 1500, "test": 200}
print(builder.prepare(sys.argv[1]))
"""
LOAD = """
import sys
from jaxrl_sat.data.loader import PromptLoader
from jaxrl_sat.data.tokenizer import Tokenizer
loader = PromptLoader("arithmetic", "test", Tokenizer.load(sys.argv[1]), 0, 8, 16)
print(len(loader.batch(0)), "tensorflow" in sys.modules)
"""


@pytest.mark.slow
def test_two_processes_prepare_at_once(tmp_path):
    command = [sys.executable, "-c", PREPARE, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said == [str(tmp_path / "arithmetic" / "1.0.0")] * 2
    assert [entry.name for entry in (tmp_path / "arithmetic").iterdir()] == ["1.0.0"]


def test_tensorflow_is_never_imported(prepared, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jaxrl_sat").mkdir()
    (tmp_path / "jaxrl_sat" / "data").symlink_to(prepared.parent.parent)
    done = subprocess.run([sys.executable, "-c", LOAD, str(tokenizer.folder)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["8", "False"]), done.stderr

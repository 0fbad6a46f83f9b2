"""Files to a prepared set: what stays, what goes and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_sat.data.characters import write_tokenizer
from jaxrl_sat.data.loader import PromptLoader
from jaxrl_sat.data.prepare import Options, Source, prepare, read_examples
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.types import InputError


def lines(file: Path, *given: dict[str, Any]) -> Path:
    file.write_text("".join(f"{json.dumps(one)}\n" for one in given))
    return file


def plain(prompt: str, answer: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, **more}


def built(sources: list[Source], folder: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    folder.mkdir()
    return prepare("mine", sources, Options(**options), folder)


def of(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(source for source in report["sources"] if source["name"] == name)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer")
    return Tokenizer.load(tmp_path / "tokenizer")


def test_sources_are_joined_and_the_first_copy_stays(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one = lines(tmp_path / "one.jsonl", plain("1 + 1?", "2", id="x"), plain("2+2", "4"), plain("9*9", "81"))
    two = lines(
        tmp_path / "two.jsonl",
        {"question": "$1+1$", "answer": "#### 2"},
        {"question": "2*3", "answer": "It is 6.\n#### 6"},
    )
    test = lines(tmp_path / "test.jsonl", plain("9 * 9", "81", id="x"))
    sources = [Source(one, "one", weight=3.0), Source(two, "two", weight=1.0), Source(test, "held", split="test")]
    folder, report = built(sources, tmp_path / "out")
    assert [of(report, name)["kept"] for name in ("one", "two", "held")] == [2, 1, 1]
    assert [of(report, name)["read"] for name in ("one", "two", "held")] == [3, 2, 1]
    assert of(report, "one")["dropped"] == {"in the test split": 1}
    assert of(report, "two")["dropped"] == {"duplicate": 1}
    assert of(report, "two")["examples"] == {"duplicate": [f"{two}:1: of {one}:1"]}
    assert report["splits"] == {"test": {"problems": 1, "tokens": None}, "train": {"problems": 3, "tokens": None}}
    assert json.loads((folder / "report.json").read_text()) == report

    loader = PromptLoader(folder, "train", tokenizer, 0, 4, 64, template="none", balanced=True)
    stored = [(p.text, p.answer, p.source, p.problem_id) for p in loader.eval_prompts(9)]
    assert stored == [("1 + 1?", "2", "one", "one/x"), ("2+2", "4", "one", "one/2"), ("2*3", "6", "two", "two/2")]
    assert [sorted(p.source for p in loader.batch(u)) for u in range(3)] == [["one", "one", "one", "two"]] * 3
    held = PromptLoader(folder, "test", tokenizer, 0, 1, 64, template="none").eval_prompts(9)
    assert [(p.text, p.record) for p in held] == [
        ("9 * 9", {"prompt": "9 * 9", "answer": "81", "source": "held", "id": "held/x"})
    ]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", *(plain(f"{i}+{i}", str(2 * i)) for i in range(200)))
    both = [built([Source(file, "a")], tmp_path / name) for name in ("first", "second")]
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder, _ in both]
    assert contents[0] == contents[1]
    assert both[0][1]["sha256"] == both[1][1]["sha256"]
    lines(file, *(plain(f"{i}+{i}", str(2 * i + (i == 7))) for i in range(200)))
    assert built([Source(file, "a")], tmp_path / "third")[1]["sha256"] != both[0][1]["sha256"]


def test_a_prepared_set_is_a_source(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", plain("1+1", "2"), plain("2+2", "4"))
    folder, _ = built([Source(first, "a")], tmp_path / "first")
    [stored] = folder.glob("*.array_record*")
    for name, source in (("folder", folder), ("file", stored)):
        _, report = built([Source(source, "b")], tmp_path / name)
        assert of(report, "b")["kept"] == 2
    assert [(e.prompt, e.answer, e.id) for e in read_examples(folder)] == [("1+1", "2", "a/1"), ("2+2", "4", "a/2")]


def test_answers_of_copies_are_compared_by_the_verifier(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl",
        plain("half", "1/2"),
        plain("third", "1/3"),
        plain("half", "\\frac12"),
        plain("third", "3"),
        plain("last", "5"),
    )
    conflict = "copies with other answers"
    dropped = of(built([Source(file, "a")], tmp_path / "drop")[1], "a")
    assert (dropped["kept"], dropped["dropped"]) == (2, {"duplicate": 2, conflict: 1})
    assert dropped["examples"][conflict] == [f"{file}:2: '1/3', but '3' at {file}:4"]
    kept = of(built([Source(file, "a")], tmp_path / "keep", keep_conflicts=True)[1], "a")
    assert (kept["kept"], kept["dropped"], kept["noted"]) == (3, {"duplicate": 2}, {conflict: 1})


def test_rows_that_cannot_be_used_are_counted_and_named_or_refused(tmp_path: Path) -> None:
    unreadable = "\\begin{cases} x"
    file = lines(
        tmp_path / "a.jsonl",
        {"prompt": "no column of an answer"},
        plain("a", None, id="1"),
        plain("b", "5", id="1"),
        plain("c", "6", id="1"),
        plain("d", unreadable, id="2"),
        plain("e", "7" * 20_001, id="3"),
    )
    reasons = {
        "no prompt or no answer": [f"{file}:1"],
        "no answer": [f"{file}:2"],
        "duplicate id": [f"{file}:4: 1"],
        "answer over 20000 characters": [f"{file}:6"],
        "answer that the verifier cannot read": [f"{file}:5: {unreadable}"],
    }
    found = of(built([Source(file, "a")], tmp_path / "skip")[1], "a")
    assert (found["read"], found["kept"]) == (6, 1)
    assert found["dropped"] == dict.fromkeys(reasons, 1) and found["examples"] == reasons
    kept = of(built([Source(file, "a")], tmp_path / "keep", keep_unreadable=True)[1], "a")
    assert kept["kept"] == 2 and kept["noted"] == {"answer that the verifier cannot read": 1}
    with pytest.raises(InputError, match=r"a.jsonl:1: no prompt or no answer; allowed: .*--on-bad-row=skip"):
        built([Source(file, "a")], tmp_path / "refuse", on_bad_row="refuse", on_bad_file="skip")
    lines(file, plain("b", "5", id="1"), plain("c", "6", id="1"))
    with pytest.raises(InputError, match=r"a.jsonl:2: duplicate id '1'; allowed"):
        built([Source(file, "a")], tmp_path / "again", on_bad_row="refuse")
    lines(file, plain("b", unreadable))
    with pytest.raises(InputError, match=r"a.jsonl:1: answer that the verifier cannot read '.*'; allowed"):
        built([Source(file, "a")], tmp_path / "third", on_bad_row="refuse")


def test_problems_without_ids_of_several_files_are_told_apart(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", plain("1+1", "2"), plain("2+2", "4"))
    two = lines(tmp_path / "two.jsonl", plain("3+3", "6"), plain("1 + 1", "2"), plain("4+4", "8"))
    folder, report = built([Source(one, "a"), Source(two, "a")], tmp_path / "out")
    assert (of(report, "a")["kept"], of(report, "a")["dropped"]) == (4, {"duplicate": 1})
    assert [e.id for e in read_examples(folder)] == ["a/1", "a/2", "a/2:1", "a/2:3"]


def test_files_that_cannot_be_used_are_refused_or_skipped(tmp_path: Path) -> None:
    good = Source(lines(tmp_path / "good.jsonl", plain("a", "5")), "good")
    contents = {
        "text.jsonl": ("{'prompt': 'python', 'answer': '5'}\n" * 3, "not JSON"),
        "other.jsonl": ('{"text": "t", "label": 1}\n' * 3, "has the columns text, label; allowed: prompt and"),
        "empty.jsonl": ("", "is empty; allowed"),
        "none.json": ("[]", "holds no rows"),
        "cut.json": ('[{"prompt": "b", "answer": "6"}, {"pro', "ends in the middle of element 2"),
    }
    for name, (content, said) in contents.items():
        (tmp_path / name).write_text(content)
        bad = Source(tmp_path / name, "bad")
        with pytest.raises(InputError, match=rf"{name}: .*{said}"):
            built([good, bad], tmp_path / f"refused {name}")
        with pytest.raises(InputError, match=rf"{name}.*{said}"):
            list(read_examples(tmp_path / name))
        report = built([good, bad], tmp_path / f"skipped {name}", on_bad_file="skip")[1]
        assert of(report, "bad")["dropped"] == {"file that cannot be used": 1}
        assert said.split(";")[0] in of(report, "bad")["examples"]["file that cannot be used"][0]
        assert report["splits"]["train"]["problems"] == (2 if name == "cut.json" else 1)


def test_the_columns_of_parquet_are_named_too(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "t", "prompt": "p"}]), file)
    with pytest.raises(InputError, match="a.parquet: has the columns text, prompt; allowed"):
        list(read_examples(file))


def test_a_split_with_nothing_left_is_refused_with_the_reasons(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", plain("a", None), plain("b", None), plain("c", True))
    with pytest.raises(
        InputError, match=r"split 'train' has no problem left \(2 dropped: no answer, 1 dropped: answer"
    ):
        built([Source(file, "a")], tmp_path / "out")


def test_prompts_over_the_limit_are_dropped_with_their_instruction_counted(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", plain("1+1", "2"), plain("1+1+1", "3"), plain("1+1+1+1", "4"))
    folder, report = built([Source(file, "a")], tmp_path / "out", instruction="!!", count_tokens=len, max_tokens=9)
    assert of(report, "a")["dropped"] == {"over 9 tokens": 1}
    assert of(report, "a")["examples"] == {"over 9 tokens": [f"{file}:3: 11 tokens"]}
    tokens = {"least": 7, "median": 9, "90%": 9, "99%": 9, "most": 9}
    assert report["splits"] == {"train": {"problems": 2, "tokens": tokens}}
    assert [e.prompt for e in read_examples(folder)] == ["1+1\n\n!!", "1+1+1\n\n!!"]

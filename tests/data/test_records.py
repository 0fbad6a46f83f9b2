"""Rows of files, whatever they hold."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter

from jaxrl_sat.data import records
from jaxrl_sat.data.records import BadFile, Row, rows

FIELDS = [{"prompt": f'{i} \\\\ " [ {{ , é\u2028\n', "answer": [i, {"deep": [[]]}]} for i in range(9)]


def found(file: Path) -> list[Any]:
    return [row.fields if row.fields is not None else row.problem for row in rows(file)]


def lines(file: Path, *given: str | dict[str, Any]) -> Path:
    file.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in given))
    return file


def test_all_kinds_of_file_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(FIELDS, indent=1))
    (tmp_path / "b.json").write_text(json.dumps(FIELDS, ensure_ascii=False, separators=(",", ":")))
    writer = ArrayRecordWriter(str(tmp_path / "e.array_record"), "group_size:1")
    for fields in FIELDS:
        writer.write(json.dumps(fields).encode())
    writer.close()
    lines(tmp_path / "c.jsonl", *FIELDS)
    lines(tmp_path / "d.json", *FIELDS)
    for file in sorted(tmp_path.iterdir()):
        assert found(file) == FIELDS, file
    flat = [{"prompt": fields["prompt"], "n": i} for i, fields in enumerate(FIELDS)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), tmp_path / "f.parquet", row_group_size=4)
    assert found(tmp_path / "f.parquet") == flat
    assert [row.fields for row in rows(tmp_path / "f.parquet", columns=["n", "other"])] == [
        {"n": i, "prompt": None} for i in range(9)
    ]
    assert [row.number for row in rows(tmp_path / "f.parquet")] == list(range(1, 10))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_an_array_is_cut_at_the_same_places_wherever_it_is_read_from(tmp_path: Path, monkeypatch, chunk: int) -> None:
    monkeypatch.setattr(records, "CHUNK", chunk)
    rng = random.Random(chunk)
    texts = ["".join(rng.choices('a\\"[]{},: \n', k=12)) for _ in range(40)]
    wanted = [{"prompt": text, "answer": [text, {text: 1.5}]} for text in texts]
    (tmp_path / "a.json").write_text(f" {json.dumps(wanted)} \n")
    assert found(tmp_path / "a.json") == wanted
    (tmp_path / "a.json").write_text(" [ ] ")
    assert found(tmp_path / "a.json") == []
    (tmp_path / "a.json").write_text("[{}, , 5]")
    assert found(tmp_path / "a.json") == [{}, "not JSON", "not a JSON object"]


def test_rows_without_fields_are_numbered_with_what_is_wrong(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(records, "ROW_BYTES", 2**20)
    long = json.dumps({"answer": "x" * 3 * 2**20})
    file = lines(tmp_path / "a.jsonl", {"n": 1}, "{", "[1]", "", long, '{"a": "\xff"}', "[" * 5000, {"n": 2})
    large = "row over 1 MiB"
    assert list(rows(file)) == [
        Row(1, {"n": 1}),
        Row(2, None, "not JSON"),
        Row(3, None, "not a JSON object"),
        Row(5, None, large),
        Row(6, {"a": "\xff"}),
        Row(7, None, "not JSON"),
        Row(8, {"n": 2}),
    ]
    (tmp_path / "b.json").write_text(f"[{long}, 5, {{}}, {long}]")
    assert found(tmp_path / "b.json") == [large, "not a JSON object", {}, large]
    table = pyarrow.Table.from_pylist([{"n": "1"}, {"n": "x" * 3 * 2**20}, {"n": "2"}])
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    assert found(tmp_path / "c.parquet") == [{"n": "1"}, large, {"n": "2"}]


def test_files_that_are_not_what_their_names_say(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"n": "1" * 4000}] * 50)
    pyarrow.parquet.write_table(table, tmp_path / "good.parquet", compression="none")
    good = (tmp_path / "good.parquet").read_bytes()
    contents = {
        "a.jsonl": (good, "holds Parquet; its name says JSON lines"),
        "b.jsonl": (b"[{}]", "holds a JSON array; its name says JSON lines"),
        "c.parquet": (b'{"n": 1}\n', "holds JSON lines; its name says Parquet"),
        "d.json": (good, "holds Parquet; its name says JSON lines or a JSON array"),
        "e.json": (b"", "is empty; allowed: JSON lines"),
        "f.json": (b"  \n", "is empty; allowed"),
        "g.txt": (b"prompt,answer\n", "begins with b'prompt,answer"),
        "h.parquet": (good[:-100], "row 1 cannot be read .*magic bytes"),
        "i.json": (b'[{"n": 1}, {"n": ', "ends in the middle of element 2 of its array"),
        "j.json": (b'[{"n": "\\', "ends in the middle of element 1"),
        "k.json": (b"[{}] [{}]", "goes on behind its array of 1"),
        "m.parquet": (good.replace(b"1" * 40, b"\xff" * 40), "row 1 cannot be read"),
        "l.array_record": (b"not one", "record 1 cannot be read"),
        "n.jsonl": ('{"n": 1}\n{"n": 2}\n'.encode("utf-16-le"), r"begins with b'\{\\x00.*in UTF-8"),
        "o.json": ('[{"n": 1}]'.encode("utf-16"), r"begins with b'\\xff\\xfe.*in UTF-8"),
    }
    for name, (content, said) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadFile, match=said):
            list(rows(tmp_path / name))
    with pytest.raises(BadFile, match="cannot be read .No such file"):
        list(rows(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BadFile, match="holds no split 'dev'"):
        list(rows(tmp_path, "dev"))
    with pytest.raises(BadFile, match="cannot be read .File name too long"):
        list(rows(tmp_path / f"{'n' * 300}.jsonl"))


def test_a_pipe_is_refused_before_anything_is_read_from_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="is not a regular file; allowed"):
        list(rows(tmp_path / "pipe"))


class Numbered(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A set of somebody else, whose features are not all text."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None  # pyright: ignore

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "answer": np.int64,
            "prompt": tfds.features.Text(),
            "tags": tfds.features.Sequence(tfds.features.Text()),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> Any:
        return {"train": iter([(0, {"answer": 7, "prompt": "3+4", "tags": ["a", "b"]})])}

    def _generate_examples(self) -> Any:
        raise NotImplementedError


def test_features_of_a_set_are_what_json_would_have(tmp_path: Path) -> None:
    builder = Numbered(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    assert found(Path(builder.data_dir)) == [{"answer": 7, "prompt": "3+4", "tags": ["a", "b"]}]
    assert type(found(Path(builder.data_dir))[0]["answer"]) is int


MEMORY = """
import resource, sys
from pathlib import Path
from jaxrl_sat.data import records
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
for file in sys.argv[1:]:
    problems = [row.problem for row in records.rows(Path(file))]
    print(problems, peak() - before < 24 * 1024)
"""


def test_an_answer_of_100_megabytes_takes_no_memory(tmp_path: Path) -> None:
    piece = b"\\\\frac{1}{2}" * 10_000
    for name, before, after in (("a.jsonl", b"", b"\n"), ("b.json", b"[", b"]")):
        with (tmp_path / name).open("wb") as file:
            file.write(before + b'{"prompt": "p", "answer": "')
            for _ in range(100 * 10**6 // len(piece)):
                file.write(piece)
            file.write(b'"}' + after)
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.json")]
    done = subprocess.run([sys.executable, "-c", MEMORY, *files], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['row over 4 MiB'] True"] * 2, done.stderr

"""Headers of safetensors: whatever is wrong with a file is said in one line before a tensor is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_sat.model import load_hf
from jaxrl_sat.model.folder import Folder
from jaxrl_sat.model.tensor_files import INDEX, SINGLE, Checkpoint, header_bytes, read_header
from jaxrl_sat.types import InputError
from tests.model.helpers import FIXTURES

NORM = "model.norm.weight"


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """The file with its header changed in place."""

    def edit(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        return joined(json.dumps(change(header) or header).encode(), content[8 + length :])

    return edit


def entry(name: str = NORM, **fields: Any) -> Callable[[bytes], bytes]:
    return edited(lambda header: header[name].update(fields))


def shifted(header: dict[str, Any]) -> None:
    header[NORM]["data_offsets"] = [at - 8 for at in header[NORM]["data_offsets"]]


def twice(content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].decode()
    again = json.dumps({NORM: json.loads(header)[NORM]})[1:-1]
    return joined(header.replace("{", "{" + again + ",", 1).encode(), content[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "0 bytes; the header's length alone takes 8"),
        (lambda content: content[:7], "7 bytes; the header's length alone takes 8"),
        (lambda content: content[:100], r"its header should take \d+ bytes; the file has 92 behind the length"),
        (lambda content: b"\xff" * 8 + content[8:], r"should take 18446744073709551615 bytes"),
        (lambda content: content[:-5], r"has \d+ bytes; its header calls for \d+: it is cut short"),
        (lambda content: content + b"\0", "it has bytes that belong to no tensor"),
        (lambda content: content[:8] + b"#" + content[9:], "its header is not JSON"),
        (lambda content: content[:8] + b"\xff" + content[9:], "its header is not JSON"),
        (edited(lambda header: [1]), "its header must be a JSON object"),
        (twice, "a name stands in it twice"),
        (edited(shifted), "must lie one behind the other"),
        (entry(data_offsets=[0]), f"the header's entry of tensor '{NORM}' cannot be used"),
        (
            entry(data_offsets=[8, 0]),
            rf"tensor '{NORM}' has data_offsets 8 to 0, -8 bytes; F32 of shape \(16,\) takes 64",
        ),
        (entry(data_offsets=[-64, 0]), f"tensor '{NORM}' has shape .* whole numbers"),
        (entry(shape=[16.0]), f"tensor '{NORM}' has shape .* whole numbers"),
        (entry(shape=[4, 3]), rf"tensor '{NORM}' has data_offsets .* 64 bytes; F32 of shape \(4, 3\) takes 48"),
        (entry(shape=None), f"the header's entry of tensor '{NORM}' cannot be used"),
        (entry(dtype="F16"), rf"tensor '{NORM}' has data_offsets .*; F16 of shape \(16,\) takes 32"),
        (entry(dtype="F4"), f"tensor '{NORM}' is 'F4'; supported are F32, BF16, F16"),
    ],
)
def test_broken_files(change: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    content = (FIXTURES / "dense" / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(change(content))
    with pytest.raises(InputError, match=message) as error:
        Checkpoint(Folder(tmp_path))
    assert str(tmp_path / SINGLE) in str(error.value)
    assert "\n" not in str(error.value)


def sharded(folder: Path, change: Callable[[dict[str, str]], Any] = lambda index: None) -> Path:
    """The dense fixture as two shards, its norm in the second, and an index that `change` edits."""
    shutil.copy(FIXTURES / "dense" / "config.json", folder)
    tensors = load_file(FIXTURES / "dense" / SINGLE)
    index = {name: "b.safetensors" if name == NORM else "a.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensor for name, tensor in tensors.items() if index[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": change(index) or index}))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update({NORM: "a.safetensors"}), rf"a\.safetensors has no tensor '{NORM}', which .* says"),
        (lambda index: index.update({"x": "b.safetensors"}), r"b\.safetensors has no tensor 'x', which .* says"),
        (lambda index: index.update({"x": "c.safetensors"}), r"c\.safetensors does not exist; .*index\.json names it"),
        (lambda index: index.update({"x": "../c"}), r"'x' lies in '\.\./c'; it must be a file's name"),
        (lambda index: index.update({"x": 3}), "'x' lies in 3; it must be a file's name"),
        (lambda index: "no", "'weight_map' is missing"),
    ],
)
def test_indices_that_do_not_fit_their_shards(change: Callable, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        Checkpoint(Folder(sharded(tmp_path, change)))


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({NORM: np.zeros(16, np.float32), "x": np.zeros(1, np.float32)}, tmp_path / "b.safetensors")
    shutil.copy(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    index = {NORM: "b.safetensors", "x": "c.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(InputError, match=r"lies in two files of .*, b\.safetensors and c\.safetensors"):
        Checkpoint(Folder(tmp_path))


def test_everything_is_checked_before_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last shard is cut by a byte, then holds FP8: either is said without one tensor having been read."""
    sharded(tmp_path)
    whole = (tmp_path / "b.safetensors").read_bytes()
    read = Folder.read
    starts: dict[str, int] = {}

    def only_headers(self: Folder, name: str, start: int = 0, stop: int | None = None) -> bytes:
        assert not name.endswith(".safetensors") or start <= 8
        starts[name] = start
        return read(self, name, start, stop)

    monkeypatch.setattr(Folder, "read", only_headers)
    (tmp_path / "b.safetensors").write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"b\.safetensors has \d+ bytes; .* cut short"):
        load_hf(tmp_path)
    header, data = split(tmp_path / "b.safetensors")
    header[NORM].update(dtype="F8_E4M3", data_offsets=[0, 16])
    (tmp_path / "b.safetensors").write_bytes(joined(json.dumps(header).encode(), data[:16]))
    with pytest.raises(InputError, match=rf"b\.safetensors: tensor '{NORM}' is F8_E4M3; supported are F32, BF16, F16"):
        load_hf(tmp_path)
    assert {"a.safetensors", "b.safetensors"} <= starts.keys()


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "dense" / SINGLE, tmp_path)
    checkpoint = Checkpoint(Folder(tmp_path))
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(size - 40)
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].start)
    with pytest.raises(InputError, match=r"bytes \d+ to \d+ are needed, \d+ of them were found"):
        checkpoint.read(last, 0, checkpoint.tensors[last].nbytes // 4)


def test_header_is_what_safetensors_reads(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones((1, 0), np.float16),
        "c": np.array([7], np.float16),
    }
    header = header_bytes((name, array.shape, array.dtype) for name, array in arrays.items())
    assert len(header) % 8 == 0
    (tmp_path / SINGLE).write_bytes(header + b"".join(array.tobytes() for array in arrays.values()))
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    stored = read_header(Folder(tmp_path), SINGLE)
    assert {name: (s.shape, s.nbytes) for name, s in stored.items()} == {
        n: (a.shape, a.nbytes) for n, a in arrays.items()
    }
    assert [stored[name].dtype for name in "abc"] == ["F32", "F16", "F16"]

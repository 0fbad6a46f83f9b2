"""What model.path names: local folders as they are, the small files of a model at an address in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from jaxrl_sat import embedded, sources
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.types import InputError


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The embedded model in fsspec's memory, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}/model"
    for file in embedded.model_path().iterdir():
        files.pipe_file(f"{root}/{file.name}", file.read_bytes())
    return f"memory:/{root}"


def test_local_folders_are_read_where_they_lie(tmp_path: Path) -> None:
    assert sources.model_folder("embedded") == Path(sources.model_address("embedded")) == embedded.model_path()
    assert sources.model_folder(str(tmp_path)) == Path(sources.model_address(str(tmp_path))) == tmp_path


def test_model_at_an_address(address: str, tmp_path: Path) -> None:
    assert sources.model_address(address) == address
    assert sources.read_model_config(address) == sources.read_model_config("embedded")
    folder = sources.model_folder(address)
    assert folder.is_relative_to(tmp_path / "cache" / "jaxrl_sat" / "models")
    assert not (folder / "model.safetensors").exists()
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(embedded.model_path())
    assert (ours.eos_ids, ours.encode("1 + 2 =")) == (theirs.eos_ids, theirs.encode("1 + 2 ="))


def test_copy_follows_the_address(address: str) -> None:
    folder = sources.model_folder(address)
    files = fsspec.filesystem("memory")
    root = address.removeprefix("memory:/")
    files.pipe_file(f"{root}/chat_template.jinja", b"new")
    files.rm_file(f"{root}/generation_config.json")
    assert sources.model_folder(address) == folder
    assert (folder / "chat_template.jinja").read_bytes() == b"new"
    assert not (folder / "generation_config.json").exists()


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere"), "memory://nowhere"):
        with pytest.raises(InputError, match=rf"model\.path: '{path}' is not a folder; allowed: embedded, or"):
            sources.read_model_config(path)
    with pytest.raises(InputError, match=r"model\.path: .* has no readable config\.json .*does not exist"):
        sources.read_model_config(str(tmp_path))
    with pytest.raises(InputError, match=r"model\.path: nosuch://a/b cannot be opened .*; allowed: embedded, or"):
        sources.read_model_config("nosuch://a/b")


def test_cache_that_cannot_be_written(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InputError, match=r"model\.path: memory://.* cannot be copied to .*; set XDG_CACHE_HOME"):
        sources.model_folder(address)

"""The shape of the house: who may import whom, how long a file and a function may be, what loading it must not do."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxrl_sat

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxrl_sat"
FOLDERS = ("jaxrl_sat", "configs", "benchmarks", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

TOP = {"train", "parts", "aot", "plan", "main"}
"""Files that put a run together, and so may know both the sampler and the learner."""

COMMANDS = {"sampler/serve.py": "serving"}
"""Commands that stand, for their name, in a room that they are built on: the room each belongs to."""

MAY_IMPORT = {
    "types": set(),
    "layout": set(),
    "schema": {"types"},
    "objectives": {"types"},
    "model": {"types", "layout"},
    "sampler": {"types", "layout", "model"},
    "optim": {"types"},
    "pipeline": {"types"},
    "rewards": {"types"},
    "step": {"types", "model", "objectives", "optim"},
    "scorer": {"types", "layout", "model", "step"},
    "learner": {"types", "layout", "model", "objectives", "optim", "scorer", "step"},
    "config_sections": {"types", "schema", "objectives"},
    "config": {"types", "schema", "objectives", "pipeline", "rewards", "config_sections"},
    "mesh": {"types", "layout", "model", "config"},
}
"""The rooms of the package that those named may import; the rest are held to having no cycle."""


def room_of(module: str) -> str:
    """ "jaxrl_sat.model.cache" -> "model"."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "jaxrl_sat" else (module,)


@functools.cache
def rooms() -> dict[str, dict[str, set[str]]]:
    """For each room, what its files import: rooms of the package under "own", other packages under "others"."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        room = COMMANDS.get(inside.as_posix()) or inside.parts[0].removesuffix(".py")
        entry = found.setdefault(room, {"own": set(), "others": set()})
        for name in imports(path):
            own = name.split(".")[0] == "jaxrl_sat"
            entry["own" if own else "others"].add(room_of(name) if own else name.split(".")[0])
        entry["own"] -= {room, "", "__init__"}
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Rooms that import each other in a ring, none if there is no such ring."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_have_no_cycle() -> None:
    assert cycle({room: entry["own"] for room, entry in rooms().items()}) == []
    assert set(cycle({"a": {"b"}, "b": {"a"}})) == {"a", "b"}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_what_it_may(room: str) -> None:
    assert rooms()[room]["own"] <= MAY_IMPORT[room]


def test_only_the_top_knows_sampler_and_learner() -> None:
    both = {room for room, entry in rooms().items() if {"sampler", "learner"} <= entry["own"]}
    assert both <= TOP
    assert not [room for room, entry in rooms().items() if "train" in entry["own"] and room not in TOP]


def test_objectives_need_jax_alone() -> None:
    others = rooms()["objectives"]["others"] - sys.stdlib_module_names
    assert others <= {"jax", "jaxtyping", "flax", "numpy"}


def test_jetstream_stays_behind_one_file() -> None:
    users = [path for path in PACKAGE.rglob("*.py") if any(name.split(".")[0] == "jetstream" for name in imports(path))]
    assert [path.relative_to(PACKAGE).as_posix() for path in users] == ["sampler/jetstream_compat.py"]


def test_config_dict_is_read_in_one_file() -> None:
    users = [path for path in PACKAGE.rglob("*.py") if any(n.split(".")[0] == "ml_collections" for n in imports(path))]
    # cli.py makes one from a file and sets overrides; config.py alone reads it.
    assert sorted(path.name for path in users) == ["cli.py", "config.py"]


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length >= 400} == {}


def test_functions_are_short() -> None:
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length >= 60:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert long == []


def test_main_is_short() -> None:
    assert len((PACKAGE / "main.py").read_text(encoding="utf-8").splitlines()) < 80


HOSTS = ["pypi" + ".org", "python" + "hosted", "registry" + ".npmjs", "deb." + "debian", "crates" + ".io"]


def test_no_registry_host_is_named() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file():
            text = path.read_bytes().decode("utf-8", errors="ignore").lower()
            named += [f"{name}: {host}" for host in HOSTS if host in text]
    assert named == []


IMPORT_EVERYTHING = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
unwanted = ("tensorflow", "tensorflow_text", "tf_keras", "torch", "transformers")
loaded = [name for name in unwanted if name in sys.modules]
assert not loaded, loaded
"""


def test_importing_the_package_loads_no_tensorflow_and_touches_no_device(tmp_path: Path) -> None:
    # A TensorFlow that could be imported, as a plain `pip install` brings it, and a platform that does not exist.
    for name in ("tensorflow", "tensorflow_text", "tf_keras"):
        (tmp_path / f"{name}.py").write_text("")
    modules = [module.name for module in pkgutil.walk_packages(jaxrl_sat.__path__, "jaxrl_sat.")]
    assert "jaxrl_sat.train" in modules and "jaxrl_sat.sampler.engine" in modules
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", IMPORT_EVERYTHING, *modules]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]

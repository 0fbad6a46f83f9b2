"""A process that calls one reward function of the user's: python -m jaxrl_sat.rewards.plugin_worker TARGET.

TARGET is package.module:function or file.py:function. The first line out is {} once the function can be called, or
{"error": why not}. A line in is {"prompt", "response", "example"}; a line out is {"value", "parts"} or {"error"}.
What the function prints goes to stderr, and what it reads is empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_sat.rewards.example import Example

MOST_PARTS = 16
_PART = re.compile(r"[\w.-]{1,64}", re.ASCII)
_PARENT_SECONDS = 1.0


def load(target: str) -> Callable[[str, str, Example], Any]:
    """The function. Raises whatever its module raises, and `TypeError` where it cannot be called with three texts."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).expanduser().resolve()
        sys.path.insert(0, str(file.parent))  # as for a script
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name)
    inspect.signature(function).bind("prompt", "response", "example")
    return function


def checked(returned: Any) -> dict[str, Any]:
    """What a function returned as {"value", "parts"}; a mapping is parts, whose sum is the value.

    Raises `TypeError` or `ValueError` for anything else, and for numbers that are not finite.
    """
    parts = {}
    if isinstance(returned, Mapping):
        if len(returned) > MOST_PARTS:
            raise ValueError(f"{len(returned)} parts; at most {MOST_PARTS} allowed")
        for name in returned:
            if not isinstance(name, str) or not _PART.fullmatch(name) or name == "failed":
                raise ValueError(f"a part is called {str(name)[:64]!r}; letters, digits and any of _.- allowed")
        parts = {name: _number(value) for name, value in returned.items()}
        return {"value": _number(math.fsum(parts.values())), "parts": parts}
    return {"value": _number(returned), "parts": parts}


def _number(value: Any) -> float:
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of NumPy, JAX or the like
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"returned {type(value).__name__}; a number or a mapping of numbers allowed")
    value = float(value)
    if not abs(value) < 1e30:
        raise ValueError(f"returned {value}; a finite number allowed")
    return value


def reason(error: BaseException) -> str:
    """An error in one line, whatever it says of itself."""
    try:
        said = str(error)
    except Exception:
        said = ""
    return " ".join(f"{type(error).__name__}: {said[:1000]}".split())[:300]


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def say(what: Mapping[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        function = load(sys.argv[1])
    except BaseException as error:  # noqa: B902 - a module may raise anything, SystemExit too
        say({"error": reason(error)})
        return
    say({})
    own = os.getpid()
    for line in questions:
        asked = json.loads(line)
        try:
            said = checked(function(asked["prompt"], asked["response"], Example(**asked["example"])))
        except BaseException as error:  # noqa: B902
            said = {"error": reason(error)}
        if os.getpid() != own:  # a process that the function forked and let return: the answer is not its own to give
            os._exit(0)
        say(said)


def _end_with(parent: int) -> None:
    """End once the run has, were it killed while the function hangs."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Paths that a user gave, as text."""

from __future__ import annotations

import contextlib
from pathlib import Path

from jaxrl_sat.types import InputError


def user_path(key: str, text: str) -> Path:
    """The path that `text`, the value of `key`, names; it need not exist. Raises `InputError` for what is no path."""
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL
        raise InputError(f"{key}: {text[:80]!r} is not a path ({error.args[-1]}); allowed: a folder") from error
    return path

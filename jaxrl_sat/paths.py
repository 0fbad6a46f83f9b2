"""Paths and addresses that a user gave, as text, and where the package keeps what it can make again."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TextIO

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


def is_address(text: str) -> bool:
    """Whether `text` names something by protocol (gs://, s3://, memory://, ...) rather than by a local path."""
    return "://" in text


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/jaxrl_sat`, or the same under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_sat"


def locked(file: Path, in_use: str) -> TextIO:
    """A file, made if need be, that this process holds until it is closed.

    Raises `InputError`, whose text is `in_use`, where another holds it, and `OSError` where it cannot be opened.
    """
    lock = file.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InputError(in_use) from error
    return lock

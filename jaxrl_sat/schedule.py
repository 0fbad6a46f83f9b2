"""When the things happen that happen every so many updates."""

from __future__ import annotations


def due(every: int, updates: int) -> list[int]:
    """The updates after which something done every `every` updates (0: never), and after the last, is done."""
    return sorted({*range(every, updates + 1, every), updates}) if every else []

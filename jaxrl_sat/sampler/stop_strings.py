"""Strings that end a response: its text, decoded as its tokens come, and the token that completes one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxrl_sat.types import InputError, SamplingParams


@runtime_checkable
class Codec(Protocol):
    """Ids to text."""

    def decode(self, ids: list[int], /) -> str:
        """The text of `ids`."""
        ...


UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character yet."""

UNDECIDED_TOKENS = 8
"""Tokens that may wait for the rest of a character: it takes 4 at most, but each may hold parts of two."""


def check_stop_strings(sampling: SamplingParams, codec: Codec | None) -> None:
    """`InputError` for an empty stop string, or for any where there is no codec."""
    if not all(sampling.stop_strings):
        raise InputError("stop_strings: an empty string; at least one character needed")
    if sampling.stop_strings and codec is None:
        raise InputError(f"stop_strings: {sampling.stop_strings[0]!r}; none allowed, as there is no tokenizer here")


class StopStrings:
    """Watches one response. Each token costs the decoding of a few, however long the response is."""

    def __init__(self, strings: Sequence[str], codec: Codec):
        self._strings, self._codec = tuple(strings), codec
        self._kept = max(map(len, self._strings)) - 1  # characters of earlier text that a match may reach back to
        self._ids: list[int] = []  # those last read, as what a decoder makes of a token depends on the one before
        self._read = 0  # how many of them are in the text
        self._text = ""

    def feed(self, tokens: Sequence[int]) -> int | None:
        """How many of the next tokens complete a stop string first; None if none do."""
        for count, token in enumerate(tokens, 1):
            self._ids.append(int(token))
            new = self._new_text()
            seen = self._text + new
            if new and any(string in seen for string in self._strings):
                return count
            self._text = seen[max(0, len(seen) - self._kept) :]
        return None

    def _new_text(self) -> str:
        before = self._codec.decode(self._ids[: self._read])
        text = self._codec.decode(self._ids)
        if text.endswith(UNFINISHED) and len(self._ids) - self._read < UNDECIDED_TOKENS:
            return ""
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        return text[len(before) :]

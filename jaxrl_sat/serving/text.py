"""Text of a response as it is made: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxrl_sat.sampler.stop_strings import UNDECIDED_TOKENS, UNFINISHED


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the stop string that is complete first in it, the longest of those that end there."""
    ends = [(place + len(one), place) for one in stop if (place := text.find(one)) >= 0]
    return text[: min(ends)[1]] if ends else text


class TextStream:
    """Text of token ids that come one by one. What may become a stop string is held back until it is none.

    `decode` makes text of ids. A token is decoded beside the one before it, as some tokenizers spell by position.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._from = 0  # where the tokens begin that were last turned into text
        self._until = 0  # and where they end
        self._held = ""
        self._given = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is sure once `token` is there. Nothing after a stop string."""
        if self.stopped:
            return ""
        self._ids.append(token)
        known = self._decode(self._ids[self._from : self._until])
        text = self._decode(self._ids[self._from :])
        if text.endswith(UNFINISHED) and len(self._ids) - self._until < UNDECIDED_TOKENS:
            return ""
        self._from, self._until = self._until, len(self._ids)
        return self._give(self._held + text[len(known) :])

    def end(self, tokens: Sequence[int]) -> str:
        """The rest of the text of the whole response `tokens`, which may be more than were fed."""
        whole = cut_at_stop(self._decode(tokens), self._stop)
        return whole[len(self._given) :] if whole.startswith(self._given) else ""

    def _give(self, text: str) -> str:
        sure = cut_at_stop(text, self._stop)
        self.stopped = len(sure) < len(text)
        kept = 0 if self.stopped else max((_overlap(text, one) for one in self._stop), default=0)
        self._held = text[len(text) - kept :]
        sure = sure[: len(text) - kept]
        self._given += sure
        return sure


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

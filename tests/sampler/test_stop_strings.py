"""Stop strings over decoders whose tokens are pieces of characters, characters, and words."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxrl_sat.sampler.stop_strings import StopStrings, check_stop_strings
from jaxrl_sat.types import InputError, SamplingParams


class Bytes:
    """A token is a byte, as at the bottom of every byte-level vocabulary."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """A token is a word; the first of those decoded together has no space before it, as in SentencePiece."""

    words = ("the", "end", "of", "ending", "a")

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def first_end(text: bytes, strings: list[str]) -> int | None:
    """Bytes up to the earliest end of one of the strings, by trying every length."""
    ends = [n for n in range(1, len(text) + 1) if any(text[:n].endswith(string.encode()) for string in strings)]
    return ends[0] if ends else None


@given(
    st.text("ab\u00e9\u4e16\U0001f600", max_size=12).map(str.encode),
    st.lists(st.text("ab\u00e9\u4e16\U0001f600", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_the_token_that_completes_a_string_is_found(text, strings, step):
    watch, found = StopStrings(strings, Bytes()), None
    for first in range(0, len(text), step):
        count = watch.feed(list(text[first : first + step]))
        if count is not None:
            found = first + count
            break
    assert found == first_end(text, strings)


def test_a_string_may_lie_across_words():
    assert StopStrings(["end of"], Words()).feed([0, 3, 1, 2, 4]) == 4
    assert StopStrings(["d"], Words()).feed([0, 4, 3]) == 3
    assert StopStrings(["the a"], Words()).feed([4, 0, 1, 4]) is None


def test_bytes_that_are_no_text_end():
    watch = StopStrings(["ab"], Bytes())
    assert watch.feed([0x80] * 50) is None
    assert watch.feed([*b"xab"]) == 3


def test_no_more_than_a_few_tokens_are_decoded_at_once():
    seen: list[int] = []

    class Counting(Bytes):
        def decode(self, ids: list[int]) -> str:
            seen.append(len(ids))
            return super().decode(ids)

    assert StopStrings(["never"], Counting()).feed([*b"text that goes on and on"] * 20) is None
    assert max(seen) == 2


@pytest.mark.parametrize(
    ("strings", "codec", "message"),
    [
        (("a", ""), Bytes(), "stop_strings: an empty string; at least one character needed"),
        (("a",), None, "stop_strings: 'a'; none allowed, as there is no tokenizer here"),
    ],
)
def test_strings_that_cannot_be_watched_for(strings, codec, message):
    with pytest.raises(InputError) as caught:
        check_stop_strings(SamplingParams(1.0, 4, (), stop_strings=strings), codec)
    assert str(caught.value) == message
    check_stop_strings(SamplingParams(1.0, 4, ()), None)

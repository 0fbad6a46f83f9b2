"""Text as it is streamed, against the text of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxrl_sat.serving.text import TextStream, cut_at_stop


def of_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose words are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def streamed(text: str, stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    stream, ids = TextStream(of_bytes, stop), list(text.encode())
    parts = [stream.feed(i) for i in ids]
    return [*parts, stream.end(ids)], stream.stopped


def test_a_character_comes_with_its_last_byte():
    assert streamed("aé€😀")[0] == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


def test_what_may_become_a_stop_string_is_held_back():
    assert streamed("abcd", ["cde"])[0] == ["a", "b", "", "", "cd"]
    assert streamed("abcx", ["cde"])[0] == ["a", "b", "", "cx", ""]
    assert streamed("abcdefg", ["cde"]) == (["a", "b", "", "", "", "", "", ""], True)
    assert streamed("aaab", ["aab"])[0] == ["", "", "a", "", ""]


@example("aca", ["c", "aca"])  # the one that is complete first counts
@given(st.text("abcé", max_size=12), st.lists(st.text("abcé", min_size=1, max_size=3), max_size=3))
def test_the_parts_make_the_whole(text, stop):
    parts, stopped = streamed(text, stop)
    assert "".join(parts) == cut_at_stop(text, stop)
    assert stopped == any(one in text for one in stop)


def test_an_end_that_was_not_fed_is_said():
    stream = TextStream(of_bytes, ["z"])
    assert stream.feed(ord("a")) == "a"
    assert stream.end(list(b"abczd")) == "bc"


@pytest.mark.parametrize(("stop", "text"), [(["b", "a"], ""), (["c"], "ab"), ([], "abc"), (["x"], "abc")])
def test_the_first_stop_string_counts(stop, text):
    assert cut_at_stop("abc", stop) == text

"""The reward `format`: is a response of the form that a verifier reads without guessing? Text alone."""

from __future__ import annotations

import re

from jaxrl_sat.rewards.extract import boxes_of, is_placeholder

_TAG = re.compile(r"</?think>")
_HEDGE = re.compile(r"\b(?:maybe|perhaps|possibly|probably|either|not)\b", re.IGNORECASE)


def well_formed(prompt: str, response: str) -> bool:
    """Whether a thought that was opened is closed, and one closed box with a plain answer follows.

    The thought: no tag at all, or `<think>` where the prompt ends or the response begins and one `</think>` later. The
    box: behind the thought exactly one `\\boxed{...}` that is not empty, without maybe, perhaps, possibly, probably,
    either or not in it.
    """
    opened = prompt.rfind("<think>") > prompt.rfind("</think>")
    tags = [match.group() for match in _TAG.finditer(response)]
    if opened:
        closed = tags == ["</think>"]
    else:
        closed = not tags or (tags == ["<think>", "</think>"] and response.lstrip().startswith("<think>"))
    if not closed:
        return False
    text = response[response.rfind("</think>") + len("</think>") :] if tags else response
    contents = [text[content:end] for _, content, end in boxes_of(text) or ()]
    contents = [content for content in contents if not is_placeholder(content)]
    return len(contents) == 1 and _HEDGE.search(contents[0]) is None

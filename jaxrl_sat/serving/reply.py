"""Rollouts as the JSON of OpenAI's completions and chat completions, whole or in the pieces of a stream."""

from __future__ import annotations

import base64
import dataclasses
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.sampler.record import Fields
from jaxrl_sat.sampler.stop_strings import UNFINISHED
from jaxrl_sat.serving.body import Call, Served
from jaxrl_sat.serving.text import TextStream
from jaxrl_sat.types import Rollout


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of a response and what is shown of them: ids and log-probs, [R] and [R, K]."""

    ids: np.ndarray
    logp: np.ndarray
    topk_ids: np.ndarray
    topk_logp: np.ndarray

    @classmethod
    def of_rollout(cls, rollout: Rollout) -> Tokens:
        """All tokens of a response."""
        return cls(rollout.tokens, rollout.logp, rollout.topk.ids, rollout.topk.logp)

    @classmethod
    def of_fields(cls, fields: Fields) -> Tokens:
        """Copies of the tokens of records that may not stay."""
        kept = (fields.tokens, fields.logp, fields.topk_ids, fields.topk_logp)
        return cls(*(array.copy() for array in kept))

    def __getitem__(self, part: slice) -> Tokens:
        """Some of them."""
        return Tokens(self.ids[part], self.logp[part], self.topk_ids[part], self.topk_logp[part])

    def __len__(self) -> int:
        """How many there are."""
        return len(self.ids)


class Reply:
    """The answer to one call: its envelope, and its choices as they come."""

    def __init__(self, call: Call, served: Served):
        self._call = call
        self._served = served
        kind = "chat.completion" if call.chat else "text_completion"
        streamed = call.chat and call.fields.stream
        self._envelope = {
            "id": f"{'chatcmpl' if call.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if streamed else kind,
            "created": int(time.time()),
            "model": served.model,
        }

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self._whole_choice(index, rollout) for index, rollout in enumerate(rollouts)]
        return self._envelope | {"choices": choices, "usage": usage(rollouts, self._call.fields.n)}

    def _whole_choice(self, index: int, rollout: Rollout) -> dict[str, Any]:
        text = self.text_stream().end(rollout.tokens.tolist())
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._call.chat else {"text": text}
        )
        logprobs = self._logprobs(Tokens.of_rollout(rollout), 0)
        ended = {"logprobs": logprobs, "finish_reason": rollout.finish_reason}
        return {"index": index, **said, **ended, **self._records(rollout)}

    def choice(self, index: int) -> ChoiceStream:
        """The pieces of one choice of a stream."""
        return ChoiceStream(self, index)

    def event(self, choices: list[dict[str, Any]], rollouts: Sequence[Rollout] | None = None) -> dict[str, Any]:
        """One event of a stream; with the rollouts the last one, which counts tokens."""
        counted = {} if rollouts is None else {"usage": usage(rollouts, self._call.fields.n)}
        return self._envelope | {"choices": choices} | counted

    # -------------------------------------------------------------------------------------- parts of a choice

    def text_stream(self) -> TextStream:
        """A fresh one for a choice."""
        return TextStream(self._served.tokenizer.decode, self._call.stop)

    def characters(self, tokens: Tokens) -> int:
        """Characters of tokens, each by itself."""
        return sum(_lengths(self._served.tokenizer, tokens)) if self._call.shown is not None else 0

    def piece(self, index: int, text: str, tokens: Tokens, offset: int, first: bool) -> dict[str, Any] | None:
        """A choice of an event; None where it would say nothing. `offset`: characters of the tokens before."""
        fields = self._call.fields
        if not (text or first or (len(tokens) and (self._call.shown is not None or fields.return_token_ids))):
            return None
        role = {"role": "assistant"} if first else {}
        said: dict[str, Any] = {"delta": role | {"content": text}} if self._call.chat else {"text": text}
        logprobs = self._logprobs(tokens, offset) if len(tokens) else None
        ids = {"token_ids": tokens.ids.tolist()} if fields.return_token_ids else {}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": None, **ids}

    def last_piece(self, index: int, rollout: Rollout) -> dict[str, Any]:
        """The choice that says how a response ended."""
        said: dict[str, Any] = {"delta": {}} if self._call.chat else {"text": ""}
        records = self._records(rollout)
        records.pop("token_ids", None)
        return {"index": index, **said, "logprobs": None, "finish_reason": rollout.finish_reason, **records}

    def _records(self, rollout: Rollout) -> dict[str, Any]:
        """What else was asked for: ids and weight versions, and expert ids as base64 of their bytes."""
        fields, found = self._call.fields, {}
        if fields.return_token_ids:
            found["prompt_token_ids"] = rollout.request.prompt.tokens.tolist()
            found["token_ids"] = rollout.tokens.tolist()
            found["weight_versions"] = rollout.versions.tolist()
            found["prefill_version"] = rollout.prefill_version
        if fields.return_routing:
            ids = np.ascontiguousarray(rollout.expert_ids)
            data = base64.b64encode(ids.tobytes()).decode()
            found["routing"] = {"shape": list(ids.shape), "dtype": str(ids.dtype), "data": data}
        return found

    def _logprobs(self, tokens: Tokens, offset: int) -> dict[str, Any] | None:
        if self._call.shown is None:
            return None
        shape = chat_logprobs if self._call.chat else completion_logprobs
        return shape(tokens, self._call.shown, self._served.tokenizer, offset)


class ChoiceStream:
    """One choice of a stream, from the first token to the end."""

    def __init__(self, reply: Reply, index: int):
        self._reply = reply
        self._index = index
        self._text = reply.text_stream()
        self._tokens = 0
        self._characters = 0

    def feed(self, tokens: Tokens) -> list[dict[str, Any]]:
        """Choices for the event of new tokens. Those after a stop string are passed over."""
        text, count = "", 0
        while count < len(tokens) and not self._text.stopped:
            text += self._text.feed(int(tokens.ids[count]))
            count += 1
        return self._say(text, tokens[:count]) if count else []

    def end(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Choices for the last event of a response: what was held back, what `feed` has not seen, and how it ended."""
        rest = Tokens.of_rollout(rollout)[self._tokens :]
        said = self._say(self._text.end(rollout.tokens.tolist()), rest)
        return [*said, self._reply.last_piece(self._index, rollout)]

    def _say(self, text: str, tokens: Tokens) -> list[dict[str, Any]]:
        piece = self._reply.piece(self._index, text, tokens, self._characters, first=self._tokens == 0)
        self._tokens += len(tokens)
        self._characters += self._reply.characters(tokens)
        return [piece] if piece else []


def usage(rollouts: Sequence[Rollout], samples: int) -> dict[str, int]:
    """Tokens of a call: each prompt once, whatever the number of its samples."""
    prompt = sum(len(rollout.request.prompt.tokens) for rollout in rollouts[::samples])
    response = sum(len(rollout.tokens) for rollout in rollouts)
    return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}


def completion_logprobs(tokens: Tokens, shown: int, tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """Log-probs as completions have them. Of words that are spelt alike the likeliest is shown."""
    texts = [_word(tokenizer, i) for i in tokens.ids]
    ranked = []
    for row, text in enumerate(texts):
        words: dict[str, float] = {}
        for i, logp in _ranked(tokens, row, shown):
            words.setdefault(_word(tokenizer, i), logp)
        words.setdefault(text, float(tokens.logp[row]))
        ranked.append(words)
    starts = offset + np.cumsum([0, *_lengths(tokenizer, tokens)])[:-1]
    return {
        "tokens": texts,
        "token_logprobs": tokens.logp.tolist(),
        "top_logprobs": ranked if shown else None,
        "text_offset": starts.tolist(),
    }


def chat_logprobs(tokens: Tokens, shown: int, tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """Log-probs as chat completions have them."""

    def entry(i: int, logp: float) -> dict[str, Any]:
        text = _word(tokenizer, i)
        return {"token": text, "logprob": logp, "bytes": None if UNFINISHED in text else list(text.encode())}

    content = []
    for row, i in enumerate(tokens.ids.tolist()):
        ranked = [entry(word, logp) for word, logp in _ranked(tokens, row, shown)]
        content.append(entry(i, float(tokens.logp[row])) | {"top_logprobs": ranked})
    return {"content": content, "refusal": None}


def _ranked(tokens: Tokens, row: int, shown: int) -> list[tuple[int, float]]:
    """The likeliest words of a token, those that its nucleus leaves out left out, as JSON has no infinity."""
    pairs = zip(tokens.topk_ids[row, :shown].tolist(), tokens.topk_logp[row, :shown].tolist(), strict=True)
    return [(i, logp) for i, logp in pairs if math.isfinite(logp)]


def _word(tokenizer: Tokenizer, i: Any) -> str:
    return tokenizer.decode([int(i)], skip_special_tokens=False)


def _lengths(tokenizer: Tokenizer, tokens: Tokens) -> list[int]:
    return [len(tokenizer.decode([int(i)])) for i in tokens.ids]

"""What a client may ask for: the JSON of a call as frozen records and sampling requests, every mistake by its field.

Fields are those of OpenAI's completions and chat completions; `prompt` may be token ids. Of their own making are
`top_k`, `stop_token_ids`, `return_token_ids` and `return_routing`. A field that would change nothing here is refused,
unless it says what is so anyway.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import numpy as np

from jaxrl_sat import schema
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.sampler.state import MAX_STOP_IDS
from jaxrl_sat.schema import Range
from jaxrl_sat.types import InputError, Prompt, Request, SamplingParams

RESPONSES = 1024
"""Most responses that one call may ask for."""

STOP_STRINGS, STOP_STRING_LENGTH = 16, 256
"""Most stop strings of a call, and characters in each."""

SEEDS = 2**32

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "store": (False,),
}
"""Fields of OpenAI's that are not served, with the values that ask for nothing. null asks for nothing anywhere."""

Responses = Annotated[int, Range(1, 128)]
Shown = Annotated[int, Range(0, 20)]
TokenCount = Annotated[int, Range(1, 10**6)]


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """`include_usage`: a last event that counts tokens."""

    include_usage: bool = False


@dataclasses.dataclass(frozen=True)
class Fields:
    """What both calls have. None: the server's own."""

    model: str | None = None
    user: str | None = None  # says who asks; nothing depends on it
    n: Responses = 1
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] | None = None
    temperature: Annotated[float, Range(0)] | None = None
    top_p: Annotated[float, Range(0, 1, above=True)] | None = None
    top_k: Annotated[int, Range(-1, 10**6)] | None = None
    max_tokens: TokenCount | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_routing: bool = False


@dataclasses.dataclass(frozen=True)
class CompletionFields(Fields):
    """A completion. `logprobs`: how many of the most likely words are shown beside each token's own log-prob."""

    logprobs: Shown | None = None


@dataclasses.dataclass(frozen=True)
class ChatFields(Fields):
    """A chat completion. `top_logprobs` needs `logprobs`."""

    logprobs: bool = False
    top_logprobs: Shown | None = None
    max_completion_tokens: TokenCount | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """A call, understood. `shown` most likely words beside each token; None: no log-probs at all."""

    fields: Fields
    requests: tuple[Request, ...]  # n a prompt, prompt by prompt
    stop: tuple[str, ...]
    shown: int | None
    chat: bool


@dataclasses.dataclass(frozen=True)
class Served:
    """What the server serves: who reads and writes text, and the bounds of a request."""

    model: str
    tokenizer: Tokenizer
    sampling: SamplingParams  # of calls that name none
    vocab_size: int
    max_prompt_tokens: int
    topk: int
    groups: Iterator[int] = dataclasses.field(default_factory=itertools.count)


class UnknownModel(InputError):
    """The call names a model that is not the one served."""


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises `InputError`, also for the NaN and Infinity that Python would read."""

    def no_number(text: str) -> NoReturn:
        raise ValueError(f"{text} is not JSON")

    try:
        found = json.loads(body, parse_constant=no_number)
        if b"\\u" in body:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise InputError(f"body: not JSON ({' '.join(str(error).split())[:200]}); allowed: a JSON object") from error
    if not isinstance(found, dict):
        raise InputError(f"body: a JSON {type(found).__name__}; allowed: a JSON object")
    return {name: value for name, value in found.items() if value is not None}


def completion(body: Mapping[str, Any], served: Served) -> Call:
    """The call of a /v1/completions body. Raises `InputError` that begins with the field's name."""
    rest, prompt, stop, stop_ids = _split(body, "prompt")
    fields = schema.build(CompletionFields, rest)
    prompts = _prompts(prompt)
    _check_count(fields, len(prompts))  # before any text is encoded
    tokens = [_tokens(text, served, "prompt") for text in prompts]
    return _call(fields, tokens, stop, stop_ids, fields.logprobs, served, fields.max_tokens, chat=False)


def chat(body: Mapping[str, Any], served: Served) -> Call:
    """The call of a /v1/chat/completions body. Raises `InputError` that begins with the field's name."""
    rest, messages, stop, stop_ids = _split(body, "messages")
    fields = schema.build(ChatFields, rest)
    if fields.top_logprobs and not fields.logprobs:
        raise InputError(f"top_logprobs: {fields.top_logprobs} without logprobs; allowed: logprobs true beside it")
    checked = _messages(messages)
    try:
        text = served.tokenizer.render(checked)
    except InputError as error:
        raise InputError(f"messages: {error.__cause__ or error}") from error  # where the template lies is ours to know
    shown = (fields.top_logprobs or 0) if fields.logprobs else None
    limit = fields.max_completion_tokens or fields.max_tokens
    return _call(fields, [_tokens(text, served, "messages")], stop, stop_ids, shown, served, limit, chat=True)


def _split(body: Mapping[str, Any], asked: str) -> tuple[dict[str, Any], Any, tuple[str, ...], tuple[int, ...]]:
    """The fields that a record can hold, and those of several types: what is asked, stop strings, stop ids."""
    rest = dict(body)
    for name, neutral in WITHOUT_EFFECT.items():
        if name in rest and rest[name] not in neutral:
            raise InputError(f"{name}: {_short(rest[name])}; allowed: {json.dumps(neutral[0])}, as it is not served")
        rest.pop(name, None)
    if asked not in rest:
        raise InputError(f"{asked}: missing; allowed: {ALLOWED[asked]}")
    content = rest.pop(asked)
    stop = rest.pop("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not _all(stop, str) or not all(0 < len(text) <= STOP_STRING_LENGTH for text in stop) or len(stop) > STOP_STRINGS:
        allowed = f"up to {STOP_STRINGS} strings of 1 to {STOP_STRING_LENGTH} characters"
        raise InputError(f"stop: {_short(stop)}; allowed: {allowed}")
    stop_ids = rest.pop("stop_token_ids", ())
    if not _all(stop_ids, int):
        raise InputError(f"stop_token_ids: {_short(stop_ids)}; allowed: a list of token ids")
    return rest, content, tuple(stop), tuple(stop_ids)


ALLOWED = {
    "prompt": "text, a list of texts, a list of token ids, or a list of such lists",
    "messages": 'a list of {"role": text, "content": text}, at least one',
}


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or (_all(prompt, int) and prompt):
        return [prompt]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(p, str) or _all(p, int) for p in prompt):
        raise InputError(f"prompt: {_short(prompt)}; allowed: {ALLOWED['prompt']}")
    return prompt


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"messages: {_short(messages)}; allowed: {ALLOWED['messages']}")
    found = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{i}]: {_short(message)}; allowed: an object with role and content")
        extra = sorted(message.keys() - {"role", "content", "name"})
        if extra:
            raise InputError(f"messages[{i}].{extra[0]}: no such key; allowed: role, content, name")
        found.append({**message, "content": _content(message.get("content"), i)})
    return found


def _content(content: Any, i: int) -> str:
    """Text as it stands, or the texts of OpenAI's parts, one after the other."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InputError(f"messages[{i}].content: {_short(content)}; allowed: text, or parts of type text")
        texts.append(text)
    return "".join(texts)


def _tokens(prompt: str | list[int], served: Served, name: str) -> tuple[str, np.ndarray]:
    ids = served.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    outside = next((i for i in ids if not 0 <= i < served.vocab_size), None)
    if outside is not None:
        raise InputError(f"{name}: token id {outside}; from 0 to {served.vocab_size - 1} allowed")
    if not 0 < len(ids) <= served.max_prompt_tokens:
        raise InputError(f"{name}: {len(ids)} tokens; from 1 to {served.max_prompt_tokens} allowed")
    return prompt if isinstance(prompt, str) else "", np.asarray(ids, np.int32)


def _call(
    fields: Fields,
    prompts: Sequence[tuple[str, np.ndarray]],
    stop: tuple[str, ...],
    stop_ids: tuple[int, ...],
    shown: int | None,
    served: Served,
    limit: int | None,
    chat: bool,
) -> Call:
    own = served.sampling
    stop_ids = tuple(dict.fromkeys((*own.stop_ids, *stop_ids)))
    _check(fields, shown, limit, stop_ids, served)
    sampling = dataclasses.replace(
        own,
        temperature=own.temperature if fields.temperature is None else fields.temperature,
        top_p=own.top_p if fields.top_p is None else fields.top_p,
        top_k=own.top_k if fields.top_k is None else fields.top_k,
        max_response_tokens=limit or own.max_response_tokens,
        stop_ids=stop_ids,
        stop_strings=stop,
    )
    seed = secrets.randbelow(SEEDS) if fields.seed is None else fields.seed
    requests = []
    for index, (text, tokens) in enumerate(prompts):
        prompt, group = Prompt(index, text, "", tokens), next(served.groups)
        seeds = [(seed + index * fields.n + sample) % SEEDS for sample in range(fields.n)]
        requests += [Request(prompt, group, one, sampling) for one in seeds]
    return Call(fields, tuple(requests), stop, shown, chat)


def _check_count(fields: Fields, prompts: int) -> None:
    if prompts * fields.n > RESPONSES:
        raise InputError(f"n: {fields.n} for each of {prompts} prompts; allowed: {RESPONSES} responses in all")


def _check(fields: Fields, shown: int | None, limit: int | None, stop_ids: tuple[int, ...], served: Served) -> None:
    """What the bounds of this server say about fields that are right by themselves; the engine checks the rest."""
    if fields.model not in (None, served.model):
        raise UnknownModel(f"model: {fields.model!r}; allowed: {served.model!r}, the one served")
    if shown is not None and shown > served.topk:
        name = "top_logprobs" if isinstance(fields, ChatFields) else "logprobs"
        raise InputError(f"{name}: {shown}; allowed: at most {served.topk}, as many as the engine records")
    if limit is not None and limit > served.sampling.max_response_tokens:
        raise InputError(f"max_tokens: {limit}; allowed: at most {served.sampling.max_response_tokens}")
    outside = next((i for i in stop_ids if not 0 <= i < served.vocab_size), None)
    if outside is not None:
        raise InputError(f"stop_token_ids: {outside}; allowed: from 0 to {served.vocab_size - 1}")
    if len(stop_ids) > MAX_STOP_IDS:
        raise InputError(f"stop_token_ids: {len(stop_ids)} with the model's own; allowed: at most {MAX_STOP_IDS}")


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is kind for value in values)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."

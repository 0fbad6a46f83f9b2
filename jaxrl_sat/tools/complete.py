"""Asks a server for a completion and prints it as it comes.

    python -m jaxrl_sat.tools.complete --url=http://127.0.0.1:8000 [--chat] [--logprobs] "17+25="

Works with `python -m jaxrl_sat.sampler.serve` and anything else that speaks OpenAI's protocol. A prompt of "-" is read
from standard input. Exit status 2 with one line where the server refuses or cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_sat.types import InputError

END = "[DONE]"


def complete(url: str, call: dict[str, Any], chat: bool, token: str | None = None) -> Iterator[dict[str, Any]]:
    """The events of a streamed call, one after the other. Raises `InputError` with what the server said."""
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/{'chat/completions' if chat else 'completions'}"
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        request = urllib.request.Request(address, json.dumps(call | {"stream": True}).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                name, _, content = line.decode().strip().partition(": ")
                if name == "data" and content != END:
                    yield _event(json.loads(content))
    except urllib.error.HTTPError as error:
        raise InputError(
            f"{address}: status {error.code}, {_said(error.read())}; allowed: what the server takes"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"--url: {address} cannot be used ({error}); allowed: the address of a server") from error


def _event(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise InputError(f"the server failed: {event['error'].get('message')}; allowed: to try again")
    return event


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def _call(given: argparse.Namespace) -> dict[str, Any]:
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    call: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if given.chat else {"prompt": prompt}
    if given.logprobs:
        call["logprobs"] = True if given.chat else 0
    for name in ("max_tokens", "temperature", "top_p", "seed", "stop"):
        if getattr(given, name) is not None:
            call[name] = getattr(given, name)
    return call


def _print(event: dict[str, Any], chat: bool, logprobs: bool) -> None:
    """The text of an event; with `logprobs` a line a token instead."""
    for choice in event["choices"]:
        found = choice.get("logprobs")
        if not logprobs:
            print(choice["delta"].get("content", "") if chat else choice["text"], end="", flush=True)
        elif found and chat:
            print(*(f"{entry['logprob']:9.4f}  {entry['token']!r}" for entry in found["content"]), sep="\n", flush=True)
        elif found:
            pairs = zip(found["token_logprobs"], found["tokens"], strict=True)
            print(*(f"{logp:9.4f}  {token!r}" for logp, token in pairs), sep="\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--token-file", type=Path, help="file with the token that the server asks for")
    parser.add_argument("--chat", action="store_true", help="the prompt is what a user says, in the model's template")
    parser.add_argument("--logprobs", action="store_true", help="print each token with its log-prob")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="a string that ends the text; may be given several times")
    parser.add_argument("prompt", help="text; - reads it from standard input")
    given = parser.parse_args(arguments)
    try:
        token = given.token_file.read_text().strip() if given.token_file else None
        for event in complete(given.url, _call(given), given.chat, token):
            _print(event, given.chat, given.logprobs)
    except (InputError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if not given.logprobs:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a server does with calls it cannot serve: an answer that names the field, and it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from jaxrl_sat.sampler import SamplerService
from jaxrl_sat.serving import http
from jaxrl_sat.serving.http import make_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"prompt": [4, 7, 5], "max_tokens": 2}
TOKEN = "a-token-of-enough-length"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as client:
        yield client


def refused(answer: httpx2.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["message"]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"prompt": []}, "prompt", "prompt: []; allowed: text, a list of texts"),
        ({"prompt": ""}, "prompt", "prompt: 0 tokens; from 1 to 16 allowed"),
        ({"prompt": [5] * 17}, "prompt", "prompt: 17 tokens; from 1 to 16 allowed"),
        ({"prompt": [4, 23]}, "prompt", "prompt: token id 23; from 0 to 22 allowed"),
        ({"prompt": [4, -1]}, "prompt", "prompt: token id -1; from 0 to 22 allowed"),
        ({"prompt": [4, 10**30]}, "prompt", "prompt: token id 1000"),
        ({"prompt": "1 2"}, "prompt", "prompt: token id 23; from 0 to 22 allowed"),
        ({"prompt": [4, True]}, "prompt", "prompt: [4, true]; allowed: text"),
        ({"prompt": {"text": "1"}}, "prompt", 'prompt: {"text": "1"}; allowed: text'),
        ({"prompt": None}, "prompt", "prompt: missing; allowed: text"),
        ({"temperature": -0.5}, "temperature", "temperature: -0.5; allowed: a number, 0 or more"),
        ({"temperature": "hot"}, "temperature", "temperature: 'hot'; allowed: a number"),
        ({"top_p": 0}, "top_p", "top_p: 0.0; allowed: a number, above 0, at most 1"),
        ({"top_p": 1.5}, "top_p", "top_p: 1.5; allowed: a number, above 0, at most 1"),
        ({"top_k": -2}, "top_k", "top_k: -2; allowed: a whole number, -1 or more"),
        ({"top_k": 24}, "top_k", "top_k: 24; 0 or -1 for all words, or up to 23"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: 0; allowed: a whole number, 1 or more"),
        ({"max_tokens": 9}, "max_tokens", "max_tokens: 9; allowed: at most 8"),
        ({"n": 0}, "n", "n: 0; allowed: a whole number, 1 or more"),
        ({"n": 128, "prompt": [[5]] * 9}, "n", "n: 128 for each of 9 prompts; allowed: 1024 responses"),
        ({"n": 128, "prompt": ["1 2"] * 9}, "n", "n: 128 for each of 9 prompts"),  # before they are encoded
        ({"seed": 0.5}, "seed", "seed: 0.5; allowed: a whole number"),
        ({"logprobs": 6}, "logprobs", "logprobs: 6; allowed: at most 5"),
        ({"logprobs": True}, "logprobs", "logprobs: True; allowed: a whole number"),
        ({"stream": 1}, "stream", "stream: 1; allowed: true or false"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "stream_options.usage: no such key"),
        ({"stop": [""]}, "stop", 'stop: [""]; allowed: up to 16 strings'),
        ({"stop": 5}, "stop", "stop: 5; allowed: up to 16 strings"),
        ({"stop_token_ids": [23]}, "stop_token_ids", "stop_token_ids: 23; allowed: from 0 to 22"),
        ({"stop_token_ids": list(range(9))}, "stop_token_ids", "stop_token_ids: 9 with the model's own"),
        ({"temprature": 1}, "temprature", "temprature: no such key; did you mean temperature?"),
        ({"echo": True}, "echo", "echo: true; allowed: false, as it is not served"),
        ({"logit_bias": {"5": 1}}, "logit_bias", 'logit_bias: {"5": 1}; allowed: {}'),
    ],
)
def test_a_bad_completion_names_its_field(client, change, param, message):
    status, named, text = refused(client.post(COMPLETIONS, json=GOOD | change))
    assert (status, named) == (400, param)
    assert text.startswith(message)


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        ({}, "messages", "messages: missing; allowed: a list of"),
        ({"messages": []}, "messages", "messages: []; allowed: a list of"),
        ({"messages": ["hi"]}, "messages[0]", 'messages[0]: "hi"; allowed: an object with role and content'),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content: null; allowed: text"),
        (
            {"messages": [{"role": "user", "content": "1", "tool": 1}]},
            "messages[0].tool",
            "messages[0].tool: no such key",
        ),
        ({"messages": [{"role": "system", "content": "1"}]}, "messages", "messages: only user and assistant speak"),
        (
            {"messages": [{"role": "user", "content": "1" * 14}]},
            "messages",
            "messages: 17 tokens; from 1 to 16 allowed",
        ),
        (
            {"messages": [{"role": "user", "content": "1"}], "top_logprobs": 2},
            "top_logprobs",
            "top_logprobs: 2 without",
        ),
    ],
)
def test_a_bad_chat_names_its_field(client, call, param, message):
    status, named, text = refused(client.post(CHAT, json=call))
    assert (status, named) == (400, param)
    assert text.startswith(message) and "/" not in text.partition(";")[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": ', "body: not JSON (Expecting value"),
        (b"[1]", "body: a JSON list; allowed: a JSON object"),
        (b'{"prompt": [1], "temperature": NaN}', "body: not JSON (NaN is not JSON)"),
        (b'{"prompt": "\\ud800"}', "body: not JSON ('utf-8' codec can't encode"),
        (b'{"prompt": "\xff"}', "body: not JSON ('utf-8' codec can't decode"),
        (b"[" * 10**5, "body: not JSON (maximum recursion depth"),
    ],
)
def test_a_body_that_is_no_json_object(client, body, message):
    status, param, text = refused(client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}))
    assert (status, param) == (400, None)
    assert text.startswith(message)


def test_bodies_of_another_kind_and_size(client, monkeypatch):
    assert refused(client.post(COMPLETIONS, data={"prompt": "1"}))[0] == 415
    monkeypatch.setattr(http, "BODY_BYTES", 100)
    status, _, text = refused(client.post(COMPLETIONS, json=GOOD | {"user": "x" * 100}))
    assert (status, text) == (413, "body: over 100 bytes; allowed: at most that many")
    assert client.post(COMPLETIONS, json=GOOD).status_code == 200


def test_other_addresses_and_methods(client):
    assert refused(client.get("/v2"))[0] == 404
    assert refused(client.get(COMPLETIONS))[0] == 405
    assert refused(client.post(COMPLETIONS, json=GOOD | {"model": "other"}))[:2] == (404, "model")


def test_without_a_token_only_the_loopback_may_be_named(client):
    assert refused(client.get("/v1/models", headers={"host": "rebound.example:80"}))[0] == 403
    assert client.get("/v1/models", headers={"host": "LOCALHOST"}).status_code == 200


def test_with_a_token_calls_must_bear_it(service, served, serve):
    with serve(make_app(service, served, TOKEN)) as url, httpx2.Client(base_url=url) as client:
        for headers in (
            {},
            {"authorization": TOKEN},
            {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": "Bearer"},
        ):
            answer = client.post(COMPLETIONS, json=GOOD, headers=headers)
            assert refused(answer)[:2] == (401, "authorization") and answer.headers["www-authenticate"] == "Bearer"
        right = {"authorization": f"Bearer {TOKEN}", "host": "any.example"}
        assert client.post(COMPLETIONS, json=GOOD, headers=right).status_code == 200
        assert client.get("/health").json()["ok"]


class Held:
    """An engine's dispatches, held up until told to go on; an error given instead is raised once."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch):
        self.go = threading.Event()
        self.reached = threading.Event()
        self.error: Exception | None = None
        advance = engine.advance

        def held(*args: Any) -> Any:
            self.reached.set()
            self.go.wait(60)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return advance(*args)

        monkeypatch.setattr(engine, "advance", held)


@pytest.fixture
def held(engine, monkeypatch) -> Iterator[Held]:
    held = Held(engine, monkeypatch)
    yield held
    held.go.set()


def test_too_many_at_once_are_told_so(engine, holder, served, serve, held):
    with SamplerService([engine], [holder], waiting_limit=2) as service, serve(make_app(service, served)) as url:
        with httpx2.Client(base_url=url, timeout=60) as client:
            status, param, text = refused(client.post(COMPLETIONS, json=GOOD | {"n": 3}))
            assert (status, param, text) == (400, "n", "n: 3 responses at once; allowed: 2 or fewer may wait")
            answers: list[int] = []
            threads = []
            for count in (1, 2, 2):  # one starts an engine that is held up, two wait, for two more there is no room
                call = lambda n=count: answers.append(client.post(COMPLETIONS, json=GOOD | {"n": n}).status_code)  # noqa: E731
                threads.append(threading.Thread(target=call))
                threads[-1].start()
                held.reached.wait(60)
                while count == 2 and not answers and service.health().waiting < 2:
                    time.sleep(0.01)
            threads[-1].join()
            assert answers == [429]
            held.go.set()
            for thread in threads:
                thread.join()
            assert sorted(answers) == [200, 200, 429]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_cancels_its_request(url, service, held, monkeypatch, streamed):
    tickets: list[Any] = []
    submit = service.submit_all
    monkeypatch.setattr(service, "submit_all", lambda *a, **k: tickets.extend(submit(*a, **k)) or tickets[-2:])
    with pytest.raises(httpx2.ReadTimeout), httpx2.Client(base_url=url, timeout=1) as client:
        with client.stream("POST", COMPLETIONS, json={"prompt": [5], "n": 2, "stream": streamed}) as answer:
            held.reached.wait(60)
            list(answer.iter_lines())
    while any(ticket.ended is None for ticket in tickets):
        time.sleep(0.01)
    held.go.set()
    for rollout in (ticket.result(60.0) for ticket in tickets):  # the dispatch under way may still end one
        assert len(rollout.tokens) <= 1 and rollout.finish_reason in ("cancelled", "stop")
    assert httpx2.post(f"{url}{COMPLETIONS}", json=GOOD, timeout=60).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_dispatch_that_fails_is_told_and_the_next_call_served(client, held, streamed):
    held.error = RuntimeError("the device is unwell")
    held.go.set()
    answer = client.post(COMPLETIONS, json=GOOD | {"stream": streamed})
    if streamed:
        assert answer.status_code == 200 and '"message": "' in answer.text and "the device is unwell" in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.status_code == 500 and "the device is unwell" in answer.json()["error"]["message"]
    assert client.post(COMPLETIONS, json=GOOD).status_code == 200

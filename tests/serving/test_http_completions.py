"""OpenAI's own client against the server: what it is told is what the direct loop samples and a forward pass says."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from jaxrl_sat.sampler import generate
from jaxrl_sat.types import Prompt, Request, Rollout
from tests.sampler import tiny_policy as tiny

PROMPT = [4, 7, 16, 8, 5]
TEXT = "<user>1+2<assistant>"
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def direct(engine, holder) -> Any:
    """Rollouts of the loop itself: `direct(ids, seed, ...)`, with what the request changes."""

    def sample(ids: list[int], *seeds: int, **changes: Any) -> list[Rollout]:
        prompt = Prompt(0, "", "", np.asarray(ids, np.int32))
        sampling = dataclasses.replace(engine.sampling, **changes)
        return generate(engine, holder, [Request(prompt, 0, seed, sampling) for seed in seeds])

    return sample


def long_seed(direct: Any, tokenizer: Any, ids: list[int], characters: int) -> int:
    """A seed whose response has that much text."""
    rollouts = direct(ids, *range(40))
    return next(s for s, r in enumerate(rollouts) if len(tokenizer.decode(r.tokens)) >= characters)


def test_a_completion_is_what_the_direct_loop_samples(client, direct, tokenizer):
    [rollout] = direct(PROMPT, 11)
    answer = client.completions.create(model="tiny", prompt=PROMPT, seed=11, extra_body=IDS)
    [choice] = answer.choices
    assert choice.model_extra["token_ids"] == rollout.tokens.tolist()
    assert choice.model_extra["prompt_token_ids"] == PROMPT
    assert choice.model_extra["weight_versions"] == [3] * len(rollout.tokens)
    assert choice.model_extra["prefill_version"] == 3
    assert choice.text == tokenizer.decode(rollout.tokens)
    assert choice.finish_reason == rollout.finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(rollout.tokens))


def test_prompts_and_samples_come_in_order_with_seeds_that_count_up(client, direct):
    other = [4, 9, 9, 5]
    answer = client.completions.create(model="tiny", prompt=[PROMPT, other], n=3, seed=2**32 - 2, extra_body=IDS)
    wanted = [*direct(PROMPT, 2**32 - 2, 2**32 - 1, 0), *direct(other, 1, 2, 3)]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.model_extra["token_ids"] for choice in answer.choices] == [r.tokens.tolist() for r in wanted]
    assert answer.usage.prompt_tokens == 9


def test_text_is_encoded_as_it_stands(client, direct):
    answer = client.completions.create(model="tiny", prompt=TEXT, seed=4, extra_body=IDS)
    [rollout] = direct(PROMPT, 4)
    assert answer.choices[0].model_extra["prompt_token_ids"] == PROMPT
    assert answer.choices[0].model_extra["token_ids"] == rollout.tokens.tolist()


def test_log_probs_equal_a_training_mode_forward(client, direct, tokenizer):
    [rollout] = direct(PROMPT, 5)
    logp, _ = tiny.recompute(tiny.params(), [rollout])
    exact = logp[0, len(PROMPT) - 1 :][: len(rollout.tokens)]
    found = client.completions.create(model="tiny", prompt=PROMPT, seed=5, logprobs=4).choices[0].logprobs
    assert [tokenizer.encode(word) for word in found.tokens] == [[i] for i in rollout.tokens]
    np.testing.assert_allclose(found.token_logprobs, exact[np.arange(len(exact)), rollout.tokens], atol=1e-4)
    for row, words in enumerate(found.top_logprobs):
        ids = [tokenizer.encode(word)[0] for word in words]
        np.testing.assert_allclose(list(words.values()), exact[row, ids], atol=1e-4)
        assert ids[:4] == np.argsort(-exact[row])[:4].tolist()
        assert set(ids[4:]) <= {rollout.tokens[row]}
    lengths = [len(tokenizer.decode([i])) for i in rollout.tokens]
    assert found.text_offset == [sum(lengths[:i]) for i in range(len(lengths))]


def test_a_chat_is_its_template(client, direct, tokenizer):
    messages = [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+2"}]}]
    ids = tokenizer.encode("<bos><user>1+2<assistant>")
    [rollout] = direct(ids, 6, temperature=0.5)
    logp, _ = tiny.recompute(tiny.params(), [rollout])
    sharp = 2 * logp[0, len(ids) - 1 :][: len(rollout.tokens)]
    exact = sharp - np.log(np.exp(sharp).sum(-1, keepdims=True))
    answer = client.chat.completions.create(
        model="tiny", messages=messages, seed=6, temperature=0.5, logprobs=True, top_logprobs=3, max_completion_tokens=8
    )
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", tokenizer.decode(rollout.tokens))
    assert choice.finish_reason == rollout.finish_reason
    content = choice.logprobs.content
    assert [tokenizer.encode(entry.token) for entry in content] == [[i] for i in rollout.tokens]
    assert [bytes(entry.bytes).decode() for entry in content] == [entry.token for entry in content]
    np.testing.assert_allclose([e.logprob for e in content], exact[np.arange(len(exact)), rollout.tokens], atol=1e-4)
    for row, entry in enumerate(content):
        np.testing.assert_allclose([e.logprob for e in entry.top_logprobs], -np.sort(-exact[row])[:3], atol=1e-4)


def test_greedy_and_limits(client, direct):
    prompt, greedy = next(
        ([i], one) for i in range(3, 23) for one in direct([i], 0, temperature=0.0) if one.finish_reason == "length"
    )
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt}
    for answer in (
        client.completions.create(**asked, temperature=0, extra_body=IDS),
        client.completions.create(**asked, temperature=3, extra_body={"top_k": 1, **IDS}),
        client.completions.create(**asked, temperature=3, top_p=1e-6, extra_body=IDS),
    ):
        assert answer.choices[0].model_extra["token_ids"] == greedy.tokens.tolist()
    stopped = int(greedy.tokens[1])
    two = client.completions.create(**asked, temperature=0, max_tokens=2, extra_body=IDS).choices[0]
    assert (two.model_extra["token_ids"], two.finish_reason) == (greedy.tokens[:2].tolist(), "length")
    ended = client.completions.create(**asked, temperature=0, extra_body={"stop_token_ids": [stopped], **IDS}).choices[
        0
    ]
    first = greedy.tokens.tolist().index(stopped) + 1
    assert (ended.model_extra["token_ids"], ended.finish_reason) == (greedy.tokens[:first].tolist(), "stop")


def test_routing_is_the_rollouts(client, direct):
    [rollout] = direct(PROMPT, 8)
    answer = client.completions.create(model="tiny", prompt=PROMPT, seed=8, extra_body={"return_routing": True})
    found = answer.choices[0].model_extra["routing"]
    ids = np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])
    np.testing.assert_array_equal(ids, rollout.expert_ids)


@pytest.mark.parametrize("streamed", [False, True])
def test_text_ends_before_a_stop_string(client, direct, tokenizer, streamed):
    seed = long_seed(direct, tokenizer, PROMPT, 4)
    whole = tokenizer.decode(direct(PROMPT, seed)[0].tokens)
    stop = [whole[2:4], "never"]
    asked = {"model": "tiny", "prompt": PROMPT, "seed": seed, "stop": stop}
    if streamed:
        parts = [choice for event in client.completions.create(**asked, stream=True) for choice in event.choices]
        text, reason = "".join(part.text for part in parts), parts[-1].finish_reason
    else:
        [choice] = client.completions.create(**asked).choices
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (whole[: whole.index(stop[0])], "stop")


def test_a_streamed_completion_is_the_whole_one(client):
    asked: dict[str, Any] = {"model": "tiny", "prompt": [PROMPT, [5]], "n": 2, "seed": 9, "logprobs": 2}
    whole = client.completions.create(**asked, extra_body=IDS)
    events = list(
        client.completions.create(**asked, extra_body=IDS, stream=True, stream_options={"include_usage": True})
    )
    assert events[-1].usage == whole.usage and events[-1].choices == []
    assert len({event.id for event in events}) == 1
    for choice in whole.choices:
        parts = [part for event in events for part in event.choices if part.index == choice.index]
        assert len(parts) > 1 and [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((getattr(p.logprobs, name) for p in parts if p.logprobs), []) == getattr(choice.logprobs, name)
        ids = [i for part in parts for i in part.model_extra.get("token_ids", [])]
        assert ids == choice.model_extra["token_ids"]


def test_a_streamed_chat_is_the_whole_one(client):
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "3*4"}], "seed": 3}
    [whole] = client.chat.completions.create(**asked, logprobs=True).choices
    parts = [e.choices[0] for e in client.chat.completions.create(**asked, logprobs=True, stream=True)]
    assert parts[0].delta.role == "assistant" and all(part.delta.role is None for part in parts[1:])
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert [entry for part in parts if part.logprobs for entry in part.logprobs.content] == whole.logprobs.content
    assert parts[-1].finish_reason == whole.finish_reason


def test_models(client):
    [model] = client.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == ("tiny", 16 + 8)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="model: 'other'; allowed: 'tiny'"):
        client.models.retrieve("other")

"""Whole rollouts, against one training-mode forward over the same tokens, and the scheduling that makes them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny_policy as tiny

from jaxrl_sat.sampler import RolloutEngine, Stopped, WeightHolder, generate
from jaxrl_sat.types import InputError, Prompt, Request, Rollout

LENGTHS = [3, 9, 17, 1, 20, 16, 5]  # two buckets, both ends, and more requests than slots


@pytest.fixture(scope="module")
def rollouts(engine: RolloutEngine) -> list[Rollout]:
    return generate(engine, engine.load_params(tiny.params(), 3), tiny.requests(LENGTHS, 3))


def test_order_and_shapes(rollouts):
    for rollout, request in zip(rollouts, tiny.requests(LENGTHS, 3), strict=True):
        assert (rollout.request.group, rollout.request.seed) == (request.group, request.seed)
        prompt, response = len(request.prompt.tokens), len(rollout.tokens)
        assert 1 <= response <= 6
        assert rollout.tokens.dtype == np.int32 and rollout.logp.dtype == np.float32
        assert rollout.topk.ids.shape == rollout.topk.logp.shape == (response, 5)
        assert rollout.nucleus_ids.shape == (response, 0)
        assert rollout.expert_ids.shape == (2, prompt + response - 1, 2)
        assert rollout.expert_ids.dtype == np.uint8 and rollout.expert_ids.flags.c_contiguous
        np.testing.assert_array_equal(rollout.versions, np.full(response, 3, np.int32))
        assert rollout.prefill_version == 3


def test_log_probs_top_k_and_routing_equal_a_forward(rollouts):
    logp, routing = tiny.recompute(tiny.params(), rollouts)
    for row, rollout in enumerate(rollouts):
        prompt, response = len(rollout.request.prompt.tokens), len(rollout.tokens)
        exact = logp[row, prompt - 1 : prompt + response - 1]
        np.testing.assert_allclose(rollout.logp, exact[np.arange(response), rollout.tokens], atol=1e-5)
        np.testing.assert_array_equal(rollout.topk.ids, np.argsort(-exact, axis=-1)[:, :5])
        np.testing.assert_allclose(rollout.topk.logp, -np.sort(-exact, axis=-1)[:, :5], atol=1e-5)
        np.testing.assert_array_equal(rollout.expert_ids, routing[:, row, : prompt + response - 1])


def test_finish_reasons(rollouts):
    reasons = [rollout.finish_reason for rollout in rollouts]
    assert set(reasons) == {"stop", "length"}
    for rollout in rollouts:
        assert tiny.STOP not in rollout.tokens[:-1]
        stopped = rollout.tokens[-1] == tiny.STOP
        assert rollout.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(rollout.tokens) == 6


def test_same_seed_same_tokens_alone_or_in_company(engine, rollouts):
    """Alone every request runs in slot 0; in company these ran in others, beside others, after others."""
    weights = engine.load_params(tiny.params(), 3)
    for index in (0, 4, 10, 13, 20):
        [alone] = generate(engine, weights, [rollouts[index].request])
        np.testing.assert_array_equal(alone.tokens, rollouts[index].tokens)
        np.testing.assert_allclose(alone.logp, rollouts[index].logp, atol=1e-6)
        np.testing.assert_array_equal(alone.expert_ids, rollouts[index].expert_ids)


def test_other_seeds_other_tokens(rollouts):
    assert len({rollout.tokens.tobytes() for rollout in rollouts[:3]}) > 1


def test_a_group_shares_one_prefill(engine, monkeypatch):
    read = []
    prefill = engine.prefill_prompts
    monkeypatch.setattr(engine, "prefill_prompts", lambda w, p: read.append([len(t) for t in p]) or prefill(w, p))
    generate(engine, engine.load_params(tiny.params()), tiny.requests(LENGTHS, 3))
    assert sorted(read) == [[3, 9, 1, 16, 5], [17, 20]]  # each prompt once, one dispatch a bucket


def test_nothing_compiles_after_each_bucket_was_seen(engine):
    weights = engine.load_params(tiny.params())
    for lengths in ([1, 20], [20], [1]):
        generate(engine, weights, tiny.requests(lengths, 4))
    before = dict(engine.compilations)
    for lengths in ([7, 19], [18], [2], [11, 3]):
        generate(engine, weights, tiny.requests(lengths, 4))
    assert dict(engine.compilations) == before
    assert before["advance"] == 1 and before["prefill"] == len(engine.buckets) == 2
    assert before["insert"] <= 2 * 3


def test_temperature_zero_is_the_greedy_loop(engine):
    weights = engine.load_params(tiny.params())
    requests = tiny.requests([4, 11, 18], 2)
    greedy = generate(engine, weights, requests, temperature=0.0)
    logp, _ = tiny.recompute(tiny.params(), greedy)
    for row, rollout in enumerate(greedy):
        prompt, response = len(rollout.request.prompt.tokens), len(rollout.tokens)
        exact = logp[row, prompt - 1 : prompt + response - 1]
        np.testing.assert_array_equal(rollout.tokens, exact.argmax(-1))
        np.testing.assert_allclose(rollout.logp, exact.max(-1), atol=1e-5)
    for a, b in zip(greedy[::2], greedy[1::2], strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


def test_temperature_divides_the_logits(engine):
    [rollout] = generate(engine, engine.load_params(tiny.params()), tiny.requests([9], 1), temperature=0.5)
    logp, _ = tiny.recompute(tiny.params(), [rollout])
    response = len(rollout.tokens)
    scaled = 2 * logp[0, 8 : 8 + response]
    exact = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    np.testing.assert_allclose(rollout.logp, exact[np.arange(response), rollout.tokens], atol=1e-5)


def test_swapped_weights_stamp_later_tokens(engine):
    """Swap after two steps: two tokens of version 4, the rest of version 5, sampled over a cache begun by 4."""
    old, new = engine.load_params(tiny.params(0), 4), engine.load_params(tiny.params(1), 5)
    holder, steps = WeightHolder(old), []

    def swap_after_two_steps() -> bool:
        steps.append(1)
        if len(steps) == 3:
            holder.swap(new)
        return False

    requests = tiny.requests([6, 6], 4)
    swapped = generate(engine, holder, requests, should_stop=swap_after_two_steps)
    plain = generate(engine, old, requests)
    for mixed, pure in zip(swapped, plain, strict=True):
        assert mixed.prefill_version == 4
        np.testing.assert_array_equal(mixed.versions, [4, 4, 5, 5, 5, 5][: len(mixed.versions)])
        np.testing.assert_array_equal(mixed.tokens[:2], pure.tokens[:2])
        np.testing.assert_array_equal(mixed.logp[:2], pure.logp[:2])
    assert any(not np.array_equal(m.logp[2:], p.logp[2:]) for m, p in zip(swapped, plain, strict=True))


@pytest.mark.parametrize("keep", [False, True])
def test_a_prompt_read_before_a_swap_is_read_again_unless_kept(engine, monkeypatch, keep):
    """Twelve samples of one prompt before eight slots: the last ones are put in after the swap."""
    monkeypatch.setattr(engine, "keep_cache_at_swap", keep)
    holder, after = WeightHolder(engine.load_params(tiny.params(0), 5)), engine.load_params(tiny.params(1), 6)
    turns = iter(range(100))

    def swap_at_the_second_turn() -> bool:
        if next(turns) == 1:
            holder.swap(after)
        return False

    seen = generate(engine, holder, tiny.requests([9], 12, seed=6), swap_at_the_second_turn)
    assert {rollout.prefill_version for rollout in seen[:8]} == {5}
    assert {rollout.prefill_version for rollout in seen[8:]} == {5 if keep else 6}


def test_loaded_weights_outlive_the_arrays_they_came_from(engine):
    given = jax.device_put(tiny.params(), jax.devices()[0])
    weights = engine.load_params(given)
    jax.tree.map(lambda leaf: leaf.delete(), given)
    [rollout] = generate(engine, weights, tiny.requests([5], 1))
    logp, _ = tiny.recompute(tiny.params(), [rollout])
    np.testing.assert_allclose(rollout.logp[0], logp[0, 4, rollout.tokens[0]], atol=1e-5)


def test_stops_within_a_step(engine, monkeypatch):
    steps = []
    step = engine.advance
    monkeypatch.setattr(engine, "advance", lambda w, s: steps.append(1) or step(w, s))
    with pytest.raises(Stopped):
        generate(engine, engine.load_params(tiny.params()), tiny.requests([5], 8), lambda: len(steps) == 2)
    assert len(steps) == 2


@pytest.mark.parametrize("order", ["longest", "shortest"])
def test_the_order_of_the_slots_changes_no_rollout(engine, rollouts, order):
    requests = [rollout.request for rollout in rollouts]
    again = generate(engine, engine.load_params(tiny.params(), 3), requests, order=order)
    for one, other in zip(again, rollouts, strict=True):
        assert one.request is other.request
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_no_requests(engine):
    assert generate(engine, engine.load_params(tiny.params()), []) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros(0, np.int32), "prompt 7: 0 tokens; from 1 to 20 allowed"),
        (np.full(21, 5, np.int32), "prompt 7: 21 tokens; from 1 to 20 allowed"),
        (np.array([3, 23], np.int32), "prompt 7: token id 23; from 0 to 22 allowed"),
        (np.array([-1, 3], np.int32), "prompt 7: token id -1; from 0 to 22 allowed"),
    ],
)
def test_prompts_that_cannot_be_read(engine, tokens, message):
    with pytest.raises(InputError) as caught:
        generate(engine, engine.load_params(tiny.params()), [Request(Prompt(7, "", "", tokens), 0, 0)])
    assert str(caught.value) == message

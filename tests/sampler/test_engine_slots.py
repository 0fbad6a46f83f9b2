"""Each slot by its own sampling, released slots, and several steps in one dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tiny_policy as tiny

from jaxrl_sat.sampler import RolloutEngine, Weights
from jaxrl_sat.sampler.record import LENGTH, STOP, Fields
from jaxrl_sat.types import InputError, Prompt, Request, SamplingParams

PLAIN = SamplingParams(1.0, 6, (tiny.STOP,))
ASKED = [
    PLAIN,
    dataclasses.replace(PLAIN, temperature=0.0, max_response_tokens=3),
    dataclasses.replace(PLAIN, top_k=2, stop_ids=()),
    dataclasses.replace(PLAIN, top_p=0.5, stop_ids=(7, 11, tiny.STOP)),
    dataclasses.replace(PLAIN, temperature=0.6, max_response_tokens=1),
]


@pytest.fixture(scope="module")
def several() -> RolloutEngine:
    return tiny.engine(nucleus=7, restricted=True, steps_per_dispatch=4)


@pytest.fixture(scope="module")
def weights(several: RolloutEngine) -> Weights:
    return several.load_params(tiny.params(), 3)


def started(engine: RolloutEngine, weights: Weights, slots: list[int], asked: list[SamplingParams]) -> Any:
    """Prompts 0, 1, ... in `slots`, each by its own sampling."""
    requests = tiny.requests([3, 9, 14, 5, 12], 1)[: len(asked)]
    prefix = engine.prefill_prompts(weights, [r.prompt.tokens for r in requests])
    seeds = [r.seed for r in requests]
    return engine.insert_rows(prefix, engine.init_decode_state(), list(range(len(asked))), slots, seeds, asked)


def dispatched(engine: RolloutEngine, weights: Weights, state: Any, times: int) -> Fields:
    """All records of several dispatches, [steps, S, ...]."""
    records = []
    for _ in range(times):
        state, data = engine.advance(weights, state)
        records.append(np.asarray(data))
    return engine.records.unpack(np.concatenate(records))


def response(fields: Fields, slot: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens, their log-probs and how the response in a slot finished."""
    valid = fields.valid[:, slot] > 0
    return fields.tokens[valid, slot], fields.logp[valid, slot], int(fields.finish[:, slot].max())


def test_each_slot_goes_by_its_own_sampling(several, weights):
    fields = dispatched(several, weights, started(several, weights, [6, 1, 3, 0, 4], ASKED), 2)
    for slot, asked in zip([6, 1, 3, 0, 4], ASKED, strict=True):
        tokens, _, finish = response(fields, slot)
        stopped = tokens[-1] in asked.stop_ids
        assert finish == (STOP if stopped else LENGTH)
        assert stopped or len(tokens) == asked.max_response_tokens
        assert not set(tokens[:-1].tolist()) & set(asked.stop_ids)
        words = (fields.nucleus_ids[: len(tokens), slot] >= 0).sum(axis=-1)
        assert (words == (0 if asked.top_k < 1 and asked.top_p == 1 else 2 if asked.top_k == 2 else words)).all()
    greedy = fields.topk_ids[:3, 1, 0]
    np.testing.assert_array_equal(response(fields, 1)[0], greedy[: len(response(fields, 1)[0])])


def test_neighbours_by_other_sampling_change_nothing(several, weights):
    """Bit for bit, each request alone in another slot."""
    together = dispatched(several, weights, started(several, weights, [6, 1, 3, 0, 4], ASKED), 2)
    for index, slot in [(0, 6), (3, 0)]:
        request = tiny.requests([3, 9, 14, 5, 12], 1)[index]
        prefix = several.prefill_prompts(weights, [request.prompt.tokens])
        state = several.insert_rows(prefix, several.init_decode_state(), [0], [2], [request.seed], [ASKED[index]])
        alone = dispatched(several, weights, state, 2)
        for one, many in zip(response(alone, 2), response(together, slot), strict=True):
            np.testing.assert_array_equal(one, many)


def test_several_steps_in_a_dispatch_are_the_same_steps(several, weights):
    """Bit for bit those of JetStream's `generate`, in order; after the last slot finished none is taken."""
    many = dispatched(several, weights, started(several, weights, [5, 2], ASKED[:2]), 2)
    state = started(several, weights, [5, 2], ASKED[:2])
    for step in range(6):
        state, result = several.generate(weights, state)
        single = result.convert_to_numpy().fields
        for name, value in vars(single).items():
            at = single.valid > 0
            np.testing.assert_array_equal(getattr(many, name)[step][at], value[at], err_msg=name)
        np.testing.assert_array_equal(many.valid[step], single.valid)
    assert not np.asarray(many.valid[6:]).any() and not np.asarray(many.versions[6:]).any()


def test_a_released_slot_is_silent_and_its_neighbours_go_on(several, weights):
    plain = dispatched(several, weights, started(several, weights, [5, 2, 7], ASKED[:3]), 2)
    state = several.release(started(several, weights, [5, 2, 7], ASKED[:3]), [5])
    fields = dispatched(several, weights, state, 2)
    assert not fields.valid[:, 5].any()
    for slot in (2, 7):
        np.testing.assert_array_equal(response(fields, slot)[0], response(plain, slot)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1e-39}, "temperature: 1e-39; 0, or a number of a size that float32 holds, needed"),
        ({"temperature": 1e39}, "temperature: 1e+39; 0, or a number of a size that float32 holds, needed"),
        ({"temperature": -1.0}, "temperature: -1.0; a finite number of at least 0 needed"),
        ({"top_p": 0.0}, "top_p: 0.0; above 0 and at most 1 needed"),
        ({"top_k": 8}, "top_k: 8; 0 or -1 for all words, or up to 7, the words of a nucleus allowed"),
        ({"top_k": -2}, "top_k: -2; 0 or -1 for all words, or up to 7, the words of a nucleus allowed"),
        ({"max_response_tokens": 7}, "max_response_tokens: 7; from 1 to 6 allowed"),
        ({"stop_ids": (23,)}, "stop id: 23; from 0 to 22 allowed"),
        ({"stop_ids": tuple(range(9))}, "stop_ids: 9 of them; at most 8 allowed"),
    ],
)
def test_requests_that_cannot_be_served(several, changes, message):
    prompt = Prompt(7, "", "", np.array([3], np.int32))
    several.check(Request(prompt, 0, 0, ASKED[2]))
    with pytest.raises(InputError) as caught:
        several.check(Request(prompt, 0, 0, dataclasses.replace(PLAIN, **changes)))
    assert str(caught.value) == message


def test_an_engine_without_nuclei_refuses_what_needs_one(engine):
    prompt = Prompt(7, "", "", np.array([3], np.int32))
    engine.check(Request(prompt, 0, 0, dataclasses.replace(PLAIN, top_k=-1)))
    for changes in ({"top_p": 0.9}, {"top_k": 1}):
        with pytest.raises(InputError, match=f"{next(iter(changes))}: .* allowed"):
            engine.check(Request(prompt, 0, 0, dataclasses.replace(PLAIN, **changes)))

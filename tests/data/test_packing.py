"""Packing loses nothing, splits nothing, and keeps every array at the token it is about."""

import numpy as np
import pytest

from jaxrl_sat.data import packing
from jaxrl_sat.types import InputError, Prompt, Request, Rollout, TopK


def make_rollout(rng: np.random.Generator, prompt_length: int, response_length: int) -> Rollout:
    prompt = Prompt(0, "", "", rng.integers(1, 50, prompt_length).astype(np.int32))
    return Rollout(
        request=Request(prompt, 0, 0),
        tokens=rng.integers(1, 50, response_length).astype(np.int32),
        logp=-rng.random(response_length).astype(np.float32),
        topk=TopK(np.zeros((response_length, 2), np.int32), np.zeros((response_length, 2), np.float32)),
        nucleus_ids=np.zeros((response_length, 0), np.int32),
        expert_ids=rng.integers(0, 8, (3, prompt_length + response_length - 1, 2)).astype(np.uint8),
        versions=rng.integers(1, 9, response_length).astype(np.int32),
        prefill_version=0,
        finish_reason="stop",
    )


def test_every_response_comes_back_whole():
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(rng, int(rng.integers(1, 9)), int(rng.integers(1, 9))) for _ in range(60)]
    advantages = rng.normal(size=60).astype(np.float32)
    batch = packing.pack(rollouts, advantages, row_tokens=24, microbatch_rows=4)
    found = []
    for row in range(batch.tokens.shape[0]):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            where = np.flatnonzero(batch.segment_ids[row] == segment)
            assert (np.diff(where) == 1).all()
            np.testing.assert_array_equal(batch.positions[row, where], np.arange(len(where)))
            active = where[batch.mask[row, where]]
            found.append(
                (
                    batch.tokens[row, where].tolist(),
                    batch.tokens[row, active].tolist(),
                    batch.behaviour_logp[row, active].tolist(),
                    set(batch.advantages[row, active].tolist()),
                    batch.versions[row, active].tolist(),
                    batch.routing.expert_ids[:, row, where[:-1]].tolist(),
                    batch.routing.valid[row, where].tolist(),
                )
            )
    expected = [
        (
            [*r.request.prompt.tokens.tolist(), *r.tokens.tolist()],
            r.tokens.tolist(),
            r.logp.tolist(),
            {float(a)},
            r.versions.tolist(),
            r.expert_ids.tolist(),
            [True] * r.expert_ids.shape[1] + [False],
        )
        for r, a in zip(rollouts, advantages, strict=True)
    ]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    padding = batch.segment_ids == 0
    assert not batch.mask[padding].any() and not batch.routing.valid[padding].any()
    assert int(batch.mask.sum()) == sum(len(r.tokens) for r in rollouts)


def test_rows_are_bucketed_multiples_of_the_microbatch():
    sizes = [packing.bucketed(n) for n in range(1, 30)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(n <= size < 1.5 * n + 1 for n, size in enumerate(sizes, 1))


def test_first_fit_fills_holes_and_respects_segment_limit():
    assert packing.place([5, 4, 3, 2, 6], 8, 16) == [[0, 2], [1, 3], [4]]
    assert packing.place([2, 2, 2, 2, 2], 100, 2) == [[0, 1], [2, 3], [4]]


def test_sequence_longer_than_a_row_is_named():
    with pytest.raises(InputError, match=r"learner\.row_tokens: a sequence of 9 tokens; allowed: 8"):
        packing.place([3, 9], 8, 4)

"""Long prompts piece by piece, pieces kept for other prompts, and caches read again after a swap."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import tiny_policy as tiny

from jaxrl_sat.layout import Layout
from jaxrl_sat.mesh import SAMPLER_RULES
from jaxrl_sat.sampler import RolloutEngine, Weights, generate
from jaxrl_sat.sampler.prefix_cache import PrefixCache
from jaxrl_sat.types import InputError, Prompt, Request, Rollout

PIECE_BYTES = 3 * 2 * 16 * 2 * 8 * 4 + 16 * 2 * 2
"""Three layers' keys and values of 16 tokens in float32, and a byte for each expert id."""

KEPT = {"prefill_chunk": 16, "prefix_cache_bytes": 4 * PIECE_BYTES + 1}


def engine(**changes: Any) -> RolloutEngine:
    return tiny.engine(slots=4, max_prompt_tokens=64, **({"prefill_chunk": 16} | changes))


@pytest.fixture(scope="module")
def reusing() -> RolloutEngine:
    return engine(**KEPT)


@pytest.fixture(scope="module")
def weights(reusing: RolloutEngine) -> Weights:
    return reusing.load_params(tiny.params(), 3)


def prompt(*parts: tuple[int, int]) -> np.ndarray:
    """Text put together of parts (seed, length)."""
    words = [np.random.default_rng(seed).integers(3, 23, length) for seed, length in parts]
    return np.concatenate(words).astype(np.int32)


def requests(*prompts: np.ndarray) -> list[Request]:
    return [Request(Prompt(i, "", "", tokens), i, 7 * i) for i, tokens in enumerate(prompts)]


def check_forced(rollouts: list[Rollout], weights: Any) -> None:
    """Log-probs, top-K and routing are those of one forward pass over the same tokens."""
    logp, routing = tiny.recompute(weights, rollouts, length=72)
    for row, rollout in enumerate(rollouts):
        before, response = len(rollout.request.prompt.tokens), len(rollout.tokens)
        exact = logp[row, before - 1 : before + response - 1]
        np.testing.assert_allclose(rollout.logp, exact[np.arange(response), rollout.tokens], atol=1e-4)
        np.testing.assert_allclose(rollout.topk.logp, -np.sort(-exact, axis=-1)[:, :5], atol=1e-4)
        np.testing.assert_array_equal(rollout.expert_ids, routing[:, row, : before + response - 1])


def same(one: Rollout, other: Rollout) -> None:
    for name in ("tokens", "logp", "expert_ids", "versions"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def read(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the pieces begin that are read from now on."""
    starts: list[int] = []
    chunk = engine.programs.chunk
    monkeypatch.setattr(engine.programs, "chunk", lambda p, x, start: starts.append(int(start)) or chunk(p, x, start))
    return starts


def test_long_prompts_and_reused_ones_equal_a_forward(reusing, weights, monkeypatch):
    """Lengths at and around the edges of pieces, up to the last position of the cache; the second time from the pool,
    bit for bit."""
    asked = requests(prompt((1, 33)), prompt((2, 48)), prompt((3, 64)))
    first = [generate(reusing, weights, [one])[0] for one in asked]
    check_forced(first, tiny.params())
    starts = read(reusing, monkeypatch)
    same(generate(reusing, weights, [asked[2]])[0], first[2])
    assert starts == []  # all four pieces are there
    same(generate(reusing, weights, [asked[0]])[0], first[0])
    assert starts == [0, 16, 32]  # the pool has room for four


def test_what_two_prompts_begin_with_is_read_once(reusing, weights, monkeypatch):
    shared, starts = (11, 37), read(reusing, monkeypatch)
    asked = requests(prompt(shared, (12, 9)), prompt(shared, (13, 20)))
    rollouts = [generate(reusing, weights, [one])[0] for one in asked]
    assert starts == [0, 16, 32, 32, 48]
    check_forced(rollouts, tiny.params())
    assert [r.prefill_version for r in rollouts] == [3, 3]


def test_a_prefix_given_by_jetstream_is_not_read_again(reusing, weights, monkeypatch):
    whole = prompt((21, 50))
    before = reusing.prefill(params=weights, padded_tokens=np.pad(whole[:40], (0, 24)), true_length=40)
    starts = read(reusing, monkeypatch)
    both = reusing.prefill(params=weights, existing_prefix=before, padded_tokens=whole[40:], true_length=10)
    assert starts == [32, 48]
    [alone] = generate(reusing, weights, requests(whole))
    state, logp = reusing.insert(both, reusing.init_decode_state(), 2, seed=0), []
    for _ in alone.tokens:
        state, data = reusing.advance(weights, state)
        logp.append(reusing.records.unpack(np.asarray(data)).logp[0, 2])
    np.testing.assert_array_equal(logp, alone.logp)


def test_other_weights_forget_what_was_kept(reusing, weights, monkeypatch):
    one, starts = requests(prompt((31, 40))), read(reusing, monkeypatch)
    generate(reusing, weights, one)
    new = reusing.load_params(tiny.params(1), 4)
    check_forced(generate(reusing, new, one), tiny.params(1))
    assert starts == [0, 16, 32] * 2


def test_told_to_keep_it_says_who_read_the_oldest_part(weights, monkeypatch):
    keeping = engine(**KEPT, keep_cache_at_swap=True)
    shared = (41, 32)
    keeping.prefill_prompts(weights, [prompt(shared, (42, 8))])
    starts, new = read(keeping, monkeypatch), keeping.load_params(tiny.params(1), 4)
    prefix = keeping.prefill_prompts(new, [prompt(shared, (43, 30))])
    assert starts == [32, 48] and prefix.versions[0] == 3
    assert keeping.prefill_prompts(new, [prompt((44, 40))]).versions[0] == 4


def test_nothing_compiles_after_each_bucket_was_seen(reusing, weights):
    generate(reusing, weights, requests(prompt((51, 64)), prompt((52, 20)), prompt((53, 5))))
    before = dict(reusing.compilations)
    generate(reusing, weights, requests(prompt((54, 50)), prompt((55, 31)), prompt((52, 20)), prompt((56, 9))))
    after = dict(reusing.compilations)
    assert after.pop("insert") <= 2 * 3 and before.pop("insert")  # of one slot and of all, for each bucket
    assert after == before
    assert [before[name] for name in ("prefill", "begin", "chunk", "keep")] == [1, 2, 2, 2]  # of 16 whole, of 32, 64


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
def test_cut_over_a_mesh_pieces_are_the_same(weights, cache_dtype):
    layout = Layout.of(tiny.mesh(2, 1, 2, axes=("data", "expert", "tensor")), SAMPLER_RULES)
    whole, cut = engine(**KEPT, cache_dtype=cache_dtype), engine(**KEPT, cache_dtype=cache_dtype, layout=layout)
    asked = requests(prompt((61, 33)), prompt((62, 64)), prompt((61, 40)), prompt((63, 5)))
    loaded = cut.load_params(tiny.params(), 3)
    for array in jax.tree.leaves(cut.init_decode_state().cache):
        assert array.size == 4 * np.prod(array.sharding.shard_shape(array.shape))
    for one, other in zip(generate(whole, weights, asked), generate(cut, loaded, asked), strict=True):
        # In 8 bits a last bit of difference may move a number by a whole step.
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logp, other.logp, atol=1e-4 if cache_dtype == "float32" else 0.05)
        np.testing.assert_array_equal(one.expert_ids, other.expert_ids)


def test_a_cache_in_eight_bits_is_near(weights):
    """Measured: half the log-probs within 0.007, all within 0.05."""
    small = engine(cache_dtype="int8")
    rollouts = generate(small, weights, requests(prompt((71, 40)), prompt((72, 12)), prompt((73, 64))))
    logp, _ = tiny.recompute(tiny.params(), rollouts, length=72)
    gaps = []
    for row, rollout in enumerate(rollouts):
        before, response = len(rollout.request.prompt.tokens), len(rollout.tokens)
        exact = logp[row, before - 1 : before + response - 1]
        gaps += np.abs(rollout.logp - exact[np.arange(response), rollout.tokens]).tolist()
    assert 0 < np.median(gaps) < 0.01 and max(gaps) < 0.1


def test_after_a_swap_caches_are_read_again(weights):
    """Two tokens by one version, the rest by the next as if it had read everything: prompt and response so far."""
    again = engine(recompute_prompt_cache=True)
    old, new = again.load_params(tiny.params(0), 3), again.load_params(tiny.params(1), 4)
    texts = [prompt((81, 20)), prompt((82, 5)), prompt((83, 64))]
    state, tokens, logp = again.init_decode_state(), [], []
    for slot, text in enumerate(texts):
        state = again.insert_rows(again.prefill_prompts(old, [text]), state, [0], [slot], [slot], [again.sampling])
    for step in range(6):
        state, result = again.generate(new if step >= 2 else old, state)
        fields = result.convert_to_numpy().fields
        tokens.append(np.where(fields.valid > 0, fields.tokens, -1))
        logp.append(fields.logp)
    responses = [np.array([step[slot] for step in tokens if step[slot] >= 0]) for slot in range(3)]
    assert max(map(len, responses)) > 3
    empty = np.zeros(0)
    made = [
        Rollout(one, response, empty, None, empty, empty, empty, 0, "")  # type: ignore[arg-type]
        for one, response in zip(requests(*texts), responses, strict=True)
    ]
    exact = {
        3: tiny.recompute(tiny.params(0), made, length=72)[0],
        4: tiny.recompute(tiny.params(1), made, length=72)[0],
    }
    for slot, (text, response) in enumerate(zip(texts, responses, strict=True)):
        for step, token in enumerate(response):
            by = exact[4 if step >= 2 else 3][slot, len(text) - 1 + step, token]
            assert abs(logp[step][slot] - by) < 1e-4, (slot, step)
    assert again.compilations["generate"] == 1


# ------------------------------------------------------------------------------------------------- the table


def test_the_table_gives_away_what_was_used_least():
    table, weights = PrefixCache(3, 2, keeps=False), Weights(None, 1)

    def found(*tokens: int) -> list[int]:
        blocks = table.find(weights, np.array([tokens]), np.array([len(tokens)])).blocks
        return [place for place in blocks[0].tolist() if place < 3]

    def keep(*tokens: int) -> list[int]:
        return table.keep(np.array([tokens]), np.array([len(tokens)]), 1)[0].tolist()

    assert found(1, 2, 3, 4) == [] and keep(1, 2, 3, 4) == [0, 1]
    assert found(1, 2, 3, 4, 5) == [0, 1] and found(1, 2, 9, 9) == [0] and found(3, 4) == []
    assert keep(5, 6) == [2] and found(1, 2) == [0]
    assert keep(7, 8) == [1]  # that of 1 2 3 4, which was used longest ago
    assert found(1, 2, 3, 4) == [0] and found(5, 6) == [2] and found(7, 8) == [1]
    other = Weights(None, 1)
    assert (table.find(other, np.array([[1, 2]]), np.array([2])).blocks == 3).all()


def test_more_pieces_than_the_table_has_places():
    table = PrefixCache(2, 1, keeps=False)
    blocks = table.keep(np.array([[1, 2, 3], [4, 5, 6]]), np.array([3, 3]), 0)
    given = blocks[blocks < 2].tolist()
    assert sorted(given) == [0, 1]  # each place once


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_chunk": 24}, "prefill_chunk: 24; a power of two from 16, or 0 allowed"),
        ({"prefill_chunk": 8}, "prefill_chunk: 8; a power of two from 16, or 0 allowed"),
        (
            {"prefill_chunk": 0, "prefix_cache_bytes": 9},
            "prefix_cache_bytes: 9; 0, or more with a prefill_chunk, allowed",
        ),
        ({"prefix_cache_bytes": 9}, f"prefix_cache_bytes: 9; 0 or from {PIECE_BYTES} allowed, one piece's"),
    ],
)
def test_impossible_pieces(changes, message):
    with pytest.raises(InputError) as caught:
        engine(**changes)
    assert str(caught.value) == message

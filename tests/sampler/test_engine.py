"""The engine as JetStream's interface has it, alone and cut over a mesh."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny

from jaxrl_sat.layout import Layout
from jaxrl_sat.mesh import SAMPLER_RULES
from jaxrl_sat.sampler import RolloutEngine, WeightHolder, Weights, generate, jetstream_compat
from jaxrl_sat.sampler.record import STOP, Fields, RecordLayout, RolloutTokens
from jaxrl_sat.sampler.sampling import Draw
from jaxrl_sat.sampler.state import Prefix
from jaxrl_sat.types import InputError, SamplingParams

AXES = ("data", "expert", "tensor")
BY_TENSOR, BY_EXPERT, PAST_THE_KEY_HEADS = (2, 1, 2), (2, 2, 1), (1, 2, 4)  # 23 words stay whole


def spread(shape: tuple[int, ...]) -> RolloutEngine:
    return tiny.engine(layout=Layout.of(tiny.mesh(*shape, axes=AXES), SAMPLER_RULES))


@pytest.fixture(scope="module")
def weights(engine: RolloutEngine) -> Weights:
    return engine.load_params(tiny.params(), 3)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [BY_TENSOR, BY_EXPERT, PAST_THE_KEY_HEADS])
def test_cut_over_a_mesh_the_rollouts_are_the_same(cut, engine, weights):
    many = spread(cut)
    requests = tiny.requests([3, 9, 16], 4)  # one bucket: a mesh compiles slowly
    whole, pieces = (
        generate(engine, weights, requests),
        generate(many, many.load_params(tiny.params(), 3), requests),
    )
    for one, many in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one.tokens, many.tokens)
        np.testing.assert_allclose(one.logp, many.logp, atol=1e-5)
        np.testing.assert_array_equal(one.topk.ids, many.topk.ids)
        np.testing.assert_allclose(one.topk.logp, many.topk.logp, atol=1e-5)
        np.testing.assert_array_equal(one.expert_ids, many.expert_ids)


def test_weights_and_state_are_really_cut():
    many = spread(BY_TENSOR)
    query = many.load_params(tiny.params()).decode_params["layers"][0]["attention"]["q"].value
    assert query.shape == (4, 8, 32) and query.sharding.shard_shape(query.shape) == (2, 8, 32)
    state = many.init_decode_state()
    keys = state.cache[0][0]
    assert keys.shape == (8, 2, 38, 8) and keys.sharding.shard_shape(keys.shape) == (4, 1, 38, 8)
    assert state.tokens.sharding.shard_shape(state.tokens.shape) == (4,)


# ------------------------------------------------------------------------------------------ JetStream's interface


def decoded(engine: RolloutEngine, params: Any, prefix: Prefix, seed: int, slot: int) -> list[Fields]:
    """A response by JetStream's three calls: the records of each step, until `slot` has finished."""
    state = engine.insert(prefix, engine.init_decode_state(), slot, seed=seed)
    records: list[Fields] = []
    while not records or records[-1].finish[slot] == 0:
        state, result = engine.generate(params, state)
        result.copy_to_host_async()
        records.append(result.convert_to_numpy().fields)
    return records


def test_prefill_insert_generate_is_what_the_worker_does(engine, weights):
    [request] = tiny.requests([9], 1)
    [rollout] = generate(engine, weights, [request])
    padded = np.pad(request.prompt.tokens, (0, 7))
    prefix = engine.prefill(params=weights, padded_tokens=padded, true_length=9)
    records = decoded(engine, WeightHolder(weights), prefix, request.seed, slot=5)
    np.testing.assert_array_equal([r.tokens[5] for r in records], rollout.tokens)
    np.testing.assert_allclose([r.logp[5] for r in records], rollout.logp, atol=1e-6)
    assert [r.lengths[5] for r in records] == list(range(1, len(records) + 1))
    assert all(r.valid.sum() == 1 for r in records)


def test_an_existing_prefix_is_continued(engine, weights):
    [request] = tiny.requests([18], 1)
    tokens = request.prompt.tokens
    first = engine.prefill(params=weights, padded_tokens=np.pad(tokens[:11], (0, 5)), true_length=11)
    both = engine.prefill(params=weights, existing_prefix=first, padded_tokens=tokens[11:], true_length=7)
    [rollout] = generate(engine, weights, [request])
    records = decoded(engine, weights, both, request.seed, slot=0)
    np.testing.assert_array_equal([r.tokens[0] for r in records], rollout.tokens)
    with pytest.raises(InputError, match="33 tokens; at most 32 allowed"):
        engine.prefill(params=weights, existing_prefix=both, padded_tokens=tokens, true_length=15)


def test_requests_without_a_seed_get_different_ones(engine, weights):
    prefix = engine.prefill(params=weights, padded_tokens=np.full(16, 5, np.int32), true_length=4)
    state = engine.init_decode_state()
    for slot in range(8):
        state = engine.insert(prefix, state, slot)
    assert len(set(np.asarray(state.seeds).tolist())) == 8


def test_a_finished_slot_stays_quiet(engine, weights):
    prefix = engine.prefill(params=weights, padded_tokens=np.full(16, 5, np.int32), true_length=4)
    state = engine.insert(prefix, engine.init_decode_state(), 2, seed=1)
    for _ in range(9):  # past the limit of six
        state, result = engine.generate(weights, state)
    assert not result.convert_to_numpy().fields.valid.any()
    assert int(state.positions[2]) < 38


def test_result_tokens_are_jetstreams_and_carry_the_rest(engine, weights):
    prefix = engine.prefill(params=weights, padded_tokens=np.full(16, 5, np.int32), true_length=4)
    _, result = engine.generate(weights, engine.insert(prefix, engine.init_decode_state(), 2, seed=1))
    on_host = result.convert_to_numpy()
    assert isinstance(on_host, RolloutTokens) and isinstance(on_host, jetstream_compat.ResultTokens)
    slot, fields = on_host.get_result_at_slot(2), on_host.fields
    assert slot.tokens.shape == slot.valid.shape == (1, 1)
    assert (slot.tokens[0, 0], slot.valid[0, 0], slot.lengths[0]) == (fields.tokens[2], 1, 1)
    assert fields.versions[2] == 3
    assert fields.logp.dtype == fields.topk_logp.dtype == np.float32
    assert fields.expert_ids.shape == (8, 2, 2) and fields.expert_ids.dtype == np.uint8


def test_properties(engine):
    assert isinstance(engine, jetstream_compat.Engine)
    assert (engine.max_concurrent_decodes, engine.samples_per_slot, engine.max_prefill_length) == (8, 1, 32)
    assert engine.mesh.size == 1
    assert engine.colocated_cpus == jax.local_devices(backend="cpu")
    assert engine.get_tokenizer().path == ""
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_tokens) == (1, 2, 0, {2})
    prefix_sharding = engine.get_prefix_destination_sharding()
    assert prefix_sharding.is_fully_replicated and prefix_sharding.mesh == engine.mesh


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "sampler slots: 0; at least 1 needed"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens: 0; from 1 to 32768 allowed"),
        ({"sampling": SamplingParams(1.0, 7, ())}, "max_response_tokens: 7; from 1 to 6 allowed"),
        ({"sampling": SamplingParams(-0.5, 6, ())}, "temperature: -0.5; a finite number of at least 0 needed"),
        ({"sampling": SamplingParams(float("nan"), 6, ())}, "temperature: nan; a finite number of at least 0 needed"),
        ({"sampling": SamplingParams(1.0, 6, (2, 23))}, "stop id: 23; from 0 to 22 allowed"),
        ({"sampling": SamplingParams(1.0, 6, (), 0.0)}, "top_p: 0.0; above 0 and at most 1 needed"),
        ({"sampling": SamplingParams(1.0, 6, (), float("nan"))}, "top_p: nan; above 0 and at most 1 needed"),
        ({"sampling": SamplingParams(1.0, 6, (), 0.9, 0)}, "nucleus: 0; at least 1 word needed"),
        (
            {"sampling": SamplingParams(1.0, 6, (), 0.9, 9, 10)},
            "top_k: 10; 0 or -1 for all words, or up to 9, the words of",
        ),
        ({"sampling": SamplingParams(1.0, 6, tuple(range(9)))}, "stop_ids: 9 of them; at most 8 allowed"),
        ({"steps_per_dispatch": 0}, "steps_per_dispatch: 0; at least 1 needed"),
    ],
)
def test_impossible_settings(change, message):
    settings = {"slots": 2, "max_prompt_tokens": 4, "sampling": SamplingParams(1.0, 6, ())} | change
    with pytest.raises(InputError) as caught:
        RolloutEngine(tiny.CONFIG, Layout.of(tiny.mesh(), {}), max_response_tokens=6, **settings)
    assert str(caught.value).startswith(message)


def test_a_record_is_near_the_floor_for_the_flagship():
    """30B-A3B: 48 layers of 8 experts and 20 log-probs need 552 bytes a token beside its version."""
    layout = RecordLayout(topk=20, nucleus=0, sparse_layers=48, experts_per_token=8, expert_dtype="uint8")
    assert layout.width * 4 == 568
    assert layout.width * 4 <= 1.05 * 552
    assert dataclasses.replace(layout, nucleus=256).width * 4 == 568 + 4 * 256


def test_record_round_trip_of_wide_expert_ids():
    layout = RecordLayout(topk=2, nucleus=3, sparse_layers=3, experts_per_token=1, expert_dtype="uint16")
    rng = np.random.default_rng(0)
    drawn = Draw(
        tokens=jnp.asarray(rng.integers(0, 9, 4), jnp.int32),
        logp=jnp.asarray(rng.normal(size=4), jnp.float32),
        topk_ids=jnp.asarray(rng.integers(0, 9, (4, 2)), jnp.int32),
        topk_logp=jnp.asarray(rng.normal(size=(4, 2)), jnp.float32),
        nucleus_ids=jnp.asarray(rng.integers(-1, 9, (4, 3)), jnp.int32),
    )
    ids = rng.integers(0, 60000, (3, 4, 1)).astype(np.int32)
    finish = jnp.asarray([0, STOP, 0, 2], jnp.int32)
    data = layout.pack(drawn, finish > 0, finish + 5, finish, jnp.int32(11), jnp.asarray(ids))
    fields = layout.unpack(np.asarray(data))
    np.testing.assert_array_equal(fields.expert_ids, ids.transpose(1, 0, 2))
    np.testing.assert_array_equal(fields.tokens, drawn.tokens)
    np.testing.assert_array_equal(fields.logp, drawn.logp)
    np.testing.assert_array_equal(fields.topk_ids, drawn.topk_ids)
    np.testing.assert_array_equal(fields.topk_logp, drawn.topk_logp)
    np.testing.assert_array_equal(fields.nucleus_ids, drawn.nucleus_ids)
    np.testing.assert_array_equal(fields.finish, finish)
    np.testing.assert_array_equal(fields.lengths, finish + 5)
    np.testing.assert_array_equal(fields.versions, [11] * 4)


# ------------------------------------------------------------------------------------------- JetStream's Driver

DRIVER = """
import asyncio, json, sys
import numpy as np
sys.path.insert(0, {here!r})
import tiny_policy as tiny
from jaxrl_sat.sampler import WeightHolder, generate, jetstream_compat

orchestrator = jetstream_compat.orchestrator()
engine = tiny.engine(slots=4, temperature=0.0)
holder = WeightHolder(engine.load_params(tiny.params(0), 1))
driver = jetstream_compat.make_driver(engine, holder)
server = orchestrator.LLMOrchestrator(driver)

async def ask(tokens):
    content = orchestrator.jetstream_pb2.DecodeRequest.TokenContent(token_ids=tokens)
    request = orchestrator.jetstream_pb2.DecodeRequest(token_content=content, max_tokens=6, session_cache="history")
    out = []
    async for response in server.Decode(request):
        out += response.stream_content.samples[0].token_ids
    return out

async def ask_all():
    return await asyncio.gather(*(ask(r.prompt.tokens.tolist()) for r in requests))

requests = tiny.requests([3, 9, 17, 5, 20, 1], 1)
same = []
# One loop that stays open: the Driver's threads still close their channels on it after the last token was read.
loop = asyncio.new_event_loop()
for version in (1, 2):  # swapped through the holder while the driver runs
    holder.swap(engine.load_params(tiny.params(version - 1), version))
    served = loop.run_until_complete(ask_all())
    direct = [r.tokens.tolist() for r in generate(engine, holder, requests)]
    direct = [t[:-1] if t[-1] == tiny.STOP else t for t in direct]  # the Driver drops the stop token
    same.append([served == direct, sum(map(len, direct))])
driver.stop()
loop.close()
print(json.dumps(same))
"""


def test_jetstreams_driver_runs_the_engine():
    """In a process of its own, since the Driver kills its process when one of its threads fails."""
    code = DRIVER.format(here=str(Path(__file__).parent))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"])}
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"},
    )
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    (same1, tokens1), (same2, tokens2) = json.loads(out.stdout.splitlines()[-1])
    assert same1 and same2
    assert tokens1 > 6 and tokens2 > 6

"""Two engines on disjoint devices before one queue, and everything at once."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
import replayed
import tiny_policy as tiny
from jax.sharding import Mesh

from jaxrl_sat.layout import Layout
from jaxrl_sat.sampler import RequestFailed, RolloutEngine, SamplerService, WeightHolder, generate
from jaxrl_sat.types import InputError, Prompt, Request, Rollout, SamplingParams

PATIENCE = 60.0  # seconds until a hung test fails; nothing is ever waited for that long
VERSIONS = dict.fromkeys(range(0, 100, 2), 0) | dict.fromkeys(range(1, 100, 2), 1)
"""Weights 0 under even versions, weights 1 under odd ones."""


@pytest.fixture(scope="module")
def service(engine: RolloutEngine) -> Iterator[SamplerService]:
    """The engine of all tests, and one on the next device that takes three steps a dispatch, one dispatch ahead as on
    an accelerator."""
    layout = Layout.of(Mesh(np.asarray(jax.devices()[1:2]), ("data",)), {})
    engines = [engine, tiny.engine(layout=layout, steps_per_dispatch=3)]
    holders = [WeightHolder(one.load_params(tiny.params(0), 0)) for one in engines]
    with SamplerService(engines, holders, codec=Letters()) as service:
        service._threads[1].slots._lookahead = 1
        yield service


class Letters:
    """A letter a word."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_both_work_and_a_rollout_is_the_same_on_either(service, engine):
    requests = tiny.requests([3, 9, 5, 16, 1, 7], 6)
    direct = generate(engine, engine.load_params(tiny.params(0), 0), requests)
    steps = [thread.slots.steps for thread in service._threads]
    for ticket, rollout in zip(service.submit_all(requests), direct, strict=True):
        found = ticket.result(PATIENCE)
        np.testing.assert_array_equal(found.tokens, rollout.tokens)
        np.testing.assert_allclose(found.logp, rollout.logp, atol=1e-6)
        np.testing.assert_array_equal(found.expert_ids, rollout.expert_ids)
    assert all(thread.slots.steps > before for thread, before in zip(service._threads, steps, strict=True))


def test_a_swap_reaches_both_or_none(service):
    before = service.health().versions
    service.swap(tiny.params((before[0] + 1) % 2), before[0] + 1)
    after = service.health().versions
    assert after == (before[0] + 1,) * 2
    bad = jax.tree.map(np.copy, tiny.params(0))
    bad["embedding"][0, 0] = np.inf
    with pytest.raises(InputError, match=f"weights of version {after[0] + 1}: embedding not finite"):
        service.swap(bad, after[0] + 1)
    assert service.health().versions == after


def test_a_stop_string_cuts_a_dispatch(service, engine):
    """What a dispatch sampled after it is in no record, and the slot's next response is not touched by it."""
    requests = tiny.requests([5] * 8, 3)
    plain = generate(engine, engine.load_params(tiny.params(0), 0), requests)
    service.swap(tiny.params(0), 10)
    cut = []
    for rollout in plain:
        text = Letters().decode(rollout.tokens.tolist())
        sampling = SamplingParams(1.0, 6, (tiny.STOP,), stop_strings=(text[:2] if len(text) > 2 else "~",))
        cut.append(dataclasses.replace(rollout.request, sampling=sampling))
    told: list[list[int]] = [[] for _ in cut]
    callbacks = [lambda fields, to=to: to.extend(fields.tokens.tolist()) for to in told]
    for i, ticket in enumerate(service.submit_all(cut, on_tokens=callbacks)):
        found, length = ticket.result(PATIENCE), len(plain[i].tokens)
        np.testing.assert_array_equal(found.tokens, plain[i].tokens[: 2 if length > 2 else length])
        assert found.finish_reason == ("stop" if length > 2 else plain[i].finish_reason)
        assert told[i] == found.tokens.tolist() and len(found.versions) == len(found.tokens)


def fails(fields: Any) -> None:
    raise KeyError("poison")


def random_request(rng: random.Random, serial: int) -> Request:
    prompt = Prompt(serial, "", "", np.asarray([rng.randrange(3, 23) for _ in range(rng.randint(1, 16))], np.int32))
    return Request(prompt, serial // 3, serial, SamplingParams(1.0, rng.randint(1, 6), (tiny.STOP,)))


def test_under_random_calls_every_request_ends_once(service):
    """Handed in from four threads, some cancelled, timed out or poisoned, while weights are swapped."""
    first, kept = service.health().versions[0], {}

    def caller(number: int) -> list[tuple[Any, str]]:
        rng, handed = random.Random(number), []
        for i in range(40):
            kind = rng.choices(["plain", "poisoned", "hurried", "cancelled"], [6, 1, 1, 1])[0]
            request = random_request(rng, 1000 * number + i)
            ticket = service.submit(
                request,
                timeout_s=1e-3 if kind == "hurried" else None,
                on_tokens=fails if kind == "poisoned" else None,
                keep=True,
            )
            handed.append((ticket, kind))
            if kind == "cancelled":
                ticket.cancel()
        return handed

    def swapper() -> None:
        for version in range(first + 1, first + 9):
            service.swap(tiny.params(version % 2), version, at="batch" if version % 4 == 0 else "step")

    with ThreadPoolExecutor(5) as pool:
        swapping = pool.submit(swapper)
        callers = [pool.submit(caller, number) for number in range(4)]
        for _ in range(160):
            try:
                rollout = service.take(PATIENCE)
                assert kept.setdefault(rollout.request.seed, rollout) is rollout
            except RequestFailed as error:
                assert kept.setdefault(error.request.seed, error) is error
        swapping.result(PATIENCE)
    with pytest.raises(TimeoutError):
        service.take(0.0)
    handed = [one for call in callers for one in call.result()]
    assert {ticket.request.seed for ticket, _ in handed} == set(kept)
    rollouts = []
    for ticket, kind in handed:
        end = kept[ticket.request.seed]
        if isinstance(end, RequestFailed):
            assert (kind, str(end)) == ("poisoned", "KeyError: 'poison'")
            continue
        assert end is ticket.result(0.0) and end.request is ticket.request
        possible = {"cancelled": ("cancelled",), "hurried": ("timeout",)}.get(kind, ())
        assert end.finish_reason in ("stop", "length", *possible) and kind != "poisoned"
        rollouts.append(end)
    assert len({version for rollout in rollouts for version in rollout.versions}) > 2
    check_stamps(rollouts)
    assert service.health().in_slots == service.health().waiting == 0


def check_stamps(rollouts: list[Rollout]) -> None:
    """That log-probs are those of the versions stamped, of those with several versions and some others."""
    started = [rollout for rollout in rollouts if len(rollout.tokens)]
    for rollout in [one for one in started if len({*one.versions, one.prefill_version}) > 1][:20] + started[:20]:
        np.testing.assert_allclose(rollout.logp, replayed.logp_of(rollout, VERSIONS), atol=1e-4)

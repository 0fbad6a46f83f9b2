"""Several engines that share the requests of a batch are one engine, but for the time it takes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
import tiny_policy as tiny
from jax.sharding import Mesh

from jaxrl_sat.layout import Layout
from jaxrl_sat.sampler import Fleet, FleetWeights, RolloutEngine, Stopped, generate, warm_up
from jaxrl_sat.sampler.worker import generate_on
from jaxrl_sat.types import InputError, Request, Rollout

LENGTHS = [3, 9, 17, 1, 20, 16, 5]


@pytest.fixture(scope="module")
def fleet(engine: RolloutEngine) -> Fleet:
    """The engine of all tests, and its like on the next device."""
    layout = Layout.of(Mesh(np.asarray(jax.devices()[1:2]), ("data",)), {})
    return Fleet((engine, tiny.engine(layout=layout)))


@pytest.fixture(scope="module")
def weights(fleet: Fleet) -> FleetWeights:
    return fleet.load_params(tiny.params(), 3)


def test_each_engine_has_the_weights_on_its_devices(fleet, weights):
    assert weights.version == 3
    for engine, params in zip(fleet.engines, weights.decode_params, strict=True):
        assert {device for leaf in jax.tree.leaves(params) for device in leaf.devices()} == set(
            engine.mesh.devices.flat
        )


def test_each_rollout_is_told_of_once_it_is_made(fleet, weights):
    """The very ones that are returned, the first while others are still being sampled."""
    told: list[Rollout] = []
    counts: list[int] = []

    def should_stop() -> bool:
        counts.append(len(told))
        return False

    engines = list(zip(fleet.engines, weights.engines, strict=True))
    rollouts = generate_on(engines, tiny.requests(LENGTHS, 6), should_stop, finished=told.append)
    assert sorted(map(id, told)) == sorted(map(id, rollouts))
    assert any(0 < count < len(rollouts) for count in counts)


@pytest.mark.parametrize("order", ["fifo", "longest"])
def test_rollouts_are_those_of_one_engine_and_both_work(fleet, weights, monkeypatch, order):
    steps = dict.fromkeys(fleet.engines, 0)
    advance = RolloutEngine.advance

    def counted(self: RolloutEngine, *arguments: Any) -> Any:
        steps[self] += 1
        return advance(self, *arguments)

    monkeypatch.setattr(RolloutEngine, "advance", counted)
    requests = tiny.requests(LENGTHS, 6)
    alone = generate(fleet.engines[0], weights.engines[0], requests)
    steps[fleet.engines[0]] = 0
    together = Fleet(fleet.engines, order).generate(weights, requests)
    assert all(steps.values()), steps
    for request, found, expected in zip(requests, together, alone, strict=True):
        assert found.request is request and found.finish_reason == expected.finish_reason
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.logp, expected.logp)
        np.testing.assert_array_equal(found.expert_ids, expected.expert_ids)
        assert set(found.versions.tolist()) == {found.prefill_version} == {3}


def test_what_is_compiled_once_stays(fleet, weights):
    """Which engine fills how many slots at once hangs on their speed, so every program is asked for first."""
    for engine, own in zip(fleet.engines, weights.engines, strict=True):
        warm_up.warm_up(engine, own, lambda bucket: None)
    compiled = fleet.compilations
    assert compiled == sum(sum(engine.compilations.values()) for engine in fleet.engines) > 0
    for seed in range(4):
        fleet.generate(weights, tiny.requests(LENGTHS, 6, seed))
    assert fleet.compilations == compiled


def test_temperature_overrides_that_of_every_request(fleet, weights):
    rollouts = fleet.generate(weights, tiny.requests([5, 9], 4), temperature=0.0)
    for first, *others in (rollouts[:4], rollouts[4:]):  # greedy: all samples of a prompt are one
        for other in others:
            np.testing.assert_array_equal(other.tokens, first.tokens)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_engine_raises_ends_the_batch(fleet, weights, monkeypatch, failing):
    error = ZeroDivisionError("device on fire")

    def fails(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(fleet.engines[failing], "advance", fails)
    with pytest.raises(ZeroDivisionError) as caught:
        fleet.generate(weights, tiny.requests(LENGTHS, 6))
    assert caught.value is error
    monkeypatch.undo()
    assert len(fleet.generate(weights, tiny.requests(LENGTHS, 2))) == 14


def test_it_stops_within_a_dispatch(fleet, weights):
    looks = itertools.count()
    with pytest.raises(Stopped):
        fleet.generate(weights, tiny.requests(LENGTHS, 6), lambda: next(looks) >= 3)
    assert next(looks) <= 3 + 2  # each engine has looked once more at most


def test_a_request_that_cannot_be_served_costs_no_work(fleet, weights):
    bad = tiny.requests([21], 1)
    with pytest.raises(InputError, match="21 tokens; from 1 to 20 allowed"):
        fleet.generate(weights, [*tiny.requests([3], 1), *bad])
    assert generate_on(list(zip(fleet.engines, weights.engines, strict=True)), list[Request]()) == []


def test_weights_that_are_not_finite_are_refused_by_name(fleet):
    bad = jax.tree.map(np.copy, tiny.params())
    bad["embedding"][2, 3] = np.nan
    with pytest.raises(InputError, match="^weights of version 7: embedding not finite; finite numbers alone allowed$"):
        fleet.load_params(bad, 7)

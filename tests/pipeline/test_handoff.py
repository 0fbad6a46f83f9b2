"""Versions in flight: what is handed over, what is kept, what is let go."""

import pytest

from jaxrl_sat.pipeline import lag
from jaxrl_sat.pipeline.handoff import WeightStore
from jaxrl_sat.types import InputError


@pytest.mark.parametrize(("mode", "n"), [("sync", 0), ("fixed", 1), ("fixed", 3), ("interval", 1), ("interval", 4)])
def test_store_holds_what_coming_batches_are_sampled_by_and_no_more(mode, n):
    moved = []
    store = WeightStore(mode, n, lambda params, version: moved.append(version) or ("sampler", params))
    for step in range(30):
        handed = store.publish(f"params {step}", step)
        needed = lag.versions_needed(mode, n, step)
        used = lag.samples_any(mode, n, step)
        assert handed == (("sampler", f"params {step}") if used else None)
        assert set(store.in_flight()) == set(needed)
        for version in needed:
            assert store.weights(version) == ("sampler", f"params {version}")
            assert store.trainer_params(version) == f"params {version}"
    assert moved == [v for v in range(30) if lag.samples_any(mode, n, v)]
    assert store.weights(31) is None
    with pytest.raises(KeyError):
        store.trainer_params(31)


def test_versions_in_flight_are_bounded_by_the_lag():
    store = WeightStore("fixed", 3, lambda params, version: params)
    for step in range(20):
        store.publish(step, step)
        assert len(store.in_flight()) <= 4
    store = WeightStore("interval", 8, lambda params, version: params)
    for step in range(40):
        store.publish(step, step)
        assert len(store.in_flight()) <= 2


def test_weights_that_are_refused_leave_those_before_in_place():
    def transfer(params, version):
        if version == 1:
            raise InputError("not finite")
        return params

    store = WeightStore("fixed", 1, transfer)
    store.publish("first", 0)
    with pytest.raises(InputError, match="not finite"):
        store.publish("second", 1)
    assert (store.weights(0), store.weights(1), store.in_flight()) == ("first", None, {0: "first"})

"""The sampler thread with a generator that the test steps by hand: events, no clocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxrl_sat.sampler import SamplerThread, Stopped, Weights
from jaxrl_sat.types import Prompt, Request, Rollout, TopK

PATIENCE = 60  # seconds until a hung test fails; nothing is ever waited for that long


def asked(name: str) -> list[Request]:
    """One request, told apart by its text."""
    return [Request(Prompt(0, name, "", np.zeros(1, np.int32)), group=0, seed=0)]


def answer(requests: list[Request], version: int, temperature: float | None) -> list[Rollout]:
    """A response that says what it was made of."""
    one, none = np.zeros(1, np.float32), np.zeros((1, 0), np.float32)
    versions = np.full(1, version, np.int32)
    return [Rollout(r, one, one, TopK(none, none), none, one, versions, version, str(temperature)) for r in requests]


def told(rollouts: list[Rollout]) -> list[tuple[str, int, str]]:
    """(text asked, version, temperature) of each response."""
    return [(r.request.prompt.text, r.prefill_version, r.finish_reason) for r in rollouts]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until another thread has done what no event tells of."""
    for _ in range(PATIENCE * 100):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("nothing happened")


class Generator:
    """Stands in for `worker.generate`: notes each call and, where gated, waits to be let through or stopped."""

    def __init__(self, gated: bool = False):
        self.calls: list[tuple[int, str]] = []
        self.called = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.gated = gated
        self.fail: dict[str, BaseException] = {}

    def __call__(
        self, engine: Any, weights: Weights, requests: Any, should_stop: Callable[[], bool], temperature: Any = None
    ) -> list[Rollout]:
        name = requests[0].prompt.text
        self.calls.append((weights.version, name))
        self.called.release()
        while self.gated and not self.gate.acquire(timeout=0.01):
            if should_stop():
                raise Stopped
        if name in self.fail:
            raise self.fail[name]
        return answer(requests, weights.version, temperature)

    def wait_called(self) -> None:
        assert self.called.acquire(timeout=PATIENCE)


class Store:
    """Published versions. Like the real one it has a lock of its own, and publishing notifies while holding it."""

    def __init__(self, *versions: int):
        self.lock = threading.Lock()
        self.weights = {version: Weights(None, version) for version in versions}
        self.asked = threading.Semaphore(0)

    def __call__(self, version: int) -> Weights | None:
        with self.lock:
            self.asked.release()
            return self.weights.get(version)

    def publish(self, thread: SamplerThread, version: int) -> None:
        with self.lock:
            self.weights[version] = Weights(None, version)
            thread.notify()


Make = Callable[..., SamplerThread]


@pytest.fixture
def make() -> Iterator[Make]:
    threads: list[SamplerThread] = []

    def build(generator: Any, store: Store, lag: int = 0, **kwargs: Any) -> SamplerThread:
        options: dict[str, Any] = {"start": 0, "stop": 4, "capacity": 1} | kwargs
        thread = SamplerThread(
            "engine",
            store,
            lambda update: max(0, update - lag),
            lambda update: asked(f"batch {update}"),
            generate=generator,
            **options,
        )
        threads.append(thread)
        thread.start()
        return thread

    yield build
    for thread in threads:
        thread.close()
        assert not thread.is_alive()


def test_batches_come_in_order_each_by_its_version(make):
    generator, store = Generator(), Store(0, 1, 2, 3)
    thread = make(generator, store, lag=1, capacity=2, start=1)
    for update in (1, 2, 3):
        batch = thread.take(update)
        assert (batch.update, batch.version) == (update, update - 1)
        assert told(batch.rollouts) == [(f"batch {update}", update - 1, "None")]
        assert batch.generate_s >= 0
    assert [call[0] for call in generator.calls] == [0, 1, 2]


def test_waits_for_weights_and_goes_on_when_they_are_published(make):
    generator, store = Generator(), Store(0)
    thread = make(generator, store)
    assert thread.take(0).version == 0
    for _ in range(2):  # it has looked for version 1 in vain (the first look was for version 0)
        assert store.asked.acquire(timeout=PATIENCE)
    assert [call[0] for call in generator.calls] == [0]
    store.publish(thread, 1)
    assert thread.take(1).version == 1


def test_never_more_batches_ahead_than_capacity(make):
    generator, store = Generator(), Store(0, 1, 2, 3)
    thread = make(generator, store, capacity=2)
    generator.wait_called()
    generator.wait_called()
    thread.evaluate(Weights(None, 9), asked("eval"))  # served only after batch 1 is in the queue: so now it is full
    assert [call[0] for call in generator.calls] == [0, 1, 9]
    thread.take(0)
    generator.wait_called()  # the evaluation
    generator.wait_called()  # batch 2, in the place that came free
    assert generator.calls[-1][0] == 2


def test_an_evaluation_goes_before_the_next_batch(make):
    generator, store = Generator(gated=True), Store(0, 1, 2, 3)
    thread = make(generator, store, capacity=4)
    generator.wait_called()  # batch 0 is under way
    results: list[Any] = []
    asking = threading.Thread(target=lambda: results.extend(thread.evaluate(Weights(None, 7), asked("eval"), 0.0)))
    asking.start()
    wait_for(lambda: bool(thread._jobs))  # the job is in before batch 0 ends
    generator.gate.release(2)
    asking.join(PATIENCE)
    assert told(results) == [("eval", 7, "0.0")]
    assert [call[0] for call in generator.calls][:2] == [0, 7]


def test_evaluations_are_served_after_the_last_batch(make):
    thread = make(Generator(), Store(0), stop=1)
    thread.take(0)
    assert told(thread.evaluate(Weights(None, 1), asked("eval"))) == [("eval", 1, "None")]
    with pytest.raises(ValueError, match="update 1 asked of the sampler; next is 1 of 1"):
        thread.take(1)


def test_updates_are_taken_in_order(make):
    thread = make(Generator(), Store(0, 1), start=0)
    with pytest.raises(ValueError, match="update 1 asked of the sampler; next is 0 of 4"):
        thread.take(1)
    thread.take(0)
    with pytest.raises(ValueError, match="update 0 asked of the sampler; next is 1 of 4"):
        thread.take(0)


def test_an_error_in_a_batch_is_raised_where_batches_are_taken(make):
    generator = Generator()
    generator.fail["batch 1"] = KeyError("poison")
    thread = make(generator, Store(0, 1, 2))
    thread.take(0)
    for _ in range(2):
        with pytest.raises(KeyError, match="poison"):
            thread.take(1)
    with pytest.raises(KeyError, match="poison"):
        thread.evaluate(Weights(None, 0), asked("eval"))


def test_a_finished_batch_is_still_given_after_the_next_one_failed(make):
    generator = Generator()
    generator.fail["batch 1"] = KeyError("poison")
    thread = make(generator, Store(0, 1), capacity=2)
    thread.join(PATIENCE)
    assert thread.take(0).update == 0
    with pytest.raises(KeyError, match="poison"):
        thread.take(1)


def test_an_error_in_the_schedule_or_the_requests_is_raised_too(make):
    thread = SamplerThread(
        "engine", Store(0), lambda update: 1 // update, lambda update: [], 0, 1, 1, generate=Generator()
    )
    thread.start()
    with pytest.raises(ZeroDivisionError):
        thread.take(0)
    thread.close()


def test_an_error_in_an_evaluation_fails_that_evaluation_only(make):
    generator = Generator()
    generator.fail["bad"] = KeyError("poison")
    thread = make(generator, Store(0))
    with pytest.raises(KeyError, match="poison"):
        thread.evaluate(Weights(None, 0), asked("bad"))
    assert told(thread.evaluate(Weights(None, 0), asked("good"))) == [("good", 0, "None")]
    assert thread.take(0).update == 0


def test_close_stops_a_batch_under_way(make):
    generator = Generator(gated=True)
    thread = make(generator, Store(0))
    generator.wait_called()
    thread.close()  # the gate stays shut
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        thread.take(0)
    with pytest.raises(RuntimeError, match="closed"):
        thread.evaluate(Weights(None, 0), asked("eval"))
    thread.close()


def test_close_with_a_full_queue_and_no_consumer(make):
    generator = Generator()
    thread = make(generator, Store(0, 1))
    generator.wait_called()
    thread.close()
    assert not thread.is_alive()


def test_close_before_start():
    thread = SamplerThread("engine", Store(), lambda u: u, lambda u: [], 0, 1, 1, generate=Generator())
    thread.close()
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_close_fails_whoever_waits_for_an_evaluation(make):
    generator = Generator(gated=True)
    thread = make(generator, Store(0))
    generator.wait_called()
    errors: list[BaseException] = []

    def ask(name: str) -> None:
        try:
            thread.evaluate(Weights(None, 0), asked(name))
        except RuntimeError as error:
            errors.append(error)

    asking = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b")]
    for one in asking:
        one.start()
    wait_for(lambda: len(thread._jobs) == 2)
    thread.close()
    for one in asking:
        one.join(PATIENCE)
    assert [str(error) for error in errors] == ["the sampler was closed"] * 2


def test_take_gives_up_when_asked_to(make):
    thread = make(Generator(), Store())  # nothing is ever published
    looks: list[int] = []
    assert thread.take(0, should_stop=lambda: bool(looks.append(1)) or len(looks) > 1) is None
    assert len(looks) == 2


def test_the_device_is_held_for_one_batch_at_a_time(make):
    """With the lock taken from outside nothing is generated; once it is free, everything is."""
    lock, generator = threading.Lock(), Generator()
    held: list[bool] = []
    generator_call = generator.__call__

    def watched(*args: Any, **kwargs: Any) -> list[Any]:
        held.append(lock.locked())
        return generator_call(*args, **kwargs)

    with lock:
        thread = make(watched, Store(0, 1, 2, 3), device_lock=lock)
        assert thread.take(0, should_stop=lambda: True) is None
        assert generator.calls == []
    for update in range(4):
        thread.take(update)
    thread.evaluate(Weights(None, 4), asked("eval"))
    assert held == [True] * 5
    assert not lock.locked()


def test_capacity_has_to_be_positive():
    with pytest.raises(ValueError, match="capacity is 0"):
        SamplerThread("engine", Store(), lambda u: u, lambda u: [], 0, 1, 0)

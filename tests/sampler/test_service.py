"""The live queue: what is handed in comes out once, whatever is cancelled, swapped or goes wrong meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import replayed
import tiny_policy as tiny

from jaxrl_sat.sampler import RolloutEngine, WeightHolder, Weights, generate
from jaxrl_sat.sampler.record import Fields
from jaxrl_sat.sampler.service import SamplerService
from jaxrl_sat.sampler.tickets import Busy, RequestFailed
from jaxrl_sat.types import InputError, Prompt, Request, Rollout, SamplingParams

PATIENCE = 60.0  # seconds until a hung test fails; nothing is ever waited for that long
LENGTHS = [3, 9, 17, 1, 20, 16, 5]

Serve = Callable[..., SamplerService]


@pytest.fixture(scope="module")
def weights(engine: RolloutEngine) -> Weights:
    return engine.load_params(tiny.params(0), 4)


@pytest.fixture(scope="module")
def plain(engine: RolloutEngine, weights: Weights) -> list[Rollout]:
    """What `generate` makes of LENGTHS, three samples each."""
    return generate(engine, weights, tiny.requests(LENGTHS, 3))


@pytest.fixture
def serve(engine: RolloutEngine, weights: Weights) -> Iterator[Serve]:
    services: list[SamplerService] = []

    def build(engines: Any = None, **kwargs: Any) -> SamplerService:
        used = engines or [engine]
        holders = [WeightHolder(weights if one is engine else one.load_params(tiny.params(0), 4)) for one in used]
        services.append(SamplerService(used, holders, **kwargs))
        return services[-1]

    yield build
    for service in services:
        service.close()


class Gate:
    """A callback at which the engine's thread waits, the first time it makes a token, until it is let through."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, fields: Fields) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE)


def same(one: Rollout, other: Rollout, tokens: int | None = None) -> None:
    """That two rollouts, or the first and so many tokens of the second, were drawn alike."""
    kept = slice(len(other.tokens) if tokens is None else tokens)
    assert one.request.prompt.id == other.request.prompt.id and one.request.seed == other.request.seed
    np.testing.assert_array_equal(one.tokens, other.tokens[kept])
    np.testing.assert_allclose(one.logp, other.logp[kept], atol=1e-6)
    np.testing.assert_array_equal(one.topk.ids, other.topk.ids[kept])
    before = len(one.request.prompt.tokens) - 1
    np.testing.assert_array_equal(one.expert_ids, other.expert_ids[:, : before + len(one.tokens)])


def test_rollouts_are_those_of_the_direct_loop(serve, plain):
    service = serve()
    tickets = service.submit_all([rollout.request for rollout in plain])
    for ticket, rollout in zip(tickets, plain, strict=True):
        found = ticket.result(PATIENCE)
        same(found, rollout)
        assert found.finish_reason == rollout.finish_reason and ticket.done
    health = service.health()
    assert (health.waiting, health.in_slots, health.unread, health.versions) == (0, 0, 0, (4,))
    assert health.tokens == sum(len(rollout.tokens) for rollout in plain)


@pytest.mark.parametrize("order", ["fifo", "longest", "shortest"])
def test_a_group_shares_one_prefill(serve, engine, monkeypatch, order):
    read: list[list[int]] = []
    prefill = engine.prefill_prompts
    monkeypatch.setattr(engine, "prefill_prompts", lambda w, p: read.append([len(t) for t in p]) or prefill(w, p))
    for ticket in serve(order=order).submit_all(tiny.requests(LENGTHS, 3)):
        ticket.result(PATIENCE)
    assert sorted(map(sorted, read)) == [[1, 3, 5, 9, 16], [17, 20]]


def test_tokens_are_told_as_they_are_made(serve, plain):
    service, told = serve(), {}
    requests = [rollout.request for rollout in plain[:9]]
    callbacks = [told.setdefault(i, []).append for i in range(9)]
    for i, ticket in enumerate(service.submit_all(requests, on_tokens=callbacks)):
        rollout = ticket.result(PATIENCE)
        np.testing.assert_array_equal(np.concatenate([fields.tokens for fields in told[i]]), rollout.tokens)
        np.testing.assert_array_equal(np.concatenate([fields.logp for fields in told[i]]), rollout.logp)
        assert len(told[i]) == len(rollout.tokens)  # one step a dispatch


# ------------------------------------------------------------------------------------------------- ended early


def test_cancelled_in_a_slot_and_while_it_waits(serve, plain):
    service, gate = serve(), Gate()
    longest = [rollout.request for rollout in plain if len(rollout.tokens) == 6]
    of = {id(rollout.request): rollout for rollout in plain}
    first = service.submit(longest[0], on_tokens=gate)
    assert gate.reached.wait(PATIENCE)
    waiting = service.submit(longest[1])
    waiting.cancel()
    rollout = waiting.result(0.0)  # at once, though the engine is held up
    assert (rollout.finish_reason, rollout.prefill_version) == ("cancelled", -1)
    assert rollout.tokens.shape == (0,) and rollout.topk.ids.shape == (0, 5) and rollout.expert_ids.shape == (2, 0, 2)
    first.cancel()
    first.cancel()
    after = service.submit(longest[2])
    gate.opened.set()
    cut = first.result(PATIENCE)
    assert cut.finish_reason == "cancelled"
    same(cut, of[id(longest[0])], tokens=1)
    same(after.result(PATIENCE), of[id(longest[2])])
    after.cancel()
    assert after.result(0.0).finish_reason == "length"


def test_time_is_up_in_a_slot_and_while_it_waits(serve, plain):
    service, gate = serve(), Gate()
    request = next(rollout.request for rollout in plain if len(rollout.tokens) == 6)
    first = service.submit(request, on_tokens=gate, timeout_s=1e-3)
    if gate.reached.wait(1.0):  # else its time was up before it had a slot
        late = service.submit(request, timeout_s=1e-3)
        assert late.result(PATIENCE).finish_reason == "timeout" and len(late.result().tokens) == 0
    gate.opened.set()
    assert first.result(PATIENCE).finish_reason == "timeout"
    assert service.submit(request, timeout_s=PATIENCE).result(PATIENCE).finish_reason == "length"
    with pytest.raises(InputError, match="timeout_s: 0.0; a number above 0 needed"):
        service.submit(request, timeout_s=0.0)


class Letters:
    """A letter a word."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(serve, engine, weights, plain):
    codec = Letters()
    for rollout in [one for one in plain if len(one.tokens) == 6][:4]:
        text = codec.decode(rollout.tokens.tolist())
        sampling = SamplingParams(1.0, 6, (tiny.STOP,), stop_strings=("zz", text[2:4]))
        request = Request(rollout.request.prompt, 0, rollout.request.seed, sampling)
        found = serve(codec=codec).submit(request).result(PATIENCE)
        assert found.finish_reason == "stop"
        same(found, rollout, tokens=text.index(text[2:4]) + 2)
        [direct] = generate(engine, weights, [request], codec=codec)
        same(direct, found)
    with pytest.raises(InputError, match="stop_strings: 'zz'; none allowed"):
        serve().submit(request)


# --------------------------------------------------------------------------------------------------- going wrong


def poisoned(engine: RolloutEngine, monkeypatch: Any, prompt: Prompt) -> None:
    """Have the reading of a prompt fail, alone or with others."""
    prefill = engine.prefill_prompts

    def failing(weights: Any, prompts: Any) -> Any:
        if any(tokens is prompt.tokens for tokens in prompts):
            raise ArithmeticError("poison\nin two lines")
        return prefill(weights, prompts)

    monkeypatch.setattr(engine, "prefill_prompts", failing)


def test_an_error_in_a_request_fails_it_alone(serve, engine, monkeypatch, plain):
    requests = [rollout.request for rollout in plain]
    poisoned(engine, monkeypatch, requests[3].prompt)
    callbacks: list[Any] = [None] * len(requests)
    callbacks[8] = lambda fields: {}["nobody"]
    tickets = serve().submit_all(requests, on_tokens=callbacks)
    texts = {3: "ArithmeticError: poison in two lines", 8: "KeyError: 'nobody'"} | dict.fromkeys(
        (4, 5), "ArithmeticError: poison in two lines"
    )
    for i, (ticket, rollout) in enumerate(zip(tickets, plain, strict=True)):
        if i in texts:
            with pytest.raises(RequestFailed) as caught:
                ticket.result(PATIENCE)
            assert str(caught.value) == texts[i] and caught.value.request is requests[i]
        else:
            same(ticket.result(PATIENCE), rollout)


def test_a_failing_codec_fails_its_request_alone(serve, plain):
    class Broken(Letters):
        def decode(self, ids: list[int]) -> str:
            raise ValueError("no such text")

    request = plain[0].request
    stopping = SamplingParams(1.0, 6, (tiny.STOP,), stop_strings=("a",))
    service = serve(codec=Broken())
    bad = service.submit(Request(request.prompt, 0, request.seed, stopping))
    same(service.submit(request).result(PATIENCE), plain[0])
    with pytest.raises(RequestFailed, match="ValueError: no such text"):
        bad.result(PATIENCE)


@pytest.mark.parametrize("where", ["advance", "insert_rows", "release"])
def test_a_failed_dispatch_costs_what_was_in_its_slots(serve, engine, monkeypatch, plain, where):
    """The state is donated and gone, as after a failure on the device."""
    dispatch, calls = getattr(engine, where), []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            state = args[1] if where != "release" else args[0]
            jax.tree.map(lambda leaf: leaf.delete(), state)
            raise RuntimeError("out of luck")
        return dispatch(*args)

    service = serve()
    monkeypatch.setattr(engine, where, failing)
    tickets = service.submit_all([rollout.request for rollout in plain], keep=True)
    if where == "release":
        for _ in range(2):
            next(ticket for ticket in tickets if not ticket.done).cancel()
    ended = []
    for _ in tickets:
        try:
            ended.append(service.take(PATIENCE))
        except RequestFailed as error:
            ended.append(str(error))
    failures = [one for one in ended if isinstance(one, str)]
    assert set(failures) <= {"RuntimeError: out of luck"} and len(failures) <= 8
    assert len(failures) > 0 or where == "release"  # where both may end by one release
    for ticket, rollout in zip(tickets, plain, strict=True):
        if ticket.future.exception() is None and ticket.result().finish_reason != "cancelled":
            same(ticket.result(), rollout)


def test_a_dispatch_that_hangs_is_reported(serve, engine, monkeypatch, caplog, plain):
    service, gate = serve(dispatch_limit_s=0.01), Gate()
    ticket = service.submit(plain[0].request, on_tokens=gate)
    assert gate.reached.wait(PATIENCE)
    for _ in range(int(PATIENCE) * 100):
        if service.health().hung and caplog.records:
            break
        threading.Event().wait(0.01)
    assert service.health().hung == (0,)
    assert caplog.records[0].getMessage() == "sampler 0: a dispatch takes more than 0.01 s"
    gate.opened.set()
    same(ticket.result(PATIENCE), plain[0])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(Prompt(7, "", "", np.zeros(0, np.int32)), 0, 0), "prompt 7: 0 tokens; from 1 to 20 allowed"),
        (Request(Prompt(7, "", "", np.array([23], np.int32)), 0, 0), "prompt 7: token id 23; from 0 to 22 allowed"),
        (Request(Prompt(7, "", "", np.ones(2, np.int32)), 0, -1), "seed: -1; from 0 to 4294967295 allowed"),
        (
            Request(Prompt(7, "", "", np.ones(2, np.int32)), 0, 0, SamplingParams(-1.0, 6, ())),
            "temperature: -1.0; a finite number of at least 0 needed",
        ),
    ],
)
def test_requests_that_cannot_be_served_are_not_taken(serve, plain, request_, message):
    service = serve()
    with pytest.raises(InputError) as caught:
        service.submit_all([plain[0].request, request_])
    assert str(caught.value) == message
    assert service.health().waiting == 0
    same(service.submit(plain[0].request).result(PATIENCE), plain[0])


def test_closed_while_some_wait(serve, plain):
    service, gate = serve(), Gate()
    tickets = service.submit_all([plain[0].request] * 12, on_tokens=[gate, *[None] * 11], keep=True)
    assert gate.reached.wait(PATIENCE)
    threading.Timer(0.05, gate.opened.set).start()
    service.close()
    service.close()
    for ticket in tickets:
        with pytest.raises(RequestFailed, match="^the sampler was closed$"):
            ticket.result(0.0)
        with pytest.raises(RequestFailed):
            service.take(0.0)
    for call in (lambda: service.take(0.0), lambda: service.submit(plain[0].request)):
        with pytest.raises(RuntimeError, match="^the sampler was closed$"):
            call()


# -------------------------------------------------------------------------------------------------- back-pressure


def test_ten_thousand_at_once(serve, plain):
    service = serve(waiting_limit=40)
    gate = Gate()
    held = service.submit(plain[0].request, on_tokens=gate)
    assert gate.reached.wait(PATIENCE)
    tickets, refused = [], 0
    for i in range(10_000):
        try:
            tickets.append(service.submit(plain[i % len(plain)].request))
        except Busy as error:
            refused += 1
            assert str(error) == "40 requests wait, 1 more asked for; at most 40 may wait: try again later"
    assert (len(tickets), refused) == (40, 9_960)
    with pytest.raises(InputError, match="^n: 41 responses at once; allowed: 40 or fewer may wait$"):  # whatever ends
        service.submit_all([plain[0].request] * 41)
    gate.opened.set()
    for i, ticket in enumerate([*tickets, held]):
        same(ticket.result(PATIENCE), plain[i % len(plain)] if ticket is not held else plain[0])


def test_no_slot_is_filled_while_rollouts_are_unread(serve, plain):
    service = serve(output_limit=3)
    tickets = service.submit_all([rollout.request for rollout in plain], keep=True)
    for ticket in tickets[:8]:
        ticket.result(PATIENCE)
    taken: list[Rollout] = []
    for _ in range(int(PATIENCE) * 100):
        if not service.health().in_slots:
            break
        threading.Event().wait(0.01)
    health = service.health()
    assert health.in_slots == 0 and 3 <= health.unread <= 3 + 8 and health.unread + health.waiting == len(plain)
    while len(taken) < len(plain):
        taken.append(service.take(PATIENCE))
        assert service.health().unread <= 3 + 8
    assert sorted(id(rollout.request) for rollout in taken) == sorted(id(rollout.request) for rollout in plain)
    with pytest.raises(TimeoutError, match="no rollout within 0.0 s"):
        service.take(0.0)


# ---------------------------------------------------------------------------------------------------- new weights


def test_weights_swapped_in_flight_stamp_what_they_sample(serve, plain):
    """And every token's log-prob is that of the weights it is stamped with, over the cache that was there."""
    service, seen = serve(), []

    def swap(fields: Fields) -> None:
        seen.append(1)
        if len(seen) == 2:
            service.swap(tiny.params(1), 5)

    requests = [rollout.request for rollout in plain]
    first = next(i for i, rollout in enumerate(plain) if len(rollout.tokens) == 6)
    order = [requests[first], *requests]
    mixed = [ticket.result(PATIENCE) for ticket in service.submit_all(order, on_tokens=[swap, *[None] * len(requests)])]
    assert mixed[0].prefill_version == 4 and mixed[0].versions.tolist()[:3] == [4, 4, 5]
    assert set(mixed[-1].versions) == {5} and mixed[-1].prefill_version == 5  # read anew after the swap
    assert {rollout.prefill_version for rollout in mixed} == {4, 5}
    for rollout in mixed:
        assert (np.diff(rollout.versions) >= 0).all() and rollout.versions[0] >= rollout.prefill_version
        np.testing.assert_allclose(rollout.logp, replayed.logp_of(rollout, {4: 0, 5: 1}), atol=1e-4)


def test_weights_for_the_next_batch_wait_until_the_slots_have_drained(serve, plain):
    service, gate = serve(), Gate()
    requests = [rollout.request for rollout in plain if len(rollout.tokens) == 6][:4]
    first = service.submit(requests[0], on_tokens=gate)
    assert gate.reached.wait(PATIENCE)
    service.swap(tiny.params(1), 5, at="batch")
    later = service.submit_all(requests[1:])
    assert service.health().versions == (4,)
    gate.opened.set()
    assert set(first.result(PATIENCE).versions) == {4}
    for ticket in later:
        rollout = ticket.result(PATIENCE)
        assert set(rollout.versions) == {5} == {rollout.prefill_version}
        np.testing.assert_allclose(rollout.logp, replayed.logp_of(rollout, {5: 1}), atol=1e-4)
    assert service.health().versions == (5,)


def test_weights_that_are_not_finite_are_refused(serve, plain):
    service = serve()
    bad = jax.tree.map(np.copy, tiny.params(1))
    bad["run1"]["attention"]["k"][0, 3, 1, 2] = np.nan
    with pytest.raises(InputError) as caught:
        service.swap(bad, 5)
    assert str(caught.value) == ("weights of version 5: layers/1/attention/k not finite; finite numbers alone allowed")
    bad["embedding"][4, 4] = np.inf
    with pytest.raises(InputError, match="embedding and 1 others not finite"):
        service.swap(bad, 5)
    rollout = service.submit(plain[0].request).result(PATIENCE)
    same(rollout, plain[0])
    assert service.health().versions == (4,) and set(rollout.versions) == {4}

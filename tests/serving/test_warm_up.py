"""A server that listens has compiled what requests need."""

from __future__ import annotations

import dataclasses
import json
import urllib.request

import pytest

from jaxrl_sat.sampler import SamplerService, WeightHolder, warm_up
from jaxrl_sat.serving.http import make_app
from tests.sampler import tiny_policy as tiny


@pytest.mark.slow
def test_the_first_requests_compile_nothing(tokenizer, served, serve):
    """Prompts of either bucket, read whole and in pieces, known before or not; groups of every size; any drawing."""
    engine = tiny.engine(
        slots=6, limit=4, max_prompt_tokens=40, restricted=True, prefill_chunk=16, prefix_cache_bytes=10**5
    )
    weights, told = engine.load_params(tiny.params(), 0), []
    warm_up.warm_up(engine, weights, told.append)
    assert told == [16, 32, 64]
    compiled = dict(engine.compilations)
    assert {"prefill", "begin", "chunk", "keep", "insert", "advance", "release"} <= set(compiled)
    with SamplerService([engine], [WeightHolder(weights)], codec=tokenizer) as service:
        asked = [request for n in range(1, 7) for request in tiny.requests([2, 16, 17, 32, 33, 40], n, seed=n)]
        plain = service.submit_all(asked)
        drawings = ({"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"stop_strings": ("a", "1", "+")})
        changed = [
            dataclasses.replace(request, sampling=dataclasses.replace(engine.sampling, **drawing))
            for drawing in drawings
            for request in tiny.requests([4, 40], 3)
        ]
        cancelled = service.submit_all(tiny.requests([5, 20], 4))
        for ticket in cancelled:
            ticket.cancel()
        for ticket in (*plain, *service.submit_all(changed), *cancelled):
            assert ticket.result(60.0).finish_reason in ("stop", "length", "cancelled")
        assert dict(engine.compilations) == compiled
        with serve(make_app(service, served)) as url, urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer)["compilations"] == sum(compiled.values())


def test_nor_do_those_of_jetstreams_driver(engine, holder):
    warm_up.warm_up_driver(engine, holder.current, lambda bucket: None)
    compiled = dict(engine.compilations)
    state = engine.init_decode_state()
    prefix = engine.prefill(params=holder, padded_tokens=[5, 6, 7], true_length=3)
    for slot in range(4):
        state = engine.insert(prefix, state, slot=slot)
    engine.generate(holder, state)
    assert dict(engine.compilations) == compiled

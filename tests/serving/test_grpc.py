"""JetStream's own gRPC service over the engine: many requests at once, and those that it would not survive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax

SERVER = """
import asyncio, json, sys, threading
sys.path.insert(0, {tiny!r})
import grpc
import numpy as np
import tiny_policy as tiny
from jaxrl_sat import embedded
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.sampler import WeightHolder, generate, jetstream_compat
from jaxrl_sat.serving.jetstream import Service

TOKEN = "a-token-of-enough-length"
BEARER = (("authorization", "Bearer " + TOKEN),)
tokenizer = Tokenizer.load(embedded.model_path())
engine = tiny.engine(slots=8, limit=8, max_prompt_tokens=16, temperature=0.0, tokenizer=tokenizer)
holder = WeightHolder(engine.load_params(tiny.params(0), 1))
pb2 = jetstream_compat.orchestrator().jetstream_pb2

async def ask(decode, metadata=BEARER, tokens=None, text=None, **fields):
    if tokens is not None:
        fields["token_content"] = pb2.DecodeRequest.TokenContent(token_ids=tokens)
    if text is not None:
        fields["text_content"] = pb2.DecodeRequest.TextContent(text=text)
    said = []
    try:
        async for answer in decode(pb2.DecodeRequest(**fields), metadata=metadata):
            sample = answer.stream_content.samples[0]
            said += list(sample.token_ids) if text is None else [sample.text]
    except grpc.aio.AioRpcError as error:
        return [error.code().name, error.details()]
    return said

async def main():
    service = Service(engine, holder, tokenizer, waiting_limit=24, token=TOKEN)
    port = await service.start("127.0.0.1", 0)
    requests = tiny.requests([1 + i % 16 for i in range(32)], 1)
    found = {{}}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        stub = jetstream_compat.orchestrator().jetstream_pb2_grpc.OrchestratorStub(channel)
        def tokens_of(request, most=8):
            return ask(stub.Decode, tokens=request.prompt.tokens.tolist(), max_tokens=most, session_cache="history")
        for version in (1, 2):
            holder.swap(engine.load_params(tiny.params(version - 1), version))
            found["served", version] = await asyncio.gather(*map(tokens_of, requests))
            direct = [r.tokens.tolist() for r in generate(engine, holder, requests)]
            found["direct", version] = [t[:-1] if t[-1] == tiny.STOP else t for t in direct]
        go, step = threading.Event(), engine.generate
        engine.generate = lambda *args: go.wait(60) and step(*args)
        tasks = [asyncio.create_task(tokens_of(request)) for request in requests + requests]
        while sum(task.done() for task in tasks) < 32:
            await asyncio.sleep(0.01)
        go.set()
        answers = await asyncio.gather(*tasks)
        refused = [answer[0] == "RESOURCE_EXHAUSTED" for answer in answers if answer]
        right = [answer == found["served", 2][i % 32] for i, answer in enumerate(answers)]
        found["too many"] = [sum(refused), sum(right)]
        go.clear()
        calls = [asyncio.create_task(tokens_of(request)) for request in requests]
        while service._driver.under_way() < 32:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        while any(one.max_tokens for one in service._driver._placed):
            await asyncio.sleep(0.01)
        found["left"] = [service._driver.under_way(), (await tokens_of(requests[0]))[0]]
        go.set()
        while service._driver.under_way():
            await asyncio.sleep(0.01)
        found["short"] = [await tokens_of(requests[4], 2), found["served", 2][4][:2]]
        [begun] = generate(engine, holder, [tiny.Request(tiny.Prompt(0, "", "", np.array([1, 8], np.int32)), 0, 0)])
        found["text"] = ["".join(await ask(stub.Decode, text="2", max_tokens=8)), tokenizer.decode(begun.tokens)]
        found["refused"] = [
            await ask(stub.Decode, tokens=[5] * 16, max_tokens=4),  # and a BOS
            await ask(stub.Decode, tokens=[], max_tokens=4),
            await ask(stub.Decode, tokens=[23], max_tokens=4),
            await ask(stub.Decode, text="1 2", max_tokens=4),
            await ask(stub.Decode, tokens=[5], max_tokens=9),
            await ask(stub.Decode, tokens=[5]),
            await ask(stub.Decode, max_tokens=4),
            await ask(stub.Decode, tokens=[5], max_tokens=4, metadata=()),
        ]
        found["alive"] = (await stub.HealthCheck(pb2.HealthCheckRequest())).is_live
        found["after"] = await tokens_of(requests[0]) == found["served", 2][0]
    await service.stop()
    print(json.dumps({{str(key): value for key, value in found.items()}}))

asyncio.run(main())
"""

REFUSED = [
    ("INVALID_ARGUMENT", "token_content: 17 tokens; allowed: 1 to 16"),
    ("INVALID_ARGUMENT", "token_content: 1 tokens; allowed: 1 to 16"),
    ("INVALID_ARGUMENT", "token_content: token id 23; allowed: 0 to 22"),
    ("INVALID_ARGUMENT", "text_content: token id 23; allowed: 0 to 22"),
    ("INVALID_ARGUMENT", "max_tokens: 9; allowed: 1 to 8"),
    ("INVALID_ARGUMENT", "max_tokens: 0; allowed: 1 to 8"),
    ("INVALID_ARGUMENT", "content: missing; allowed: text_content or token_content"),
    ("UNAUTHENTICATED", "authorization: no bearer token, or another one"),
]


def test_jetstreams_grpc_server_is_the_direct_loop_and_survives_bad_requests():
    """In a process of its own, since JetStream's Driver kills its process when one of its threads fails."""
    code = SERVER.format(tiny=str(Path(__file__).resolve().parents[1] / "sampler"))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"])}
    environment = {**os.environ, **cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    found = json.loads(out.stdout.splitlines()[-1])
    for version in (1, 2):  # swapped through the holder while the server runs
        assert found[f"('served', {version})"] == found[f"('direct', {version})"]
        assert len(found[f"('served', {version})"]) == 32
        assert sum(map(len, found[f"('direct', {version})"])) > 32
    assert found["('served', 1)"] != found["('served', 2)"]
    assert found["too many"] == [32, 32]  # 8 slots and 24 that may wait
    assert found["left"] == [32, "RESOURCE_EXHAUSTED"]  # clients that left count until their requests have ended
    assert found["short"][0] == found["short"][1]
    assert found["text"][0] == found["text"][1]
    for (code_name, text), (wanted, begins) in zip(found["refused"], REFUSED, strict=True):
        assert code_name == wanted and text.startswith(begins)
    assert found["alive"] and found["after"]

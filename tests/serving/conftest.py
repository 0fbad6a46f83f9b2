"""A server over the tiny model, on a free port of the loopback, and the clients that call it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxrl_sat import embedded
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.sampler import RolloutEngine, SamplerService, WeightHolder
from jaxrl_sat.serving.body import Served
from jaxrl_sat.serving.http import make_app
from jaxrl_sat.serving.server import HttpServer
from tests.sampler import tiny_policy as tiny


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A word a character; word 23, the blank, is one that the tiny model does not have."""
    return Tokenizer.load(embedded.model_path())


@pytest.fixture(scope="session")
def engine() -> RolloutEngine:
    """Four slots, one bucket of prompts, eight tokens a response; requests may have a top-p and a top-k."""
    return tiny.engine(slots=4, limit=8, max_prompt_tokens=16, restricted=True)


@pytest.fixture(scope="session")
def holder(engine: RolloutEngine) -> WeightHolder:
    return WeightHolder(engine.load_params(tiny.params(), 3))


@pytest.fixture(scope="session")
def served(engine: RolloutEngine, tokenizer: Tokenizer) -> Served:
    sizes: dict[str, Any] = {"vocab_size": tiny.CONFIG.vocab_size, "max_prompt_tokens": 16, "topk": engine.records.topk}
    return Served(model="tiny", tokenizer=tokenizer, sampling=engine.sampling, **sizes)


@pytest.fixture(scope="session")
def service(engine: RolloutEngine, holder: WeightHolder, tokenizer: Tokenizer) -> Iterator[SamplerService]:
    with SamplerService([engine], [holder], waiting_limit=64, codec=tokenizer) as service:
        yield service


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of a server that runs `app` meanwhile."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def serve() -> Callable[[Any], Any]:
    return listening


@pytest.fixture(scope="session")
def url(service: SamplerService, served: Served) -> Iterator[str]:
    with listening(make_app(service, served)) as address:
        yield address

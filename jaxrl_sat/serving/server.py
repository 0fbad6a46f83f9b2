"""The servers under one event loop, from the first line of the log to the last."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from jaxrl_sat.sampler import warm_up
from jaxrl_sat.sampler.service import SamplerService
from jaxrl_sat.serving import http, jetstream
from jaxrl_sat.serving.build import Loaded
from jaxrl_sat.serving.settings import Settings

STOP_SECONDS = 10
"""How long calls under way may take when the server stops."""


class HttpServer(uvicorn.Server):
    """uvicorn, with signals left to who runs it."""

    def __init__(self, app: Any):
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=4096,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(loaded: Loaded, settings: Settings, listening: socket.socket | None) -> None:
    """Serve until SIGTERM or Ctrl-C: the first engines on `listening`, the one after them by gRPC."""
    _raise_open_files()
    if settings.warm_up:
        _warm_up(loaded, settings.workers)
    with contextlib.ExitStack() as stack:
        app = orchestrator = None
        parts = tuple(zip(loaded.engines, loaded.holders, strict=True))
        if listening is not None:
            engines, holders = map(list, zip(*parts[: settings.workers], strict=True))
            given = {"waiting_limit": settings.waiting_limit, "order": loaded.order, "codec": loaded.tokenizer}
            service = stack.enter_context(SamplerService(engines, holders, **given))
            app = http.make_app(service, loaded.served, settings.token)
        if settings.grpc_port:
            limits = (settings.waiting_limit, settings.token)
            orchestrator = jetstream.Service(*parts[settings.workers], loaded.tokenizer, *limits)
        asyncio.run(_serve(app, listening, orchestrator, settings, loaded.served.model))


def _warm_up(loaded: Loaded, workers: int) -> None:
    """Have every engine compile what requests need, as HTTP serves the first `workers` and JetStream any other."""
    for index, (engine, holder) in enumerate(zip(loaded.engines, loaded.holders, strict=True)):
        warm = warm_up.warm_up if index < workers else warm_up.warm_up_driver
        name = f"engine {index + 1} of {len(loaded.engines)}"
        warm(
            engine,
            holder.current,
            lambda bucket, name=name: print(f"warming up {name}: prompts of up to {bucket} tokens", flush=True),
        )


async def _serve(
    app: Any,
    listening: socket.socket | None,
    orchestrator: jetstream.Service | None,
    settings: Settings,
    model: str,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if orchestrator is not None:
        port = await orchestrator.start(settings.host, settings.grpc_port)
        print(f"listening on grpc://{_named(settings.host)}:{port} (JetStream, model {model})", flush=True)
    try:
        if listening is None:
            await stop.wait()
        else:
            await _serve_http(HttpServer(app), listening, stop, model)
    finally:
        print("stopping", flush=True)
        if orchestrator is not None:
            await orchestrator.stop()


async def _serve_http(server: HttpServer, listening: socket.socket, stop: asyncio.Event, model: str) -> None:
    serving = asyncio.create_task(server.serve([listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    host, port = listening.getsockname()[:2]
    print(f"listening on http://{_named(host)}:{port}/v1 (model {model})", flush=True)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True
    await serving


def _named(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _raise_open_files() -> None:
    """As many connections as the system lets this process have: each is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

"""JetStream's orchestrator and its gRPC service over one engine.

What JetStream does not survive is refused before it gets there: its Driver kills its process when one of its threads
fails, cuts a prompt that is too long, and takes any number of requests; its own server listens on every address. Its
answers have no log-probs, its requests no sampling of their own: they are drawn as the engine's own are.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import grpc

from jaxrl_sat.sampler import RolloutEngine, WeightHolder, jetstream_compat
from jaxrl_sat.types import InputError

STOP_SECONDS = 5.0
"""How long calls under way may take when the server stops."""


class Service:
    """The gRPC server, to be started and stopped in one event loop.

    `waiting_limit`: requests that may be under way beyond those in slots. With a `token` calls must bear it.
    """

    def __init__(
        self, engine: RolloutEngine, holder: WeightHolder, codec: Any, waiting_limit: int, token: str | None = None
    ):
        self._engine = engine
        self._holder = holder
        self._codec = codec
        self._most = engine.max_concurrent_decodes + waiting_limit
        self._token = None if token is None else f"Bearer {token}".encode()
        self._server: Any = None
        self._driver: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port, chosen by the system where `port` is 0. Raises `InputError` where it is taken."""
        orchestrator = jetstream_compat.orchestrator()
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        try:
            bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise InputError(f"--grpc-port: {port} on {host} is taken; allowed: a free port") from error
        self._driver = jetstream_compat.make_driver(self._engine, self._holder)
        servicer = _checked_orchestrator(orchestrator, self._driver, self._admit, self._most)
        orchestrator.jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        """End the calls under way, after `STOP_SECONDS` if need be, then JetStream's threads."""
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)
            self._driver.stop()

    def _admit(self, request: Any, metadata: Any) -> tuple[grpc.StatusCode, str] | None:
        """What is wrong with a request, if anything is."""
        given = dict(metadata or ()).get("authorization", "")
        if self._token is not None and not hmac.compare_digest(str(given).encode(), self._token):
            message = "authorization: no bearer token, or another one; allowed: metadata authorization: Bearer TOKEN"
            return grpc.StatusCode.UNAUTHENTICATED, message
        try:
            self._check(request)
        except InputError as error:
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        return None

    def _check(self, request: Any) -> None:
        engine, content = self._engine, request.WhichOneof("content")
        if content is None:
            raise InputError("content: missing; allowed: text_content or token_content")
        if not 1 <= request.max_tokens <= engine.max_response_tokens:
            raise InputError(f"max_tokens: {request.max_tokens}; allowed: 1 to {engine.max_response_tokens}")
        if content == "text_content":
            ids = list(self._codec.encode(request.text_content.text))
        else:
            ids = list(request.token_content.token_ids)
        outside = next((i for i in ids if not 0 <= i < engine.config.vocab_size), None)
        if outside is not None:
            raise InputError(f"{content}: token id {outside}; allowed: 0 to {engine.config.vocab_size - 1}")
        length = len(ids) + (not request.session_cache)  # JetStream puts a BOS before what begins a session
        if not 0 < len(ids) or length > engine.max_prompt_tokens:
            raise InputError(f"{content}: {length} tokens; allowed: 1 to {engine.max_prompt_tokens}")


def _checked_orchestrator(orchestrator: Any, driver: Any, admit: Any, most: int) -> Any:
    """JetStream's own servicer, behind `admit`, with at most `most` requests under way."""

    class Orchestrator(orchestrator.LLMOrchestrator):
        def __init__(self) -> None:
            super().__init__(driver)

        async def Decode(self, request: Any, context: Any = None) -> Any:
            # JetStream hears that a client has left by a callback too, some turns of the loop before or after.
            loop = asyncio.get_running_loop()
            context.add_done_callback(lambda _: loop.call_soon(driver.under_way))
            refused = admit(request, context.invocation_metadata())
            if refused is None and driver.under_way() >= most:
                refused = grpc.StatusCode.RESOURCE_EXHAUSTED, f"{most} requests are under way; try again later"
            if refused is not None:
                await context.abort(*refused)
            async for response in super().Decode(request, context):
                yield response

    return Orchestrator()

"""OpenAI-compatible HTTP over a `SamplerService`: completions, chat completions, models, health.

The event loop waits, reads and writes; long prompts are encoded in threads, and tokens made in the engine's.
A client that goes away cancels what it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxrl_sat.sampler.record import Fields
from jaxrl_sat.sampler.service import SamplerService
from jaxrl_sat.sampler.tickets import Busy, RequestFailed
from jaxrl_sat.serving import body
from jaxrl_sat.serving.body import Call, Served
from jaxrl_sat.serving.reply import Reply, Tokens
from jaxrl_sat.types import InputError, Rollout

BODY_BYTES = 4 << 20
"""Longest body of a call."""

SHORT_BODY, SHORT_REPLY = 16 << 10, 512
"""Bytes of a body that are read, and tokens of a reply that are written, without a thread of their own."""

BODY_SECONDS = 60
"""Longest time a body may take to arrive."""

CLIENT_LEFT = 499
"""Status of an answer that nobody reads."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def make_app(service: SamplerService, served: Served, token: str | None = None, hosts: Sequence[str] = ()) -> Any:
    """The ASGI application. With a `token` calls must bear it; without one they must name the loopback or `hosts`."""
    server = _Server(service, served)
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        Route("/health", server.health),
    ]
    handlers: Mapping[Any, Any] = {
        body.UnknownModel: lambda _, error: failure(404, str(error), "model", "model_not_found"),
        InputError: lambda _, error: failure(400, str(error), field_of(str(error))),
        Busy: lambda _, error: failure(429, str(error), kind="rate_limit_error", headers={"Retry-After": "1"}),
        RequestFailed: lambda _, error: failure(500, str(error), kind="server_error"),
        ClientDisconnect: lambda _, error: Response(status_code=CLIENT_LEFT),
        HTTPException: lambda _, error: failure(error.status_code, error.detail, headers=error.headers),
        Exception: lambda _, error: failure(500, f"{type(error).__name__}: {error}", kind="server_error"),
    }
    return _Guard(Starlette(routes=routes, exception_handlers=handlers), token, (*LOOPBACK_NAMES, *hosts))


def error_object(message: str, param: str | None, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    kind: str = "invalid_request_error",
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer to a call that cannot be served."""
    return JSONResponse(error_object(message, param, kind, code), status, headers)


def field_of(message: str) -> str | None:
    """The field that an `InputError` begins with; None where it is the body as a whole."""
    found = re.match(r"[\w.\[\]]+(?=[: ])", message)
    name = found.group() if found else None
    return None if name == "body" else name


class _Guard:
    """Lets calls through that bear the token. Without one, those that a browser was not tricked into sending."""

    def __init__(self, app: Any, token: str | None, hosts: Sequence[str]):
        self._app = app
        self._token = None if token is None else f"Bearer {token}".encode()
        self._hosts = frozenset(name.lower() for name in hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = self._refuse(Request(scope)) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refuse(self, request: Request) -> Response | None:
        if request.url.path == "/health":
            return None
        if self._token is None:
            # A page may point a name of its own at the loopback; the name gives it away.
            name = re.sub(r":\d+$", "", request.headers.get("host", "")).lower()
            return None if name in self._hosts else failure(403, f"host: {name!r}; allowed: a name of the loopback")
        given = request.headers.get("authorization", "").encode()
        if hmac.compare_digest(given, self._token):
            return None
        message = "authorization: no bearer token, or another one; allowed: Authorization: Bearer TOKEN"
        return failure(401, message, "authorization", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class _Server:
    def __init__(self, service: SamplerService, served: Served):
        self._service = service
        self._served = served
        self._since = int(time.time())

    async def health(self, request: Request) -> Response:
        health = self._service.health()
        well = health.error is None and not health.hung
        return JSONResponse({"ok": well, **dataclasses.asdict(health)}, 200 if well else 503)

    async def models(self, request: Request) -> Response:
        name, served = request.path_params.get("name"), self._served
        if name not in (None, served.model):
            raise body.UnknownModel(f"model: {name!r}; allowed: {served.model!r}, the one served")
        longest = served.max_prompt_tokens + served.sampling.max_response_tokens
        model = {"id": served.model, "object": "model", "created": self._since, "owned_by": "jaxrl_sat"}
        model |= {"max_model_len": longest}
        return JSONResponse(model if name else {"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, body.completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, body.chat)

    async def _answer(self, request: Request, understand: Callable[[Any, Served], Call]) -> Response:
        content = await read_body(request)
        call = await _at_once(len(content) <= SHORT_BODY, lambda: understand(body.parse_json(content), self._served))
        reply = Reply(call, self._served)
        responses = Responses(self._service, call)
        if call.fields.stream:
            return _Stream(reply, call, responses)
        gone = asyncio.create_task(_gone(request))
        try:
            rollouts = await responses.all(gone)
        finally:
            gone.cancel()
            responses.cancel()
        if rollouts is None:
            return Response(status_code=CLIENT_LEFT)
        tokens = sum(len(rollout.tokens) for rollout in rollouts)
        return JSONResponse(await _at_once(tokens <= SHORT_REPLY, lambda: reply.whole(rollouts)))


async def _at_once(short: bool, work: Callable[[], Any]) -> Any:
    """What `work` returns, done here if it is short, else in a thread, so that the event loop goes on."""
    return work() if short else await run_in_threadpool(work)


async def read_body(request: Request) -> bytes:
    """The body of a JSON call. Raises `HTTPException` where it is no JSON by its header, too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"content-type: {kind!r}; allowed: application/json")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > BODY_BYTES:
                    raise HTTPException(413, f"body: over {BODY_BYTES} bytes; allowed: at most that many")
                parts.append(part)
    except TimeoutError as error:
        raise HTTPException(408, f"body: not there after {BODY_SECONDS} s; allowed: sooner") from error
    return b"".join(parts)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Responses:
    """The requests of a call under way, brought from the engines' threads into this event loop."""

    def __init__(self, service: SamplerService, call: Call):
        """Hand them all in. Raises `Busy`, `InputError`, and `HTTPException` where the service has ended."""
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, Tokens | None]] = asyncio.Queue()
        told = [self._told(index) if call.fields.stream else None for index in range(len(call.requests))]
        try:
            self._tickets = service.submit_all(call.requests, on_tokens=told)
        except RuntimeError as error:
            raise HTTPException(503, str(error)) from error

    def _told(self, index: int) -> Callable[[Fields], None]:
        return lambda fields: self._hand_over(index, Tokens.of_fields(fields))

    def _hand_over(self, index: int, tokens: Tokens | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, and nobody listens
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, tokens))

    def cancel(self) -> None:
        """Give up what is not done."""
        for ticket in self._tickets:
            ticket.cancel()

    async def all(self, gone: asyncio.Task[None]) -> list[Rollout] | None:
        """What came of each request, in order; None once `gone` is done. Raises `RequestFailed`."""
        rollouts = asyncio.gather(*(asyncio.wrap_future(ticket.future) for ticket in self._tickets))
        await asyncio.wait({rollouts, gone}, return_when=asyncio.FIRST_COMPLETED)
        if rollouts.done():
            return rollouts.result()
        rollouts.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody asks any more
        rollouts.cancel()
        return None

    async def news(self) -> AsyncIterator[tuple[int, Tokens | Rollout]]:
        """New tokens of request i, and what came of it once it is done, until all are. Raises `RequestFailed`."""
        for index, ticket in enumerate(self._tickets):
            ticket.future.add_done_callback(lambda _, index=index: self._hand_over(index, None))
        left = len(self._tickets)
        while left:
            index, tokens = await self._news.get()
            left -= tokens is None
            yield index, self._tickets[index].result() if tokens is None else tokens


class _Stream(StreamingResponse):
    """Server-sent events of a call. Whatever ends it, a client that left included, nothing stays under way."""

    def __init__(self, reply: Reply, call: Call, responses: Responses):
        super().__init__(_events(reply, call, responses), media_type="text/event-stream")
        self._responses = responses

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._responses.cancel()


async def _events(reply: Reply, call: Call, responses: Responses) -> AsyncIterator[bytes]:
    streams = [reply.choice(index) for index in range(len(call.requests))]
    rollouts: dict[int, Rollout] = {}
    try:
        async for index, news in responses.news():
            if isinstance(news, Rollout):
                rollouts[index] = news
                choices = streams[index].end(news)
            else:
                choices = streams[index].feed(news)
            for choice in choices:
                yield _event(reply.event([choice]))
        if call.fields.stream_options.include_usage:
            yield _event(reply.event([], [rollouts[index] for index in range(len(streams))]))
    except RequestFailed as error:
        yield _event(error_object(str(error), None, "server_error"))
    yield b"data: [DONE]\n\n"


def _event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"

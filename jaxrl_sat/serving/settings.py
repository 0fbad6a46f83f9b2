"""The flags of `python -m jaxrl_sat.sampler.serve`, checked. No JAX yet."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from jaxrl_sat import cli
from jaxrl_sat.types import InputError

FLAGS = (
    "--config=FILE[:PRESET], --host=H, --port=N, --grpc-port=N, --workers=N, --waiting-limit=N, --token-file=FILE, "
    "--checkpoint=RUN, --model-name=NAME, --temperature=T, --no-warm-up, --config.KEY=VALUE, --help"
)

TOKEN_LENGTH = 16
"""Fewest characters of a token."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the flags say beside the config."""

    host: str
    port: int
    grpc_port: int  # 0: no gRPC
    workers: int
    waiting_limit: int
    token: str | None
    checkpoint: Path | None
    model_name: str | None
    temperature: float | None  # None: the config's
    warm_up: bool  # compile before listening

    @property
    def engines(self) -> int:
        """Those behind HTTP, and one for gRPC."""
        return self.workers + (self.grpc_port > 0)


def parse(argv: Sequence[str]) -> tuple[Settings, cli.Source]:
    """The flags in `argv`, and the config they name. Raises `InputError`; --help prints and exits 0."""
    parser = cli.Parser("python -m jaxrl_sat.sampler.serve", "Serve a model over HTTP and gRPC.", FLAGS)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; not of the loopback: needs a token")
    parser.add_argument("--port", type=int, default=8000, help="port of HTTP (8000); 0: a free one")
    parser.add_argument("--grpc-port", type=int, default=0, help="port of JetStream's gRPC; 0: none")
    parser.add_argument("--workers", type=int, default=1, help="engines behind HTTP (1); 0: no HTTP, with --grpc-port")
    parser.add_argument("--waiting-limit", type=int, default=1024, help="requests that may wait for a slot (1024)")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token that calls must have")
    parser.add_argument("--checkpoint", type=Path, help="work folder of a run: its newest weights, not model.path's")
    parser.add_argument("--model-name", help="what the model is called (the name of its folder)")
    parser.add_argument("--temperature", type=float, help="of requests that name none (sampler.temperature); 0: greedy")
    parser.add_argument(
        "--no-warm-up", dest="warm_up", action="store_false", help="listen at once; first requests wait for compilation"
    )
    given, source = parser.parse_source(argv)
    _check(given)
    token = None if given.token_file is None else _read_token(given.token_file)
    names = {field.name for field in dataclasses.fields(Settings)}
    flags = {name: value for name, value in vars(given).items() if name in names}
    return Settings(token=token, **flags), source


def _check(given: argparse.Namespace) -> None:
    for flag, low, high in (
        ("port", 0, 65535),
        ("grpc_port", 0, 65535),
        ("workers", 0, 64),
        ("waiting_limit", 1, 10**6),
    ):
        value = getattr(given, flag)
        if not low <= value <= high:
            raise InputError(f"--{flag.replace('_', '-')}: {value}; allowed: {low} to {high}")
    if not given.workers and not given.grpc_port:
        raise InputError("--workers: 0 without --grpc-port; allowed: 1 or more, or a --grpc-port beside it")
    if given.temperature is not None and not 0 <= given.temperature < float("inf"):
        raise InputError(f"--temperature: {given.temperature}; allowed: a number, 0 or more")
    if given.token_file is None and not _is_loopback(given.host):
        raise InputError(
            f"--token-file: missing, and --host={given.host} is not the loopback; allowed: a file with a token"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_token(file: Path) -> str:
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise InputError(f"--token-file: {file} cannot be read ({error}); allowed: a file with a token") from error
    if len(token) < TOKEN_LENGTH or not token.isprintable() or " " in token:
        allowed = f"one of {TOKEN_LENGTH} or more printable characters without spaces, and nothing else"
        raise InputError(f"--token-file: {file} holds no usable token; allowed: {allowed}")
    return token


def bound(settings: Settings) -> socket.socket:
    """A socket bound to the address of HTTP, not yet listening. Raises `InputError` where that cannot be had."""
    with contextlib.ExitStack() as unwinding:
        try:
            found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            made = unwinding.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except (OSError, UnicodeError) as error:
            where, allowed = f"{settings.host}:{settings.port}", "an address of this machine and a port that is free"
            raise InputError(f"--host and --port: {where} ({error}); allowed: {allowed}") from error
        unwinding.pop_all()
        return made

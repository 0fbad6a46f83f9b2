"""The command: what it refuses before it listens, whose weights it serves, and a whole life of it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat import cli, config, embedded
from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.model import load_hf
from jaxrl_sat.sampler import jetstream_compat, serve
from jaxrl_sat.serving import build, settings
from jaxrl_sat.tools import complete
from jaxrl_sat.types import InputError, TrainState
from tests.run_configs import CONFIGS, flagship

FLAGSHIP = f"--config={CONFIGS / 'sat_grpo.py'}:cpu"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that a refused command ends with."""
    assert serve.main(arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --config; allowed: --config=FILE[:PRESET], --host=H, --port=N"),
        ([FLAGSHIP, "--prot=1"], "--prot=1: no such flag; allowed: "),
        ([FLAGSHIP, "--port=x"], "argument --port: invalid int value: 'x'; allowed: "),
        ([FLAGSHIP, "--port=70000"], "--port: 70000; allowed: 0 to 65535"),
        ([FLAGSHIP, "--grpc-port=-1"], "--grpc-port: -1; allowed: 0 to 65535"),
        ([FLAGSHIP, "--workers=0"], "--workers: 0 without --grpc-port; allowed: 1 or more"),
        ([FLAGSHIP, "--waiting-limit=0"], "--waiting-limit: 0; allowed: 1 to 1000000"),
        ([FLAGSHIP, "--temperature=-1"], "--temperature: -1.0; allowed: a number, 0 or more"),
        ([FLAGSHIP, "--temperature=nan"], "--temperature: nan; allowed: a number, 0 or more"),
        ([FLAGSHIP, "--host=0.0.0.0"], "--token-file: missing, and --host=0.0.0.0 is not the loopback"),
        ([FLAGSHIP, "--host=::"], "--token-file: missing, and --host=:: is not the loopback"),
        ([FLAGSHIP, "--host=localhost.example"], "--token-file: missing, and --host=localhost.example is not the"),
        ([FLAGSHIP, "--token-file=nowhere"], "--token-file: nowhere cannot be read ("),
        ([FLAGSHIP, "--host=127.0.0.1", "--port=0", "--config.sampler.slotz=1"], "sampler.slotz: no such key; did you"),
        ([FLAGSHIP, "--port=0", "--checkpoint=nowhere"], "--checkpoint: nowhere has no checkpoints; allowed: "),
    ],
)
def test_what_cannot_be_served_is_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert error_of(capsys, *arguments).startswith(message)


@pytest.mark.parametrize("text", ["", "short", "a token of enough length", "a-token-with-\u00e9-in-it", "a\nb" * 9])
def test_a_token_that_is_none(capsys, tmp_path, text):
    (tmp_path / "token").write_text(text)
    assert error_of(capsys, FLAGSHIP, f"--token-file={tmp_path / 'token'}").startswith("--token-file: ")


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = error_of(capsys, FLAGSHIP, f"--port={taken.getsockname()[1]}")
    assert line.startswith("--host and --port: 127.0.0.1:") and "a port that is free" in line


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_the_loopback_needs_no_token(host):
    found, source = settings.parse([FLAGSHIP, f"--host={host}", "--grpc-port=9"])
    assert (found.host, found.token, found.engines) == (host, None, 2)
    assert source.preset == "cpu"


def test_it_is_warm_unless_asked_not_to_be():
    assert settings.parse([FLAGSHIP])[0].warm_up
    assert not settings.parse([FLAGSHIP, "--no-warm-up"])[0].warm_up


def test_a_checkpoints_weights_are_served_under_its_version(tmp_path):
    start = load_hf(embedded.model_path())[1]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, start)
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints", keep=1)) as checkpoints:
        checkpoints.save(TrainState(doubled, {}, jnp.int32(7), jnp.int32(0)), {})
    run = config.from_config_dict(flagship())
    loaded = build.load(run, 2, tmp_path, "mine")
    assert loaded.served.model == "mine" and loaded.served.vocab_size == 24
    assert [engine.mesh.devices.item() for engine in loaded.engines] == jax.devices()[:2]
    for engine, holder in zip(loaded.engines, loaded.holders, strict=True):
        assert holder.current.version == 7
        expected = engine.load_params(doubled, 7).decode_params
        jax.tree.map(np.testing.assert_array_equal, holder.current.decode_params, expected)


def test_weights_that_are_not_finite_are_not_served(tmp_path):
    start = load_hf(embedded.model_path())[1]
    broken = start | {"embedding": start["embedding"].at[3, 5].set(jnp.nan)}
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints", keep=1)) as checkpoints:
        checkpoints.save(TrainState(broken, {}, jnp.int32(7), jnp.int32(0)), {})
    with pytest.raises(InputError, match=r"^weights of version 7: \S+ not finite; finite numbers alone allowed$"):
        build.load(config.from_config_dict(flagship()), 1, tmp_path, None)


def test_engines_beyond_the_devices():
    with pytest.raises(
        InputError, match="--workers and --grpc-port: 9 engines of 1 devices, 8 devices found; allowed:"
    ):
        build.load(config.from_config_dict(flagship()), 9, None, None)


def test_no_data_need_be_named():
    """The gpu preset names neither model nor data; serving asks for the model alone."""
    _, source = settings.parse([f"--config={CONFIGS / 'sat_grpo.py'}:gpu", "--config.model.path=embedded"])
    assert config.from_config_dict(cli.load(serve.without_data(source), "gpu")).model.path == "embedded"


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[tuple[Any, list[str]]]:
    """A server in a process of its own, once it listens, and what it has printed."""
    command = [sys.executable, "-m", "jaxrl_sat.sampler.serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CONFIGS.parent) as process:
        assert process.stdout is not None
        printed: list[str] = []
        try:
            while not printed or not printed[-1].startswith("listening on http:"):
                printed.append(process.stdout.readline())
                assert printed[-1], printed
            yield process, printed
        finally:
            process.kill()


@pytest.mark.slow
def test_a_whole_life(capsys, tmp_path):
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-length\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [FLAGSHIP, "--port=0", f"--grpc-port={port}", f"--token-file={token}", "--temperature=0"]
    with running(*flags, "--config.sampler.slots=4") as (process, printed):
        assert [line.partition(":")[0] for line in printed[-2:]] == ["listening on grpc", "listening on http"]
        warm = [line.removesuffix("\n") for line in printed if line.startswith("warming up ")]
        assert warm == [f"warming up engine {i} of 2: prompts of up to 16 tokens" for i in (1, 2)]
        url = f"--url={printed[-1].split()[2].removesuffix('/v1')}"
        assert complete.main([url, "--chat", "2+3"]) == 2
        assert "status 401, authorization: no bearer token" in capsys.readouterr().err
        said = []
        for more in (["--chat", "2+3"], ["<bos><user>2+3<assistant>"], ["--logprobs", "--chat", "2+3"]):
            assert complete.main([url, f"--token-file={token}", *more]) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1] and said[2].count("\n") >= 2 and f"'{said[0][0]}'" in said[2]
        assert complete.main([url, f"--token-file={token}", "--max-tokens=99", "1"]) == 2
        assert "max_tokens: 99; allowed: at most 8" in capsys.readouterr().err

        orchestrator = jetstream_compat.orchestrator()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = orchestrator.jetstream_pb2_grpc.OrchestratorStub(channel)
            text = orchestrator.jetstream_pb2.DecodeRequest.TextContent(text="<user>2+3<assistant>")
            request = orchestrator.jetstream_pb2.DecodeRequest(text_content=text, max_tokens=8)
            bearer = (("authorization", f"Bearer {token.read_text().strip()}"),)
            answers = stub.Decode(request, metadata=bearer)
            assert "".join(answer.stream_content.samples[0].text for answer in answers) + "\n" == said[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == "stopping\n"

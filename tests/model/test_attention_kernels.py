"""The kernels of accelerators: their values where they can be interpreted here, else what they lower to."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.model import attention_kernels as kernels
from jaxrl_sat.model.attention import attend_segments, attend_segments_from
from tests.model.helpers import gap, tree_gap


def inputs(length: int, head_dim: int, heads: int = 4, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(length)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, n, head_dim)), dtype) for n in (heads, 2, 2))
    segments = np.stack([np.repeat([1, 2, 0], [length // 2, length // 4, length // 4]), np.ones(length)])
    return q, k, v, jnp.asarray(segments, jnp.int32)


@pytest.mark.parametrize("pieces", [1, 2])
def test_splash_is_attention_in_chunks(pieces: int) -> None:
    """Each piece of the queries against all keys; heads of 64, which the kernel wants padded."""
    q, k, v, segments = inputs(256 * pieces, 64)
    whole = attend_segments(q, k, v, segments)
    size = q.shape[1] // pieces
    for piece in range(pieces):
        at = slice(piece * size, (piece + 1) * size)
        own = (q[:, at], k, v, segments[:, at], segments)
        assert gap(kernels._splash(*own, jnp.int32(piece), pieces, interpret=True), whole[:, at]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("piece", [0, 1])
def test_gradient_of_splash_is_that_of_chunks(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of queries a piece."""
    monkeypatch.setattr(kernels, "MAX_BLOCK", 128)
    q, k, v, segments = inputs(512, 64)
    at = slice(256 * piece, 256 * piece + 256)
    own = (segments[:, at], segments, jnp.int32(piece), 2)

    def gradient(attend: Any) -> Any:
        return jax.grad(lambda q, k, v: jnp.sum(jnp.sin(attend(q[:, at], k, v))), (0, 1, 2))(q, k, v)

    ours = gradient(lambda q, k, v: attend_segments_from(q, k, v, *own[:2], jnp.int32(at.start)))
    assert tree_gap(gradient(lambda q, k, v: kernels._splash(q, k, v, *own, interpret=True)), ours) < 1e-4


def test_queries_from_the_middle_of_a_row_see_what_they_do_in_the_whole() -> None:
    q, k, v, segments = inputs(48, 8)
    part = jax.jit(attend_segments_from)(q[:, 20:], k, v, segments[:, 20:], segments, jnp.int32(20))
    assert gap(part, attend_segments(q, k, v, segments)[:, 20:]) < 1e-6


def test_runs_of_one_segment_have_lengths_and_starts() -> None:
    ids = jnp.asarray([3, 3, 3, 1, 1, 2, 0, 0], jnp.int32)
    lengths, starts = jax.jit(functools.partial(kernels.segment_runs, most=6))(ids)
    np.testing.assert_array_equal(lengths, [3, 2, 1, 2, -1, -1])
    np.testing.assert_array_equal(starts, [0, 3, 5, 6, -1, -1, -1])


@pytest.mark.parametrize(
    ("dtype", "segments", "fused"), [("bfloat16", 4, True), ("bfloat16", 0, False), ("float32", 4, False)]
)
def test_on_a_gpu_sixteen_bit_rows_go_to_cudnn(
    dtype: str, segments: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lowered for CUDA; this machine has no cuDNN, so its version is given."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    q, k, v, ids = inputs(64, 64, dtype=jnp.dtype(dtype))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(kernels.attend(q, k, v, ids, ids, jnp.int32(0), 1, "cudnn", segments).astype(jnp.float32))

    text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert ("__cudnn$fmhaSoftmaxBackward" in text) == fused
    assert ("PADDING_CAUSAL" in text) == fused


def test_on_a_tpu_whole_blocks_go_to_splash() -> None:
    q, k, v, ids = inputs(128, 128, dtype=jnp.bfloat16)

    @jax.jit
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return kernels.attend(q, k, v, ids, ids, jnp.int32(0), 1, "splash", 0)

    def fused(*given: jax.Array) -> bool:
        return "tpu_custom_call" in attend.trace(*given).lower(lowering_platforms=("tpu",)).as_text()

    assert fused(q, k, v, ids)
    assert not fused(*(x[:, :64] for x in (q, k, v, ids)))
    assert not fused(*(x.astype(jnp.float32) for x in (q, k, v)), ids)


@pytest.mark.parametrize(
    ("platform", "capability", "kernel"),
    [
        ("gpu", "9.0", "cudnn"),
        ("gpu", "8.0", "chunks"),
        ("gpu", "gfx90a", "chunks"),
        ("tpu", "", "splash"),
        ("cpu", "", "chunks"),
    ],
)
def test_the_kernel_follows_from_the_device(platform: str, capability: str, kernel: str) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert kernels.kernel_of(device) == kernel

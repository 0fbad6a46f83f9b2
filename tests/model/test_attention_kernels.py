"""The kernels of accelerators: their values where they can be interpreted here, else what they lower to."""

from __future__ import annotations

import functools
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
def test_gradient_of_splash_is_that_of_chunks() -> None:
    q, k, v, segments = inputs(256, 64)
    own = (segments[:, 128:], segments, jnp.int32(1), 2)

    def gradient(attend: Any) -> Any:
        return jax.grad(lambda q, k, v: jnp.sum(jnp.sin(attend(q[:, 128:], k, v))), (0, 1, 2))(q, k, v)

    ours = gradient(lambda q, k, v: attend_segments_from(q, k, v, *own[:2], jnp.int32(128)))
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
        return jnp.sum(kernels.attend(q, k, v, ids, ids, jnp.int32(0), 1, "gpu", segments).astype(jnp.float32))

    text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert ("__cudnn$fmhaSoftmaxBackward" in text) == fused
    assert ("PADDING_CAUSAL" in text) == fused


def test_on_a_tpu_whole_blocks_go_to_splash() -> None:
    q, k, v, ids = inputs(128, 128)
    lowered = jax.jit(lambda *x: kernels.attend(*x, ids, ids, jnp.int32(0), 1, "tpu", 0))
    assert "tpu_custom_call" in lowered.trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()
    short = jax.jit(lambda *x: kernels.attend(*x, ids[:, :64], ids[:, :64], jnp.int32(0), 1, "tpu", 0))
    text = short.trace(*(x[:, :64] for x in (q, k, v))).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in text

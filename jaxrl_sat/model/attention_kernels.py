"""Causal attention over packed rows by the best kernel of the backend, on this device's queries and all keys.

    splash  TPU: splash attention (Pallas), for 16-bit rows whose length fills its blocks
    cudnn   GPU from Hopper on: cuDNN's flash attention on packed sequences, for the dtypes and heads that it takes
    chunks  query chunks against their causal prefix (`jaxrl_sat.model.attention`): everything else

None of them holds [T, T] scores. Each marks what its backward pass reads as a product worth keeping (`ops.saved`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_sat.model.attention import attend_segments, attend_segments_from
from jaxrl_sat.model.ops import PRODUCT, saved

SPLASH_LANES = 128
"""Splash attention takes lengths and head sizes in multiples of this."""

MAX_BLOCK = 1024
"""Queries and keys a splash block holds at most: a block of scores takes 4 MiB of vector memory."""


Kernel = Literal["splash", "cudnn", "chunks"]


def kernel_of(device: Any) -> Kernel:
    """The kernel of a `jax.Device`."""
    if device.platform == "tpu":
        return "splash"
    return "cudnn" if device.platform == "gpu" and _packs(getattr(device, "compute_capability", "")) else "chunks"


def _packs(compute_capability: str) -> bool:
    """Whether cuDNN packs sequences on such a GPU: from 9.0 on. AMD's have names in the place of numbers."""
    try:
        return float(compute_capability) >= 9.0
    except ValueError:
        return False


def attend(
    q: Float[Array, "B Q H hd"],
    k: Float[Array, "B T KV hd"],
    v: Float[Array, "B T KV hd"],
    q_segments: Int[Array, "B Q"],
    k_segments: Int[Array, "B T"],
    piece: Int[Array, ""],
    pieces: int,
    kernel: Kernel,
    max_segments: int,
) -> Float[Array, "B Q H hd"]:
    """Causal attention inside each segment. The queries are piece number `piece` of the row's `pieces` equal parts.

    `max_segments`: runs of one id that a row holds at most, 0 if not known (cuDNN must know). Softmax in float32.
    """
    # In float32 the products of splash would be shortened: Pallas has no precision for them.
    if kernel == "splash" and q.shape[1] % SPLASH_LANES == 0 and q.dtype != jnp.float32:
        return _splash(q, k, v, q_segments, k_segments, piece, pieces)
    if kernel == "cudnn" and pieces == 1 and max_segments and _cudnn_takes(q):
        return _cudnn(q, k, v, k_segments, max_segments)
    if pieces == 1:
        return attend_segments(q, k, v, k_segments)
    return attend_segments_from(q, k, v, q_segments, k_segments, piece * q.shape[1])


# ------------------------------------------------------------------------------------------------- splash (TPU)


def _splash(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    k_segments: Array,
    piece: Array,
    pieces: int,
    interpret: bool = False,
) -> Array:
    # Imported where it is used: a machine without TPU needs no Pallas for it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    head_dim = q.shape[-1]
    padding = [(0, 0)] * 3 + [(0, -head_dim % SPLASH_LANES)]  # zeros add nothing to scores, and are cut off below
    q, k, v = (jnp.pad(x, padding).swapaxes(1, 2) for x in (q * head_dim**-0.5, k, v))
    kernel = _splash_kernel(q.shape[1], q.shape[2], pieces, interpret)

    def this_piece(info: Any) -> Array:
        # Block tables are [heads, query blocks, key blocks]; the last kind is the number of each query, [queries].
        axis = 1 if info.ndim == 3 else 0
        size = info.shape[axis] // pieces
        return jax.lax.dynamic_slice_in_dim(info, piece * size, size, axis)

    kernel = jax.tree.map(this_piece, kernel) if pieces > 1 else kernel
    ids = splash.SegmentIds(q=q_segments, kv=k_segments)
    return jax.vmap(kernel)(q, k, v, ids).swapaxes(1, 2)[..., :head_dim]


@functools.lru_cache(maxsize=8)  # its block tables take seconds at 32k positions, and a train step has several traces
def _splash_kernel(heads: int, queries: int, pieces: int, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = math.gcd(queries, MAX_BLOCK)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=min(block, 512),
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=min(block, 512),
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((queries * pieces, queries * pieces))] * heads)
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            mask,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=pieces,
            residual_checkpoint_name=PRODUCT,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)  # tables of no trace and no device


# ---------------------------------------------------------------------------------------------------- cuDNN (GPU)


def _cudnn_takes(q: Array) -> bool:
    """cuDNN's packed form: 16-bit numbers, heads of at most 128 in steps of 8."""
    return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0


def _cudnn(q: Array, k: Array, v: Array, segment_ids: Array, max_segments: int) -> Array:
    """Each run of one id is a sequence of its own; where each begins and how long it is go in beside the row."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    # Offsets into keys are counted there in heads of the queries, so both get as many.
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    lengths, offsets = jax.vmap(functools.partial(segment_runs, most=max_segments))(segment_ids)
    out: Any = dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=q.shape[-1] ** -0.5,
        mask_type=MaskType.PADDING_CAUSAL,
    )
    return saved(out)


def segment_runs(segment_ids: Int[Array, " T"], most: int) -> tuple[Int[Array, " S"], Int[Array, " S1"]]:
    """Lengths and starts of the runs of equal ids of one row, S = `most`: -1 where there is no run, as cuDNN asks."""
    length = segment_ids.shape[0]
    begins = jnp.concatenate([jnp.ones(1, bool), segment_ids[1:] != segment_ids[:-1]])
    starts = jnp.nonzero(begins, size=most + 1, fill_value=length)[0].astype(jnp.int32)
    lengths = starts[1:] - starts[:-1]
    return jnp.where(lengths > 0, lengths, -1), jnp.where(starts < length, starts, -1)

"""What one decode step says of each slot, as one int32 array: one copy to the host a step, and no objects a token.

Floats are bit-cast, expert ids packed into words in the smallest integer that fits: 30B-A3B with 20 log-probs takes
568 bytes a token on the way to the host, of which a rollout keeps 556. A nucleus adds an int32 for each word it may
hold on the way, and in the rollout for each word of the longest one of the response; without top-p it adds nothing.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from jaxrl_sat.model import ModelConfig
from jaxrl_sat.sampler.jetstream_compat import ResultTokens
from jaxrl_sat.sampler.sampling import Draw

GOING, STOP, LENGTH = 0, 1, 2
"""Values of the `finish` column."""

FINISH_REASONS = {STOP: "stop", LENGTH: "length"}


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """Columns of a record: token, valid, length, finish, version, logp, topk ids, topk logp, nucleus ids, packed
    expert ids."""

    topk: int
    nucleus: int  # most words; 0 without top-p
    sparse_layers: int
    experts_per_token: int
    expert_dtype: str  # "uint8" or "uint16"

    @classmethod
    def of(cls, config: ModelConfig, topk: int, nucleus: int) -> RecordLayout:
        """The record of a model, K log-probs and nuclei of up to C words."""
        per_token = config.num_experts_per_tok if config.num_sparse_layers else 0
        expert_dtype = "uint8" if config.num_experts <= 256 else "uint16"
        return cls(topk, nucleus, config.num_sparse_layers, per_token, expert_dtype)

    @property
    def num_expert_ids(self) -> int:
        """Expert ids a token: sparse layers times experts a token."""
        return self.sparse_layers * self.experts_per_token

    @cached_property
    def width(self) -> int:
        """int32 words a slot."""
        per_word = 4 // np.dtype(self.expert_dtype).itemsize
        return 6 + 2 * self.topk + self.nucleus + -(-self.num_expert_ids // per_word)

    def compact(self, expert_ids: Int[Array, "M *batch k"]) -> Array:
        """Expert ids with the token axes first, [*batch, M * k], in the smallest integer."""
        moved = jnp.moveaxis(expert_ids, 0, -2).astype(self.expert_dtype)
        return moved.reshape(*moved.shape[:-2], self.num_expert_ids)

    def pack(
        self,
        drawn: Draw,
        valid: Bool[Array, " S"],
        lengths: Int[Array, " S"],
        finish: Int[Array, " S"],
        version: Int[Array, ""],
        expert_ids: Int[Array, "M S k"],
    ) -> Int[Array, "S W"]:
        """The records of one step, on the device. `finish` is GOING, STOP or LENGTH."""
        slots = valid.shape[0]
        scalars = (drawn.tokens, valid, lengths, finish, jnp.broadcast_to(version, (slots,)), _bits(drawn.logp))
        parts = [jnp.stack([column.astype(jnp.int32) for column in scalars], axis=-1)]
        parts += [drawn.topk_ids.astype(jnp.int32), _bits(drawn.topk_logp)]
        if self.nucleus:
            parts.append(drawn.nucleus_ids)
        if self.num_expert_ids:
            compact = self.compact(expert_ids)
            per_word = 4 // compact.dtype.itemsize
            padded = jnp.pad(compact, ((0, 0), (0, -self.num_expert_ids % per_word)))
            parts.append(_bits(padded.reshape(slots, -1, per_word)))
        return jnp.concatenate(parts, axis=-1)

    def unpack(self, data: np.ndarray) -> Fields:
        """The columns of records [..., W], as views of host memory in their own types."""
        k = self.topk
        ranked, routed = 6 + 2 * k, 6 + 2 * k + self.nucleus
        expert = data[..., routed:].view(self.expert_dtype)[..., : self.num_expert_ids]
        return Fields(
            tokens=data[..., 0],
            valid=data[..., 1],
            lengths=data[..., 2],
            finish=data[..., 3],
            versions=data[..., 4],
            logp=data[..., 5].view(np.float32),
            topk_ids=data[..., 6 : 6 + k],
            topk_logp=data[..., 6 + k : ranked].view(np.float32),
            nucleus_ids=data[..., ranked:routed],
            expert_ids=expert.reshape(*expert.shape[:-1], self.sparse_layers, self.experts_per_token),
        )


@dataclasses.dataclass(frozen=True)
class Fields:
    """Views of records, see `RecordLayout`: int32 unless said."""

    tokens: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray
    finish: np.ndarray
    versions: np.ndarray
    logp: np.ndarray  # float32
    topk_ids: np.ndarray
    topk_logp: np.ndarray  # float32
    nucleus_ids: np.ndarray
    expert_ids: np.ndarray  # [..., M, k], uint8 or uint16


def _bits(values: Array) -> Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


@struct.dataclass
class RolloutTokens(ResultTokens):
    """JetStream's result of a step, and everything else a rollout records of it (`fields`), in the same one array."""

    layout: RecordLayout = struct.field(pytree_node=False)

    @classmethod
    def of(cls, data: Array, layout: RecordLayout) -> RolloutTokens:
        """The result whose records are `data` [S, W]."""
        return cls(data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1, layout=layout)

    def copy_to_host_async(self) -> None:
        """Start the copy that `convert_to_numpy` will wait for."""
        if isinstance(self.data, jax.Array):
            self.data.copy_to_host_async()

    def convert_to_numpy(self) -> RolloutTokens:
        """The same result in host memory."""
        return dataclasses.replace(self, data=np.asarray(self.data))

    @property
    def fields(self) -> Fields:
        """Every recorded column, in host memory."""
        return self.layout.unpack(np.asarray(self.data))

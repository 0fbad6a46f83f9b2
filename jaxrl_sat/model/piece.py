"""What one device has of the tokens and of the weights, inside `Layout.manual`."""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec

from jaxrl_sat.layout import Cut, Layout
from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.model.execution import Execution
from jaxrl_sat.types import Numerics

TOKENS = ("rows", "sequence")
"""Logical axes of an array of tokens [B, T]."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """The cuts that a layer's collectives go by, and what its products are computed in. Static."""

    layout: Layout
    rows: Cut
    sequence: Cut
    heads: Cut
    mlp: Cut
    expert_mlp: Cut
    experts: Cut
    numerics: Numerics = "none"
    output_first: bool = False

    @classmethod
    def of(cls, config: ModelConfig, execution: Execution, tokens: PartitionSpec) -> Piece:
        """The piece of this model where tokens are cut as `tokens` says."""

        def cut(name: str, size: int) -> Cut:
            return execution.layout.spec((name,), (size,))[0] if size else None

        return cls(
            layout=execution.layout,
            rows=tokens[0],
            sequence=tokens[1],
            heads=cut("heads", config.num_attention_heads),
            mlp=cut("mlp", config.intermediate_size),
            expert_mlp=cut("mlp", config.moe_intermediate_size),
            experts=cut("experts", config.num_experts),
            numerics=execution.numerics,
            output_first=execution.output_first,
        )

    @property
    def experts_see_other_tokens(self) -> bool:
        """Whether the devices that share the experts between them have different tokens, and so must exchange them."""
        return self.experts is not None and self.experts in (
            (self.rows,) if isinstance(self.rows, str) else self.rows or ()
        )

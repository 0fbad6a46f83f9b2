"""How a forward pass is run: on which devices, what it keeps for the backward pass, in which numbers it multiplies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxrl_sat.layout import Layout
from jaxrl_sat.model.ops import INPUT, PRODUCT, ROUTING
from jaxrl_sat.types import Numerics

Remat = Literal["products", "layer", "offload"]


@dataclasses.dataclass(frozen=True)
class Execution:
    """None of it changes what is computed, but for rounding. Static and hashable.

    `remat`: what of a layer waits for the backward pass, beside its routing: "products", its input and all matrix
    products; "layer", its input; "offload", its input, in the memory of the host.
    `max_segments`: sequences that a row holds at most, its padding counted as one; 0 if not known.
    `router_sums`: whether the sums behind the router's losses are measured.
    `numerics`: what the products with a layer's weights are computed in.
    `excess_precision`: whether the compiler may leave out roundings to bfloat16 between two operations that it puts
    together. Which it puts together differs from program to program, and so then do the numbers of two that compute
    the same: the sampler's and the trainer's. No part of a program but of how it is compiled: `compiler_options`.
    `output_first`: whether decoding has its weights as `jaxrl_sat.model.output_first` says, unless they are quantised.
    """

    layout: Layout = Layout()
    remat: Remat = "products"
    max_segments: int = 0
    router_sums: bool = False
    numerics: Numerics = "none"
    excess_precision: bool = True
    output_first: bool = False

    @property
    def compiler_options(self) -> dict[str, bool] | None:
        """What `jax.jit` is given beside the program; None is the compiler's own choice."""
        return None if self.excess_precision else {"xla_allow_excess_precision": False}

    def checkpointed(self, layer: Callable[..., Any], steps: int) -> Callable[..., Any]:
        """`layer`, of which a scan takes so many steps, with what its backward pass keeps."""
        policies = jax.checkpoint_policies
        if self.remat == "offload":
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[ROUTING],
                names_which_can_be_offloaded=[INPUT],
                offload_src="device",
                offload_dst="pinned_host",
            )
        else:
            policy = policies.save_only_these_names(*([ROUTING] if self.remat == "layer" else [ROUTING, PRODUCT]))
        # The two directions of a loop are compiled apart, so recomputation needs no guard against being merged away;
        # a single step is no loop.
        return jax.checkpoint(layer, policy=policy, prevent_cse=steps == 1)


ONE_DEVICE = Execution()

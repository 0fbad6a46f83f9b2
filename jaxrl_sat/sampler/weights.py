"""Weights as the sampler takes them: always with their version, and through a holder where they may be swapped."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat.types import InputError


@dataclasses.dataclass(frozen=True)
class Weights:
    """Unstacked parameters on the sampler's mesh, and the number of updates that made them. Never mutated."""

    decode_params: Any  # `jaxrl_sat.model.decode_params`
    version: int


@dataclasses.dataclass(frozen=True)
class FleetWeights:
    """Weights of several engines, one each, all of one version."""

    engines: tuple[Weights, ...]

    @property
    def version(self) -> int:
        """The number of updates that made them."""
        return self.engines[0].version

    @property
    def decode_params(self) -> tuple[Any, ...]:
        """The parameters of each engine."""
        return tuple(weights.decode_params for weights in self.engines)


class WeightHolder:
    """A place that holds the weights of the moment. JetStream's Driver captures its params once: it is given this."""

    def __init__(self, weights: Weights):
        self._weights = weights

    @property
    def current(self) -> Weights:
        """The weights last given."""
        return self._weights

    def swap(self, weights: Weights) -> None:
        """Use `weights` from the next dispatch on. One reference assignment: no dispatch sees a mixture."""
        self._weights = weights


def current(params: Weights | WeightHolder) -> Weights:
    """The weights to use now."""
    return params.current if isinstance(params, WeightHolder) else params


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])


def check_finite(weights: Weights) -> None:
    """`InputError` with the leaf and the version where a weight is not finite. One program, waited for."""
    named = jax.tree_util.tree_leaves_with_path(weights.decode_params)
    finite = np.asarray(_all_finite([leaf for _, leaf in named]))
    if not finite.all():
        path = named[int(np.argmin(finite))][0]
        # Up to the parameter: how the engine stores one is not the user's.
        kept = tuple(key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
        leaf = jax.tree_util.keystr(kept, simple=True, separator="/")
        more = int((~finite).sum()) - 1
        others = f" and {more} others" if more else ""
        raise InputError(
            f"weights of version {weights.version}: {leaf}{others} not finite; finite numbers alone allowed"
        )

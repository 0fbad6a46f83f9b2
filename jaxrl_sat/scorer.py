"""Log-probs of a packed batch at the weights that sampled it: log mu~ of SPEC 3, by the trainer's own forward pass.

On the trainer's mesh, or on the sampler's after generation (`sampler.score`): the function, the packing and the
microbatches are the same, so on meshes of one shape the numbers are the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_sat import model
from jaxrl_sat.layout import put
from jaxrl_sat.step import StepSettings, batch_axes, recomputed_logp
from jaxrl_sat.types import Batch, Params


class Scorer:
    """The compiled forward pass of one run on the mesh of `settings.execution`. It holds no state."""

    def __init__(self, settings: StepSettings):
        self.settings = settings
        self._layout = settings.execution.layout
        self.param_shardings = self._layout.place(model.param_specs(settings.model, self._layout))
        self._recompute = jax.jit(
            functools.partial(recomputed_logp, settings=settings), compiler_options=settings.execution.compiler_options
        )

    def place_params(self, params: Params) -> Params:
        """Parameters on this mesh."""
        return jax.device_put(params, self.param_shardings)

    def place(self, batch: Batch) -> Batch:
        """A packed batch on this mesh, rows and sequences spread as the layout says."""
        return jax.tree.map(put, batch, self.batch_shardings(batch))

    def batch_shardings(self, batch: Batch) -> Batch:
        """Where each array of a batch (or its shape struct) lies."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: self._layout.sharding(batch_axes(path, len(x.shape)), x.shape), batch
        )

    def logp(self, batch: Batch, versions: Mapping[int, Params]) -> Float[Array, "N T"]:
        """Each token's log-prob at the version that sampled it, from `versions` by number; 0 for any other token.

        `batch` and the parameters lie on this mesh.
        """
        total = jnp.zeros_like(batch.behaviour_logp)
        for version, params in versions.items():
            total = jnp.where(batch.versions == version, self._recompute(params, batch), total)
        return total

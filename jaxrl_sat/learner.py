"""The compiled functions of a run on its mesh: the train step, and what is measured beside it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl_sat import model, optim
from jaxrl_sat.objectives.direction import PredictiveKl, PredictiveTv
from jaxrl_sat.objectives.masks import DivergenceMask, support_kl
from jaxrl_sat.scorer import Scorer
from jaxrl_sat.step import StepSettings, direction_report, train_step
from jaxrl_sat.types import Batch, Params, TrainState


class Learner:
    """The compiled functions of one run on one mesh. It holds no state: what changes goes in and comes out.

    `scorer` places parameters and batches on the mesh, and recomputes log-probs there.
    """

    def __init__(self, settings: StepSettings, optimizer: optax.GradientTransformation):
        self.settings = settings
        self.scorer = Scorer(settings)
        self._optimizer = optimizer
        self._replicated = settings.execution.layout.sharding((), ())

        def step(params: Params, rest: TrainState, ref_params: Params, batch: Batch, logp_old: Array) -> Any:
            state = dataclasses.replace(rest, params=params)
            new, report = train_step(state, ref_params, batch, logp_old, settings, optimizer)
            return new.params, dataclasses.replace(new, params=None), report

        shapes = model.abstract_params(settings.model)
        rest = TrainState(
            params=None,
            opt_state=optim.state_shardings(optimizer, shapes, self.scorer.param_shardings),
            step=self._replicated,
            skipped=self._replicated,
        )
        # Parameters are not donated: coming batches are sampled by them, and log-probs recomputed with them.
        options = settings.execution.compiler_options
        placed = (self.scorer.param_shardings, rest, None)
        self._step = jax.jit(step, donate_argnums=1, out_shardings=placed, compiler_options=options)
        analysis = functools.partial(direction_report, settings=settings, mask=_analysed(settings))
        self._direction = jax.jit(analysis, compiler_options=options)

    def abstract(self, params: Params) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore into."""
        shardings = optim.state_shardings(self._optimizer, params, self.scorer.param_shardings)
        shapes = (jax.eval_shape(lambda p: p, params), jax.eval_shape(self._optimizer.init, params))
        placed = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            shapes,
            (self.scorer.param_shardings, shardings),
        )
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)
        return TrainState(params=placed[0], opt_state=placed[1], step=count, skipped=count)

    def init(self, params: Params) -> TrainState:
        """The state before the first update, in the mesh's layout; `params` must lie on it already."""
        shardings = optim.state_shardings(self._optimizer, params, self.scorer.param_shardings)
        opt_state = jax.jit(self._optimizer.init, out_shardings=shardings)(params)
        zeros = [jax.device_put(jnp.zeros((), jnp.int32), self._replicated) for _ in range(2)]
        return TrainState(params=params, opt_state=opt_state, step=zeros[0], skipped=zeros[1])

    def step(
        self, state: TrainState, ref_params: Params, batch: Batch, logp_old: Float[Array, "N T"]
    ) -> tuple[TrainState, dict[str, Array]]:
        """One update (see `train_step`). The optimizer's state is consumed, the parameters are not."""
        rest = dataclasses.replace(state, params=None)
        params, rest, report = self._step(state.params, rest, ref_params, batch, logp_old)
        return dataclasses.replace(rest, params=params), report

    def direction(self, before: Params, after: Params, batch: Batch) -> dict[str, Array]:
        """The direction analysis of the update from `before` to `after` on its own batch: see `direction_report`."""
        return self._direction(before, after, batch)

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """The step traced for these shapes (arrays or shape structs), to be lowered and compiled without running it."""
        rest = dataclasses.replace(state, params=None)
        return self._step.trace(state.params, rest, state.params, batch, batch.behaviour_logp)


def _analysed(settings: StepSettings) -> DivergenceMask:
    """The divergence and threshold of the objective's own mask, else paper 001's, with its predictive direction."""
    own = [gate for gate in settings.objective.gates if isinstance(gate, DivergenceMask)]
    mask = own[0] if own else DivergenceMask(support_kl)
    return (
        mask
        if isinstance(mask.direction, PredictiveKl | PredictiveTv)
        else dataclasses.replace(mask, direction=PredictiveKl())
    )

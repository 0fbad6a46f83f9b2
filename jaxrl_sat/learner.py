"""The train step: replayed forward, token statistics, policy loss, accumulated gradient, one Adam update.

Everything here is a pure function of (state, reference parameters, batch). Losses leave the objectives as sums and
counts, so the gradient of an update is exact however its rows are cut into microbatches or spread over devices: sums
are added over the scan and divided once. One thing does depend on the cut, as in the paper: SAT's reference scale q is
that of a microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrl_sat import model, optim
from jaxrl_sat.objectives import (
    LossOut,
    PolicyLoss,
    combine,
    finalise,
    make_evidence,
    needs_recomputed,
    normalise,
    staleness,
    staleness_split,
    total_loss,
)
from jaxrl_sat.types import Batch, Params, TrainState

ROW_AXES = ("data", "fsdp")
"""Mesh axes that rows are spread over."""


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What the train step is compiled for: static, hashable, the same for every update of a run."""

    model: model.ModelConfig
    objective: PolicyLoss
    kl_coef: float
    kl_kind: str
    entropy_coef: float
    temperature: float  # the sampler's; logits are divided by it, so that both sides speak of one distribution
    microbatch_rows: int
    num_segments: int  # segment slots of a row
    replay: bool  # route as the sampler did (R3) or freely
    remat: bool  # recompute each layer's activations in the backward pass
    mesh: Mesh  # rows are spread over its data and fsdp axes


def token_evidence(params: Params, batch: Batch, replay: bool, settings: StepSettings) -> model.TokenStatistics:
    """Log-prob and entropy of every token given those before it, float32 [N,T]; position 0 of a row is meaningless.

    `replay` routes as the batch records; ids stay in their small integers until here.
    """
    routing = None
    if replay:
        routing = dataclasses.replace(batch.routing, expert_ids=batch.routing.expert_ids.astype(jnp.int32))
    out = model.forward(
        params, settings.model, batch.tokens, batch.positions, batch.segment_ids, routing, remat=settings.remat
    )
    before = jnp.pad(out.hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return model.token_statistics(params, settings.model, before, batch.tokens, settings.temperature)


def row_axis(path: tuple) -> int:
    """Which axis of a batch's leaf counts rows: the second of `expert_ids`, the first of everything else."""
    return 1 if getattr(path[-1], "name", None) == "expert_ids" else 0


def microbatches(tree: Any, settings: StepSettings) -> Any:
    """Cut a pytree of row-major arrays into [M, microbatch_rows, ...], each microbatch spread over the whole mesh."""

    def cut(path: tuple, x: Array) -> Array:
        axis = row_axis(path)
        rows = settings.microbatch_rows
        cut_shape = (*x.shape[:axis], x.shape[axis] // rows, rows, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x.reshape(cut_shape), axis, 0)
        spec = PartitionSpec(*(None,) * (axis + 1), ROW_AXES)
        return jax.lax.with_sharding_constraint(x, NamedSharding(settings.mesh, spec))

    return jax.tree_util.tree_map_with_path(cut, tree)


def microbatch_loss(
    params: Params, ref_params: Params, batch: Batch, logp_old: Float[Array, "N T"], settings: StepSettings
) -> tuple[Float[Array, ""], LossOut]:
    """Summed (not averaged) loss of one microbatch, with everything the update reports about it."""
    stats = token_evidence(params, batch, settings.replay, settings)
    logp_ref = jax.lax.stop_gradient(stats.logp)
    if settings.kl_coef:
        # The reference is a policy of its own, so it routes freely.
        logp_ref = jax.lax.stop_gradient(token_evidence(ref_params, batch, False, settings).logp)
    evidence = make_evidence(
        stats.logp,
        batch.behaviour_logp,
        batch.advantages,
        batch.mask,
        logp_old=logp_old,
        logp_ref=logp_ref,
        entropy=stats.entropy,
        segment_ids=batch.segment_ids,
        num_segments=settings.num_segments,
    )
    out = total_loss(settings.objective, evidence, settings.kl_coef, settings.kl_kind, settings.entropy_coef)
    metrics = combine(out.metrics, staleness(evidence))
    if needs_recomputed(settings.objective):
        metrics = combine(metrics, staleness_split(evidence))
    return out.loss_sum, dataclasses.replace(out, metrics=metrics)


def summed_gradient(
    params: Params, ref_params: Params, batch: Batch, logp_old: Float[Array, "N T"], settings: StepSettings
) -> tuple[Params, Any]:
    """Gradient of the summed loss and the combined (loss sum, count, active tokens, metrics) over all microbatches.

    A microbatch without an active token is padding and is not computed.
    """
    parts = microbatches((batch, logp_old), settings)
    gradient = jax.grad(microbatch_loss, has_aux=True)

    def compute(part: tuple[Batch, Array]) -> tuple[Params, Any]:
        grads, out = gradient(params, ref_params, *part, settings)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)  # bfloat16 would lose small microbatches
        return grads, (out.loss_sum, out.count, out.n_active, out.metrics)

    empty = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, jax.tree.map(lambda x: x[0], parts))
    )

    def accumulate(carry: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
        grads, sums = jax.lax.cond(part[0].mask.any(), compute, lambda _: empty, part)
        total_grads, totals = carry
        added = jax.tree.map(jnp.add, (total_grads, totals[:3]), (grads, sums[:3]))
        return (added[0], (*added[1], combine(totals[3], sums[3]))), None

    return jax.lax.scan(accumulate, empty, parts)[0]


def train_step(
    state: TrainState,
    ref_params: Params,
    batch: Batch,
    logp_old: Float[Array, "N T"],
    settings: StepSettings,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Array]]:
    """One update. Returns the new state and the update's metrics as float32 scalars.

    Where the loss or the gradient is not finite, or no token is active, parameters and optimizer stay bitwise as
    they were and `skipped` counts one more: one bad batch must not end a run.
    """
    grads, (loss_sum, count, n_active, metrics) = summed_gradient(state.params, ref_params, batch, logp_old, settings)
    grads = jax.tree.map(lambda g: normalise(g, count), grads)
    loss, grad_norm = normalise(loss_sum, count), optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    skip = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (n_active > 0))
    keep_old = functools.partial(jnp.where, skip)
    new = TrainState(
        params=jax.tree.map(keep_old, state.params, optax.apply_updates(state.params, updates)),
        opt_state=jax.tree.map(keep_old, state.opt_state, opt_state),
        step=state.step + 1,
        skipped=state.skipped + skip.astype(jnp.int32),
    )
    report = finalise(metrics) | {"train/loss": loss, "train/grad_norm": grad_norm, "train/skipped": new.skipped}
    if not settings.kl_coef:
        report["kl/ref"] = jnp.full((), jnp.nan)  # not measured, which is not 0
    return new, report


def recomputed_logp(params: Params, batch: Batch, settings: StepSettings) -> Float[Array, "N T"]:
    """Trainer-side log-probs of the batch at `params`: log mu~ of SPEC 3 when these are the weights that sampled."""

    def one(part: Batch) -> Array:
        return token_evidence(params, part, settings.replay, settings).logp

    return jax.lax.map(one, microbatches(batch, settings)).reshape(batch.tokens.shape)


class Learner:
    """The compiled functions of one run on one mesh. It holds no state: what changes goes in and comes out."""

    def __init__(self, settings: StepSettings, optimizer: optax.GradientTransformation, param_shardings: Params):
        self.settings = settings
        self._optimizer = optimizer
        self.param_shardings = param_shardings
        self._replicated = NamedSharding(settings.mesh, PartitionSpec())

        def step(params: Params, rest: TrainState, ref_params: Params, batch: Batch, logp_old: Array) -> Any:
            state = dataclasses.replace(rest, params=params)
            new, report = train_step(state, ref_params, batch, logp_old, settings, optimizer)
            return new.params, dataclasses.replace(new, params=None), report

        # Parameters are not donated: coming batches are sampled by them, and log-probs recomputed with them.
        self._step = jax.jit(step, donate_argnums=1)
        self._recompute = jax.jit(functools.partial(recomputed_logp, settings=settings))

    def place_params(self, params: Params) -> Params:
        """Parameters on the trainer's mesh."""
        return jax.device_put(params, self.param_shardings)

    def abstract(self, params: Params) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore into."""
        shardings = optim.state_shardings(self._optimizer, params, self.param_shardings)
        shapes = (jax.eval_shape(lambda p: p, params), jax.eval_shape(self._optimizer.init, params))
        placed = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            shapes,
            (self.param_shardings, shardings),
        )
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)
        return TrainState(params=placed[0], opt_state=placed[1], step=count, skipped=count)

    def init(self, params: Params) -> TrainState:
        """The state before the first update, in the mesh's layout; `params` must lie on it already."""
        shardings = optim.state_shardings(self._optimizer, params, self.param_shardings)
        opt_state = jax.jit(self._optimizer.init, out_shardings=shardings)(params)
        zeros = [jax.device_put(jnp.zeros((), jnp.int32), self._replicated) for _ in range(2)]
        return TrainState(params=params, opt_state=opt_state, step=zeros[0], skipped=zeros[1])

    def place(self, batch: Batch) -> Batch:
        """A packed batch on the mesh, its rows spread over the data and fsdp axes."""

        def put(path: tuple, x: Any) -> Array:
            spec = PartitionSpec(*(None,) * row_axis(path), ROW_AXES)
            return jax.device_put(x, NamedSharding(self.settings.mesh, spec))

        return jax.tree_util.tree_map_with_path(put, batch)

    def logp_old(self, batch: Batch, versions: dict[int, Params]) -> Float[Array, "N T"]:
        """log mu~: each token's log-prob recomputed at the version that sampled it, from `versions` by number."""
        total = jnp.zeros_like(batch.behaviour_logp)
        for version, params in versions.items():
            total = jnp.where(batch.versions == version, self._recompute(params, batch), total)
        return total

    def step(
        self, state: TrainState, ref_params: Params, batch: Batch, logp_old: Float[Array, "N T"]
    ) -> tuple[TrainState, dict[str, Array]]:
        """One update (see `train_step`). The optimizer's state is consumed, the parameters are not."""
        rest = dataclasses.replace(state, params=None)
        params, rest, report = self._step(state.params, rest, ref_params, batch, logp_old)
        return dataclasses.replace(rest, params=params), report

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """The step lowered for these shapes (arrays or shape structs), without running it."""
        rest = dataclasses.replace(state, params=None)
        return self._step.lower(state.params, rest, state.params, batch, batch.behaviour_logp)

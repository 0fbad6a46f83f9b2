"""The train step as pure functions of (state, reference parameters, batch).

Replayed forward, token statistics, policy loss, accumulated gradient, one Adam update. Losses leave the objectives as
sums and counts, so the gradient of an update is exact however its rows are cut into microbatches or spread over
devices: sums are added over the scan and divided once. SAT's reference scale q is that of a microbatch, as in the
paper, unless the objective asks for the whole update's: then a first pass measures it (see `update_scales`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl_sat import model, optim
from jaxrl_sat.objectives import (
    Evidence,
    LossOut,
    Metrics,
    PolicyLoss,
    UpdateScale,
    combine,
    divergences,
    finalise,
    first_pass,
    make_evidence,
    needs_first_pass,
    normalise,
    renormalised,
    router_loss,
    staleness,
    staleness_split,
    total_loss,
    update_scale,
)
from jaxrl_sat.objectives.direction_analysis import direction_after, direction_before, direction_counts
from jaxrl_sat.objectives.masks import DivergenceMask
from jaxrl_sat.types import AnyArray, Batch, Params, RouterSums, TrainState


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What the train step is compiled for: static, hashable, the same for every update of a run."""

    model: model.ModelConfig
    objective: PolicyLoss
    kl_coef: float
    kl_kind: str
    kl_level: str
    entropy_coef: float
    load_balance_coef: float
    router_z_coef: float
    temperature: float  # the sampler's; logits are divided by it, so that both sides speak of one distribution
    microbatch_rows: int
    num_segments: int  # segment slots of a row
    replay: bool  # route as the sampler did (R3) or freely
    recomputed: bool  # whether logp_old is recomputed at the sampling weights, or stands for the behaviour log-probs
    execution: model.Execution  # the trainer's mesh among others


@struct.dataclass
class PolicyStatistics:
    """Of every token given those before it, under one policy, float32; position 0 of a row is meaningless."""

    logp: AnyArray  # [N, T]
    entropy: AnyArray  # [N, T], of the full softmax
    topk_logp: AnyArray  # [N, T, K], of the recorded words
    router: RouterSums | None  # where the settings ask for the router's losses


def policy_statistics(params: Params, batch: Batch, replay: bool, settings: StepSettings) -> PolicyStatistics:
    """What the policy `params` says of the tokens of `batch`.

    `replay` routes as the batch records. Where the batch carries a nucleus, log-probs are those renormalised on it, as
    the behaviour policy's are (SPEC 9).
    """
    routing = batch.routing if replay else None
    asked = (batch.tokens, batch.positions, batch.segment_ids, routing, settings.execution)
    out = model.forward(params, settings.model, *asked)
    # What a position says is of the next token: words go one to the left and numbers come one to the right, since the
    # hidden states are the larger, and cut along the sequence too.
    words = jax.tree.map(lambda ids: jnp.roll(ids, -1, axis=1), (batch.tokens, batch.nucleus_ids, batch.topk_ids))
    next_word, nucleus_ids, topk_ids = words
    stats = model.token_statistics(
        params, settings.model, out.hidden, next_word, settings.temperature, nucleus_ids, topk_ids, settings.execution
    )
    stats = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), stats)
    if not batch.nucleus_ids.shape[-1]:
        return PolicyStatistics(stats.logp, stats.entropy, stats.topk_logp, out.router)
    logp, log_mass = renormalised(stats.logp, stats.nucleus_logp, batch.nucleus_ids, batch.tokens)
    kept = jnp.isfinite(batch.topk_logp)  # the sampler's log-prob of a word outside the nucleus is -inf
    topk_logp = jnp.where(kept, stats.topk_logp - jax.lax.stop_gradient(log_mass)[..., None], -jnp.inf)
    return PolicyStatistics(logp, stats.entropy, topk_logp, out.router)


def batch_axes(path: tuple, ndim: int) -> tuple[str | None, ...]:
    """Logical axes of a batch's leaf: rows and then the sequence, behind the layers in `expert_ids`."""
    layers = (None,) * (getattr(path[-1], "name", None) == "expert_ids")
    return (*layers, "rows", "sequence", *(None,) * (ndim - 2 - len(layers)))


def microbatches(tree: Any, settings: StepSettings) -> tuple[Any, Callable[[Any], Any]]:
    """A pytree of row-major arrays in microbatches [M, microbatch_rows, ...], and what makes one of them whole again.

    Each is spread over the whole mesh. What an array has behind its sequence (top-K, the experts of a token) is merged
    with it meanwhile: as a last dimension of its own it would be padded to whole tiles of a TPU.
    """

    def cut(path: tuple, x: Array) -> Array:
        names = batch_axes(path, x.ndim)
        axis, rows = names.index("rows"), settings.microbatch_rows
        x = x.reshape(*x.shape[:axis], x.shape[axis] // rows, rows, math.prod(x.shape[axis + 1 :]))
        return settings.execution.layout.constrain(jnp.moveaxis(x, axis, 0), None, *names[: axis + 2])

    def whole(part: Any) -> Any:
        def shaped(path: tuple, x: Array, like: Array) -> Array:
            axis = batch_axes(path, like.ndim).index("rows")
            return x.reshape(*like.shape[:axis], settings.microbatch_rows, *like.shape[axis + 1 :])

        return jax.tree_util.tree_map_with_path(shaped, part, tree)

    return jax.tree_util.tree_map_with_path(cut, tree), whole


def policy_evidence(
    params: Params, batch: Batch, logp_old: Float[Array, "N T"], settings: StepSettings, **more: Any
) -> Evidence:
    """The evidence of `batch` under `params`; for `more` see `evidence_of`."""
    return evidence_of(policy_statistics(params, batch, settings.replay, settings), batch, logp_old, settings, **more)


def evidence_of(
    stats: PolicyStatistics,
    batch: Batch,
    logp_old: Float[Array, "N T"],
    settings: StepSettings,
    version: Int[AnyArray, ""] | None = None,
    **more: Any,
) -> Evidence:
    """The evidence of `batch` under a policy whose statistics are at hand; `more` are fields of `make_evidence`.

    Where tokens were sampled by the very weights of this pass, number `version`, their recomputed log-prob is that of
    this pass, to the last bit: another program of the same mathematics may round otherwise.
    """
    if settings.recomputed and version is not None:
        logp_old = jnp.where(batch.versions == version, jax.lax.stop_gradient(stats.logp), logp_old)
    return make_evidence(
        stats.logp,
        batch.behaviour_logp,
        batch.advantages,
        batch.mask,
        logp_old=logp_old,
        entropy=stats.entropy,
        segment_ids=batch.segment_ids,
        num_segments=settings.num_segments,
        tokens=batch.tokens,
        topk_ids=batch.topk_ids,
        topk_logp=stats.topk_logp,
        topk_logp_mu=batch.topk_logp,
        vocab_size=settings.model.vocab_size,
        **more,
    )


def microbatch_loss(
    params: Params,
    ref_params: Params,
    batch: Batch,
    logp_old: Float[Array, "N T"],
    version: Int[AnyArray, ""],
    scale: UpdateScale | None,
    settings: StepSettings,
) -> tuple[Float[Array, ""], LossOut]:
    """Summed (not averaged) loss of one microbatch, with everything the update reports about it."""
    more: dict[str, Any] = {"update_scale": scale}
    if settings.kl_coef:
        # The reference is a policy of its own, so it routes freely.
        more["logp_ref"] = jax.lax.stop_gradient(policy_statistics(ref_params, batch, False, settings).logp)
    stats = policy_statistics(params, batch, settings.replay, settings)
    evidence = evidence_of(stats, batch, logp_old, settings, version, **more)
    out = total_loss(
        settings.objective, evidence, settings.kl_coef, settings.kl_kind, settings.entropy_coef, settings.kl_level
    )
    metrics = combine(out.metrics, staleness(evidence))
    if batch.topk_ids.shape[-1]:
        metrics = combine(metrics, divergences(evidence))
    if settings.recomputed:
        metrics = combine(metrics, staleness_split(evidence))
    loss_sum = out.loss_sum
    if stats.router is not None:
        # Means over the microbatch, with its share of the update.
        auxiliary, found = router_loss(stats.router, settings.load_balance_coef, settings.router_z_coef)
        weight = jnp.where(out.count > 0, out.count, 1)  # a plain sum of tokens counts nothing
        loss_sum, metrics = loss_sum + auxiliary * jax.lax.stop_gradient(weight), combine(metrics, found)
    return loss_sum, dataclasses.replace(out, loss_sum=loss_sum, metrics=metrics)


def update_scales(
    params: Params,
    parts: tuple[Batch, Array],
    whole: Callable[[Any], Any],
    version: Int[AnyArray, ""],
    settings: StepSettings,
) -> UpdateScale | None:
    """The reference scale of a whole update, by one forward pass more over its `microbatches`.

    Each token's detached log r is kept, and q is the exact order statistic of all of them, over all devices; None for
    an objective that looks at one microbatch at a time.
    """
    if not needs_first_pass(settings.objective):
        return None

    def compute(part: tuple[Batch, Array]) -> tuple[Array, Array, Array]:
        batch, logp_old = whole(part)
        evidence = policy_evidence(params, batch, logp_old, settings, version=version)
        return (*first_pass(settings.objective, evidence), evidence.turn_ids)

    def measure(part: tuple[Batch, Array]) -> tuple[Array, Array, Array]:
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, part))
        return jax.lax.cond(part[0].mask.any(), compute, lambda _: nothing, part)

    log_ratio, active, turn_ids = jax.lax.map(measure, parts)
    return update_scale(settings.objective, log_ratio, active, turn_ids, 1)


def summed_gradient(
    params: Params,
    ref_params: Params,
    batch: Batch,
    logp_old: Float[Array, "N T"],
    version: Int[AnyArray, ""],
    settings: StepSettings,
) -> tuple[Params, Any]:
    """Gradient of the summed loss and the combined (loss sum, count, active tokens, metrics) over all microbatches.

    `version` is the number of the weights `params`. A microbatch without an active token is padding, and not computed.
    """
    parts, whole = microbatches((batch, logp_old), settings)
    scale = update_scales(params, parts, whole, version, settings)
    gradient = jax.grad(microbatch_loss, has_aux=True)

    def compute(part: tuple[Batch, Array, Array | None]) -> tuple[Params, Any]:
        grads, out = gradient(params, ref_params, *whole(part[:2]), version, _of_part(scale, part[2]), settings)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)  # bfloat16 would lose small microbatches
        return grads, (out.loss_sum, out.count, out.n_active, out.metrics)

    rows = (*parts, None if scale is None else scale.log_ratio)
    empty = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, jax.tree.map(lambda x: x[0], rows))
    )

    def accumulate(carry: Any, part: tuple[Batch, Array, Array | None]) -> tuple[Any, None]:
        grads, sums = jax.lax.cond(part[0].mask.any(), compute, lambda _: empty, part)
        total_grads, totals = carry
        added = jax.tree.map(jnp.add, (total_grads, totals[:3]), (grads, sums[:3]))
        return (added[0], (*added[1], combine(totals[3], sums[3]))), None

    return jax.lax.scan(accumulate, empty, rows)[0]


def _of_part(scale: UpdateScale | None, log_ratio: Array | None) -> UpdateScale | None:
    return None if scale is None or log_ratio is None else dataclasses.replace(scale, log_ratio=log_ratio)


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
    found = summed_gradient(state.params, ref_params, batch, logp_old, state.step, settings)
    grads, (loss_sum, count, n_active, metrics) = found
    grads = jax.tree.map(lambda g: normalise(g, count), grads)
    loss, grad_norm = normalise(loss_sum, count), optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    skip = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (n_active > 0))
    keep_old = functools.partial(jnp.where, skip)
    new = TrainState(
        params=jax.tree.map(keep_old, state.params, optim.apply_updates(state.params, updates, opt_state)),
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
        return policy_statistics(params, whole(part), settings.replay, settings).logp

    parts, whole = microbatches(batch, settings)
    return jax.lax.map(one, parts).reshape(batch.tokens.shape)


def direction_report(
    before: Params, after: Params, batch: Batch, settings: StepSettings, mask: DivergenceMask
) -> dict[str, Array]:
    """What the ratio and the predictive `mask` foresaw at `before`, against what the update to `after` did: SPEC 18."""

    def one(part: Batch) -> Metrics:
        part = whole(part)
        was, now = (policy_evidence(p, part, part.behaviour_logp, settings) for p in (before, after))
        record = direction_before(mask, was)
        return combine(direction_counts(mask, was), direction_after(mask, record, now))

    parts, whole = microbatches(batch, settings)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    found = jax.lax.scan(lambda total, part: (combine(total, one(part)), None), nothing, parts)[0]
    # A rate is to be read with the number of tokens it is of: these are few, and often none.
    counts = {f"{name}_count": count for name, (_, count) in found.means.items()}
    rates = finalise(found)
    return counts | {name: jnp.where(counts[f"{name}_count"] > 0, rate, jnp.nan) for name, rate in rates.items()}

"""A policy loss is five slots, each a small pure function: ratio, radii, surrogate, gates, reduce.

    log r = ratio(evidence)                       S = surrogate(evidence, log r, radii)
    radii = radii(evidence, log r)                loss = reduce(-gates(evidence, log r) S)

All slots see clean evidence, whose mask is the active set T_act (see `sanitise`). Sums and counts leave the function.
"""

from __future__ import annotations

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrl_sat.objectives.evidence import Evidence, UpdateScale, sanitise
from jaxrl_sat.objectives.gates import Gate, gate_weights, product
from jaxrl_sat.objectives.metrics import Metrics, mean_over
from jaxrl_sat.objectives.radii import Radii, TrustRegion
from jaxrl_sat.objectives.ratio import Ratio
from jaxrl_sat.objectives.reduce import Reduce
from jaxrl_sat.objectives.surrogate import SurrogateSlot


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """An objective: which ratio, which clip radii, which surrogate, which gates, which reduction."""

    ratio: Ratio
    radii: Radii
    surrogate: SurrogateSlot
    reduce: Reduce
    gates: tuple[Gate, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """The evidence fields it looks at; the per-token ones must be finite for a token to be active."""
        return self.ratio.reads.union(*(gate.reads for gate in self.gates))


@no_type_check
@struct.dataclass
class LossOut:
    """A loss as a sum and a count: loss = `normalise(loss_sum, count)`; those of shards and microbatches add.

    `count` is 0 when no token is active (loss 0, gradient 0) and always for "token-sum". A step whose total
    `n_active` is 0 is to be skipped. `n_nonfinite` counts masked-in tokens dropped as data faults. `per_token` is
    -S after gates, 0 off the active set; `keep` where gradient flows.
    """

    loss_sum: Float[Array, ""]
    count: Float[Array, ""]
    n_active: Int[Array, ""]
    n_nonfinite: Int[Array, ""]
    per_token: Float[Array, "N T"]
    keep: Bool[Array, "N T"]
    metrics: Metrics


@no_type_check
@struct.dataclass
class Terms:
    """Every intermediate of a policy loss by name, for figures and tests. [N, T], 0 off the active set."""

    evidence: Evidence
    n_nonfinite: Int[Array, ""]
    log_ratio: Float[Array, "N T"]
    region: TrustRegion
    ratio: Float[Array, "N T"]
    surrogate: Float[Array, "N T"]
    clipped: Bool[Array, "N T"]
    newly_clipped: Bool[Array, "N T"]
    soft_weight: Float[Array, "N T"]
    gates: dict[str, Float[Array, "N T"]]
    weight: Float[Array, "N T"]
    keep: Bool[Array, "N T"]


def terms(objective: PolicyLoss, evidence: Evidence) -> Terms:
    """All intermediates of `policy_loss`. `newly_clipped`: clipped, but would not be at the base radii.

    `soft_weight` is the surrogate's own multiplier (see `Surrogate`), `gates` each gate's by name, `weight` the product
    of the gates.
    """
    clean, n_nonfinite = sanitise(evidence, objective.reads)
    log_ratio = objective.ratio(clean)
    constant = jax.lax.stop_gradient(log_ratio)
    region = objective.radii(clean, constant)
    surrogate = objective.surrogate(clean, log_ratio, region.low, region.high)
    at_base = objective.surrogate(clean, constant, region.base_low, region.base_high)
    gates = gate_weights(objective.gates, clean, constant)
    weight = product(gates, clean.mask, constant.dtype)
    clipped = clean.mask & ~surrogate.keep
    return Terms(
        evidence=clean,
        n_nonfinite=n_nonfinite,
        log_ratio=log_ratio,
        region=region,
        ratio=surrogate.ratio,
        surrogate=surrogate.value,
        clipped=clipped,
        newly_clipped=clipped & at_base.keep,
        soft_weight=surrogate.weight,
        gates=gates,
        weight=weight,
        keep=surrogate.keep & (weight > 0),
    )


def policy_loss(objective: PolicyLoss, evidence: Evidence) -> LossOut:
    """loss = sum over T_act of w (-S), as sum and count: SPEC 1. Differentiable in `evidence.logp` alone.

    Metrics: clip/fraction, sat/q (a mean over microbatches with an active token), sat/gate_rate,
    sat/newly_clipped_fraction (without contraction these three are 0), and of each gate the share of active tokens it
    drops, gate/NAME_dropped, and its mean weight, gate/NAME_weight.
    """
    return reduce_terms(objective, terms(objective, evidence))


def reduce_terms(objective: PolicyLoss, t: Terms) -> LossOut:
    """The loss of intermediates already at hand; see `policy_loss`."""
    active, dtype = t.evidence.mask, t.log_ratio.dtype
    per_token = -(t.surrogate * t.weight)
    loss_sum, count = objective.reduce(per_token, t.evidence)
    n_active = jnp.sum(active)
    if t.region.q.ndim:
        q_sum, q_count = mean_over(t.region.q, active, dtype)
        mean_q = q_sum / jnp.maximum(q_count, 1)
    else:
        mean_q = t.region.q
    some = (n_active > 0).astype(dtype)
    means = {
        "clip/fraction": mean_over(t.clipped, active, dtype),
        "sat/q": (mean_q * some, some),
        "sat/gate_rate": mean_over(t.region.gate, active, dtype),
        "sat/newly_clipped_fraction": mean_over(t.newly_clipped, active, dtype),
    }
    for name, weight in t.gates.items():
        means[f"gate/{name}_dropped"] = mean_over(weight == 0, active, dtype)
        means[f"gate/{name}_weight"] = mean_over(weight, active, dtype)
    return LossOut(
        loss_sum=loss_sum,
        count=count,
        n_active=n_active,
        n_nonfinite=t.n_nonfinite,
        per_token=per_token,
        keep=t.keep,
        metrics=Metrics(means=means),
    )


def needs_recomputed(objective: PolicyLoss) -> bool:
    """Whether `logp_old` must be recomputed at the weights that sampled."""
    return "logp_old" in objective.reads


def needs_topk(objective: PolicyLoss) -> bool:
    """Whether the top-K records must reach the objective."""
    return "topk_ids" in objective.reads


def needs_first_pass(objective: PolicyLoss) -> bool:
    """Whether the whole update must be measured before its gradient: SAT's quantile over the update."""
    return objective.radii.scope == "update"


def first_pass(objective: PolicyLoss, evidence: Evidence) -> tuple[Float[Array, "N T"], Bool[Array, "N T"]]:
    """Detached log r of part of an update and its active set, to be gathered for `update_scale`."""
    clean, _ = sanitise(jax.lax.stop_gradient(evidence), objective.reads)
    return objective.ratio(clean), clean.mask


def update_scale(
    objective: PolicyLoss,
    log_ratio: Float[Array, "*shape"],
    active: Bool[Array, "*shape"],
    turn_ids: Int[Array, "*shape"],
    num_turns: int,
) -> UpdateScale:
    """The reference scale of a whole update from its first pass: exact, not an average of its parts' quantiles."""
    return UpdateScale(log_ratio, objective.radii.reference(log_ratio, active, turn_ids, num_turns))

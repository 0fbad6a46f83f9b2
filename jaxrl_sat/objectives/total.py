"""The whole loss of a step: policy term, KL term, entropy term. Seed 000 3.3, SPEC 16."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_sat.objectives.evidence import Evidence, sanitise
from jaxrl_sat.objectives.kl import kl_regulariser
from jaxrl_sat.objectives.metrics import Metrics, combine, mean_over
from jaxrl_sat.objectives.policy_loss import LossOut, PolicyLoss, policy_loss


def total_loss(
    objective: PolicyLoss,
    evidence: Evidence,
    kl_coef: float = 1e-3,
    kl_kind: str = "low_var_kl",
    entropy_coef: float = 0.0,
    kl_level: str = "token",
) -> LossOut:
    """total = agg(-S) + kl_coef agg(KL) - entropy_coef agg(H), all by the objective's aggregation: SPEC 16.

    A term with coefficient 0 is left out of the loss, not of the metrics (kl/ref, train/entropy; token means). Each
    term is a mean over its own active tokens; `n_active`, `n_nonfinite` and `keep` are those of the policy term.
    """
    out = policy_loss(objective, evidence)
    kl = kl_regulariser(evidence, kl_coef, kl_kind, objective.reduce, level=kl_level)
    with_entropy, _ = sanitise(evidence, ("logp", "entropy"))
    entropy = with_entropy.entropy
    loss_sum, per_token = out.loss_sum, out.per_token
    if kl_coef:
        loss_sum = loss_sum + _on_count_of(out, kl.loss_sum, kl.count)
        per_token = per_token + kl.per_token
    if entropy_coef:
        loss_sum = loss_sum - entropy_coef * _on_count_of(out, *objective.reduce(entropy, with_entropy))
        per_token = per_token - entropy_coef * entropy
    mean_entropy = Metrics(means={"train/entropy": mean_over(entropy, with_entropy.mask, entropy.dtype)})
    metrics = combine(combine(out.metrics, kl.metrics), mean_entropy)
    return dataclasses.replace(out, loss_sum=loss_sum, per_token=per_token, metrics=metrics)


def _on_count_of(out: LossOut, total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """The sum that, divided by the policy term's count, is total / count.

    The counts differ only when a non-finite log-prob drops a token from one term and not the other.
    """
    return jnp.where(out.count == count, total, total * (out.count / jnp.maximum(count, 1)))

"""The KL regulariser towards the frozen reference: seed 000 3.3, SPEC 16."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_sat.objectives.checks import expect
from jaxrl_sat.objectives.evidence import Evidence, sanitise
from jaxrl_sat.objectives.metrics import Metrics, mean_over
from jaxrl_sat.objectives.policy_loss import LossOut
from jaxrl_sat.objectives.ratio import LOG_RATIO_MAX, check_choice
from jaxrl_sat.objectives.reduce import Reduce
from jaxrl_sat.objectives.segments import segment_mean, spread

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
KlLevel = Literal["token", "sequence"]

VALUE_MAX = 10.0


def kl_estimate(
    logp: Float[Array, "N T"],
    logp_ref: Float[Array, "N T"],
    kind: str = "low_var_kl",
    log_ratio_max: float = LOG_RATIO_MAX,
    value_max: float = VALUE_MAX,
) -> tuple[Float[Array, "N T"], Bool[Array, "N T"]]:
    """A per-token estimate of KL(pi || ref) and where its gradient flows, with x = log ref - log pi (finite inputs).

        k1 = -x,   k2 = x^2 / 2,   k3 = e^x - x - 1 (gradient 1 - e^x in log pi),   low_var_kl = k3 held in [-10, 10]

    In the last two x is held at most at `log_ratio_max`; past it, and past `value_max`, the gradient is 0.
    """
    check_choice("kl_kind", kind, KlKind)
    expect("logp", logp, logp.shape, jnp.floating)
    expect("logp_ref", logp_ref, logp.shape, jnp.floating)
    x = logp_ref - logp
    everywhere = jnp.ones(x.shape, bool)
    if kind == "k1":
        return -x, everywhere
    if kind == "k2":
        return x * x / 2, everywhere
    keep = x <= log_ratio_max
    held = jnp.where(keep, x, log_ratio_max)
    k3 = jnp.expm1(held) - held
    if kind == "k3":
        return k3, keep
    inside = k3 <= value_max  # k3 >= 0, so the lower end never binds
    return jnp.where(inside, k3, value_max), keep & inside


def kl_regulariser(
    evidence: Evidence,
    coef: float,
    kind: str = "low_var_kl",
    reduce: Reduce = Reduce(),  # noqa: B008 (frozen)
    log_ratio_max: float = LOG_RATIO_MAX,
    value_max: float = VALUE_MAX,
    level: str = "token",
) -> LossOut:
    """coef * agg(KL estimate), as sum and count, over the tokens where log pi and log ref are finite.

    `level` "sequence": the estimate is of a response's mean log-ratio, (1/T_b) sum_t (log pi - log ref), and stands at
    each of its active tokens; the gradient goes through the mean (SPEC 7.1). Metric "kl/ref": the token mean of the
    estimate, without the coefficient.
    """
    check_choice("kl_level", level, KlLevel)
    clean, n_nonfinite = sanitise(evidence, ("logp", "logp_ref"))
    logp, logp_ref = clean.logp, clean.logp_ref
    if level == "sequence":
        mean = segment_mean(logp - logp_ref, clean)
        logp, logp_ref = jnp.where(clean.mask, spread(mean, clean), 0), jnp.zeros_like(logp)
    estimate, keep = kl_estimate(logp, logp_ref, kind, log_ratio_max, value_max)
    per_token = coef * estimate
    loss_sum, count = reduce(per_token, clean)
    return LossOut(
        loss_sum=loss_sum,
        count=count,
        n_active=jnp.sum(clean.mask),
        n_nonfinite=n_nonfinite,
        per_token=per_token,
        keep=keep & clean.mask,
        metrics=Metrics(means={"kl/ref": mean_over(estimate, clean.mask, clean.logp.dtype)}),
    )

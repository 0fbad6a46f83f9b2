"""Staleness diagnostics over the active tokens: seed 000 Parts 2 and 3.4, SPEC 18. Everything here is detached."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_sat.objectives.divergence import bernoulli_kl, sampled_tv
from jaxrl_sat.objectives.evidence import Evidence, sanitise
from jaxrl_sat.objectives.masks import support_kl, support_tv
from jaxrl_sat.objectives.metrics import Metrics, covariance_over, mean_over
from jaxrl_sat.objectives.ratio import LOG_RATIO_MAX, importance
from jaxrl_sat.objectives.support import reduced_support


def staleness(
    evidence: Evidence,
    deviation_low: float = 0.2,
    deviation_high: float = 0.2,
    low_probability: float = 1e-3,
    log_ratio_max: float = LOG_RATIO_MAX,
) -> Metrics:
    """How far the current policy is from the behaviour policy on the sampled tokens, d = log pi - log mu.

    Means: `abs_d_mean` (the training-inference mismatch), `d_mean`; k1 = -d, k2 = d^2/2, k3 = r - 1 - d, estimates of
    KL(mu || pi) under mu; `is_deviation`, r outside [1 - deviation_low, 1 + deviation_high] whatever the sign of A;
    `abs_r_minus_1`; `sampled_tv`, |pi(y) - mu(y)|; `low_probability`, pi(y) below the threshold; `nonfinite`, the
    share of masked-in tokens that were dropped. Further `var_d` (population) and `abs_d_max`. All under "staleness/".
    """
    clean, dropped = sanitise(jax.lax.stop_gradient(evidence), ("logp", "logp_mu"))
    active, dtype = clean.mask, clean.logp.dtype
    d = clean.logp - clean.logp_mu
    r = importance(d, log_ratio_max)
    per_token = {
        "abs_d_mean": jnp.abs(d),
        "d_mean": d,
        "k1": -d,
        "k2": d * d / 2,
        "k3": jnp.expm1(jnp.minimum(d, log_ratio_max)) - d,
        "is_deviation": (r < 1 - deviation_low) | (r > 1 + deviation_high),
        "abs_r_minus_1": jnp.abs(r - 1),
        "sampled_tv": sampled_tv(clean.logp, clean.logp_mu),
        "low_probability": jnp.exp(clean.logp) < low_probability,
    }
    means = {f"staleness/{name}": mean_over(values, active, dtype) for name, values in per_token.items()}
    means["staleness/nonfinite"] = (dropped.astype(dtype), (dropped + jnp.sum(active)).astype(dtype))
    return Metrics(
        means=means,
        covariances={"staleness/var_d": covariance_over(d, d, active)},
        maxima={"staleness/abs_d_max": jnp.max(jnp.abs(d), initial=0)},
    )


def staleness_split(evidence: Evidence) -> Metrics:
    """The split of d into policy lag and implementation mismatch: seed 000 Part 1 and 4.a, SPEC 3.

        d = [log pi - log mu~] + [log mu~ - log mu],   Var d = Var(policy) + Var(impl) + 2 Cov(policy, impl)

    Needs `logp_old`, the trainer's recomputation at the weights that sampled. Population moments; names under
    "staleness/": `var_policy`, `var_impl`, `cov`, `var_total`, `abs_policy_mean`, `abs_impl_mean`.
    """
    clean, _ = sanitise(jax.lax.stop_gradient(evidence), ("logp", "logp_old", "logp_mu"))
    active, dtype = clean.mask, clean.logp.dtype
    policy, implementation = clean.logp - clean.logp_old, clean.logp_old - clean.logp_mu
    total = clean.logp - clean.logp_mu
    return Metrics(
        means={
            "staleness/abs_policy_mean": mean_over(jnp.abs(policy), active, dtype),
            "staleness/abs_impl_mean": mean_over(jnp.abs(implementation), active, dtype),
        },
        covariances={
            "staleness/var_policy": covariance_over(policy, policy, active),
            "staleness/var_impl": covariance_over(implementation, implementation, active),
            "staleness/cov": covariance_over(policy, implementation, active),
            "staleness/var_total": covariance_over(total, total, active),
        },
    )


def divergences(evidence: Evidence) -> Metrics:
    """How far pi is from mu by what the rollout recorded, each a lower bound of the full divergence: SPEC 18, 11, 12.

    Means under "staleness/": `binary_kl`, y against everything else (seed 001 Eq. 29); with top-K records `topk_kl` and
    `topk_tv` (Eq. 5, 35). The KL is infinite where pi gives a recorded word no probability: such tokens are left out of
    its mean, and `topk_kl_infinite` is their share. The sampled TV is among `staleness`'s.
    """
    clean, _ = sanitise(jax.lax.stop_gradient(evidence), ("logp", "logp_mu"))
    active, dtype = clean.mask, clean.logp.dtype
    means = {"staleness/binary_kl": mean_over(bernoulli_kl(clean.logp_mu, clean.logp), active, dtype)}
    if clean.topk_ids.shape[-1]:
        support = reduced_support(clean)
        kl, tv = support_kl(support), support_tv(support)
        means["staleness/topk_kl"] = mean_over(kl, active & jnp.isfinite(kl), dtype)
        means["staleness/topk_tv"] = mean_over(tv, active, dtype)
        means["staleness/topk_kl_infinite"] = mean_over(jnp.isinf(kl), active, dtype)
    return Metrics(means=means)


def by_turn(evidence: Evidence, low_probability: float = 1e-3) -> Metrics:
    """|d|, low-probability tokens and entropy of each turn k = 0 .. num_turns - 1: seed 000 Part 5, SPEC 18.

    Means under "staleness/turn_K/": `abs_d_mean`, |log pi - log mu|; `low_probability`, the share with pi(y) below the
    threshold; `entropy`, over the tokens where it is finite. A turn past the last is counted with the last, as SAT's
    gate does; a turn without an active token has mean 0, count 0.
    """
    detached = jax.lax.stop_gradient(evidence)
    measured, _ = sanitise(detached, ("logp", "logp_mu"))
    with_entropy, _ = sanitise(detached, ("logp", "entropy"))
    turns, dtype = jnp.clip(evidence.turn_ids, 0, evidence.num_turns - 1), measured.logp.dtype
    per_token = {
        "abs_d_mean": (jnp.abs(measured.logp - measured.logp_mu), measured.mask),
        "low_probability": (jnp.exp(measured.logp) < low_probability, measured.mask),
        "entropy": (with_entropy.entropy, with_entropy.mask),
    }
    means = {
        f"staleness/turn_{turn}/{name}": mean_over(values, active & (turns == turn), dtype)
        for turn in range(evidence.num_turns)
        for name, (values, active) in per_token.items()
    }
    return Metrics(means=means)

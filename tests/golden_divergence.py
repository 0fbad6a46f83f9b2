"""Golden evaluators of divergences, their masks and their directions: names mapped onto the package, no mathematics."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_sat import objectives as obj
from jaxrl_sat.objectives import direction_analysis as analysis
from jaxrl_sat.objectives import improvement
from jaxrl_sat.objectives.direction import (
    PredictiveKl,
    PredictiveTv,
    RatioDirection,
    direction_flips,
    kl_direction,
    tail_model_gap,
    tv_direction,
)
from jaxrl_sat.objectives.divergence import bernoulli_kl, log1mexp
from jaxrl_sat.objectives.masks import DivergenceMask, support_kl, support_tv
from jaxrl_sat.objectives.metrics import mean_over
from jaxrl_sat.objectives.policy_loss import Terms
from jaxrl_sat.objectives.radii import ConstantRadii
from jaxrl_sat.objectives.ratio import TokenRatio
from jaxrl_sat.objectives.softmax import full_divergence
from jaxrl_sat.objectives.support import Support
from jaxrl_sat.objectives.surrogate import Clip
from jaxrl_sat.objectives.unclipped import Linear
from tests.golden_common import Evaluator, at_common_shape, evidence_of, floats, loss_and_grad, renamed

SURROGATE = {"clip_times_mask": Clip, "mask_only": Linear}
DIVERGENCE = {"kl": support_kl, "tv": support_tv}
DIRECTION = {
    "ratio": {"kl": RatioDirection(), "tv": RatioDirection()},
    "agg": {"kl": PredictiveKl("aggregated"), "tv": PredictiveTv("aggregated")},
    "uni": {"kl": PredictiveKl("uniform"), "tv": PredictiveTv("uniform")},
}
MASK = {k: k for k in ("delta", "delta_high", "tail_floor", "include_sampled")}
LINEAR = {"log_ratio_max": "log_ratio_max", "clamp_grad": "ceiling_gradient"}
CLIP = {**LINEAR, "dual_clip_c": "dual_clip"}
RADII = {"eps_low": "eps_low", "eps_high": "eps_high"}
REDUCE = {"agg": "mode", "norm": "norm", "count_empty": "count_empty"}


def _objective(mask: DivergenceMask, params: dict[str, Any]) -> obj.PolicyLoss:
    surrogate = SURROGATE[params.get("form", "mask_only")]
    return obj.PolicyLoss(
        TokenRatio(),
        ConstantRadii(**renamed(params, RADII)),
        surrogate(**renamed(params, CLIP if surrogate is Clip else LINEAR)),
        obj.Reduce(**renamed(params, REDUCE)),
        (dataclasses.replace(mask, **renamed(params, MASK)),),
    )


def _mask_of(made: obj.PolicyLoss) -> DivergenceMask:
    return cast(DivergenceMask, made.gates[0])


def _loss(made: obj.PolicyLoss, evidence: obj.Evidence) -> tuple[dict[str, Any], Terms, Support]:
    """What every mask reports. Not compiled: cases differ in parameters more than in shapes."""
    t, mask = obj.terms(made, evidence), _mask_of(made)
    support = mask.support(t.evidence)
    common, _ = loss_and_grad(lambda given: (obj.policy_loss(made, given), None), evidence)
    active, verdict = t.evidence.mask, mask.judge(support, t.evidence.advantages, t.log_ratio)
    dropped = active & verdict.drop
    return (
        {
            **common,
            "ratio": t.ratio,
            "d": t.log_ratio,
            "D": jnp.where(active, verdict.divergence, 0),
            "mask_keep": ~dropped,
            "mask_frac": _share(dropped, t),
            "clip_frac": _share(t.clipped, t),
        },
        t,
        support,
    )


def _share(flags: Bool[Array, "N T"], t: Terms) -> Float[Array, ""]:
    return obj.normalise(*mean_over(flags, t.evidence.mask, t.ratio.dtype))


@at_common_shape
def _dppo_tv(inputs: dict, params: dict) -> dict:
    return _loss(_objective(DivergenceMask(support_tv, top_k=False), params), evidence_of(inputs))[0]


@at_common_shape
def _dppo_binary_kl(inputs: dict, params: dict) -> dict:
    direction = PredictiveKl() if params["predictive"] else RatioDirection()
    made = _objective(DivergenceMask(support_kl, direction, top_k=False), params)
    got, t, support = _loss(made, evidence_of(inputs))
    return {**got, "Ddot": jnp.where(t.evidence.mask, kl_direction(support).total, 0)}


@at_common_shape
def _dppo_top_k(inputs: dict, params: dict) -> dict:
    kind = params["divergence"]
    made = _objective(DivergenceMask(DIVERGENCE[kind], DIRECTION[params["direction"]][kind]), params)
    got, t, support = _loss(made, _top_k_evidence(inputs))
    mask, active, advantages = _mask_of(made), t.evidence.mask, t.evidence.advantages
    ratio, agg, uni = (
        dataclasses.replace(mask, direction=DIRECTION[rule][kind]).judge(support, advantages, t.log_ratio)
        for rule in ("ratio", "agg", "uni")
    )
    figures = {
        **_figures(support),
        "outside": ratio.outside,
        "disagree_agg": agg.drop != ratio.drop,
        "disagree_uni": uni.drop != ratio.drop,
    }
    kept = {
        f"keep_{rule}": ~(active & verdict.drop) for rule, verdict in (("ratio", ratio), ("agg", agg), ("uni", uni))
    }
    return {**got, **{name: jnp.where(active, value, 0) for name, value in figures.items()}, **kept}


@jax.jit
def _figures(support: Support) -> dict[str, jax.Array]:
    kl_agg, kl_uni = kl_direction(support, "aggregated"), kl_direction(support, "uniform")
    return {
        "m": support.size,
        "sampled_in_topk": jnp.any(support.is_sampled[..., :-1], axis=-1),
        "mu_tail": support.mu_tail,
        "pi_tail": support.pi_tail,
        "D_kl": support_kl(support),
        "D_tv": support_tv(support),
        "local": kl_agg.local,
        "global_agg": kl_agg.global_,
        "global_uni": kl_uni.global_,
        "tail_gap": tail_model_gap(support),
        "Ddot_kl_agg": kl_agg.total,
        "Ddot_kl_uni": kl_uni.total,
        "Ddot_tv_agg": tv_direction(support, "aggregated"),
        "Ddot_tv_uni": tv_direction(support, "uniform"),
        "eq15_agg": direction_flips(kl_agg),
        "eq15_uni": direction_flips(kl_uni),
    }


def _top_k_evidence(inputs: dict) -> obj.Evidence:
    ids = jnp.asarray(inputs["topk_ids"], int)
    if "topk_valid" in inputs:
        ids = jnp.where(jnp.asarray(inputs["topk_valid"], bool), ids, -1)
    return dataclasses.replace(
        evidence_of(inputs),
        tokens=jnp.asarray(inputs["y"], int),
        topk_ids=ids,
        topk_logp=floats(inputs["pi_topk_lp"]),
        topk_logp_mu=floats(inputs["mu_topk_lp"]),
        vocab_size=int(inputs["vocab_size"]),
    )


def _bernoulli_kl(inputs: dict, params: dict) -> dict:
    log_p, log_q = floats(inputs["lp"]), floats(inputs["lq"])
    return {"kl": bernoulli_kl(log_p, log_q, **params), "log1mexp": log1mexp(log_p, **params)}


def _full_divergence(inputs: dict, params: dict) -> dict:
    got = full_divergence(floats(inputs["z_mu"]), floats(inputs["z_pi"]), jnp.asarray(inputs["k"], int))
    names = {"Ddot_kl": "kl_direction", "Ddot_tv": "tv_direction"}
    return {k: getattr(got, names.get(k, k)) for k in ("kl", "tv", "local", "global_", *names)}


def _direction_analysis(inputs: dict, params: dict) -> dict:
    before, ratio, direction, adv, after = (floats(inputs[k]) for k in ("D_pre", "d", "Ddot", "adv", "D_post"))
    active = jnp.asarray(inputs["mask"], bool)
    record = analysis.decisions(before, ratio, direction, adv, active, params["delta"])
    metrics = analysis.realised(record, after)
    rates = obj.finalise(metrics)
    means = {name.removeprefix("direction/"): pair for name, pair in metrics.means.items()}

    def fraction(name: str) -> dict:
        num, den = means[name]
        return {"num": num, "den": den, "rate": rates[f"direction/{name}"]}

    (n_outside, _), (n_disagree, _) = means["outside"], means["disagree"]
    return {
        "n_outside": n_outside,
        "n_disagree": n_disagree,
        "unsafe_keep_ratio": fraction("unsafe_keep_ratio"),
        "unsafe_keep_pred": fraction("unsafe_keep_predicted"),
        "contract_ratio": fraction("contraction_ratio"),
        "contract_pred": fraction("contraction_predicted"),
        "agree_frac": obj.normalise(n_outside - n_disagree, n_outside),
        "delta_D": jnp.where(active, after, 0) - record.divergence,
        "disagree": record.disagree,
    }


def _one_step_ratio(inputs: dict, params: dict) -> dict:
    window = (params["lo"], params["hi"])
    return {"r_next": improvement.one_step_ratio(floats(inputs["r"]), floats(inputs["adv"]), *window, params["eta"])}


def _improvement_bounds(inputs: dict, params: dict) -> dict:
    gain, xi, horizon, tv_max, tv_sum = (floats(inputs[k]) for k in ("L_prime", "xi", "T", "tv_max", "tv_bar"))
    return {
        "max_form": improvement.max_tv_bound(gain, xi, horizon, tv_max),
        "mean_form": improvement.mean_tv_bound(gain, xi, tv_sum),
    }


EVALUATORS: dict[str, Evaluator] = {
    "bernoulli_kl": _bernoulli_kl,
    "full_divergence": _full_divergence,
    "dppo_tv_clip": _dppo_tv,
    "dppo_tv_mask": _dppo_tv,
    "dppo_binary_kl": _dppo_binary_kl,
    "dppo_topk_kl": _dppo_top_k,
    "dppo_topk_tv": _dppo_top_k,
    "predictive_kl_agg": _dppo_top_k,
    "predictive_kl_uni": _dppo_top_k,
    "predictive_tv_agg": _dppo_top_k,
    "predictive_tv_uni": _dppo_top_k,
    "direction_analysis": _direction_analysis,
    "one_step_ratio": _one_step_ratio,
    "improvement_bounds": _improvement_bounds,
}

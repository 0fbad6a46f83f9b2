"""Maps the names of the golden vectors onto the package's functions. No mathematics of its own.

`evaluate` takes a case's lists as they stand and computes in the precision that JAX_ENABLE_X64 sets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import objectives as obj
from jaxrl_sat.model.moe import gates
from jaxrl_sat.objectives import evidence as ev
from jaxrl_sat.objectives import kernel, quantile, ratio
from jaxrl_sat.objectives.policy_loss import reduce_terms
from jaxrl_sat.objectives.radii import SatRadii
from jaxrl_sat.objectives.surrogate import Clip
from jaxrl_sat.types import InputError


def evaluate(objective: str, inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Every key of a golden case's `expected`, computed by the package."""
    if objective not in EVALUATORS:
        raise InputError(f"objective: {objective!r} is not one of {', '.join(EVALUATORS)}")
    return jax.tree.map(np.asarray, EVALUATORS[objective](inputs, params))


def _floats(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float64), float)


def _evidence(inputs: dict[str, Any]) -> obj.Evidence:
    logp = _floats(inputs["logp"])
    return obj.make_evidence(
        logp,
        _floats(inputs.get("logp_mu", inputs["logp"])),
        _floats(inputs["adv"]) if "adv" in inputs else jnp.zeros_like(logp),
        jnp.asarray(inputs["mask"], bool),
        logp_old=_floats(inputs["logp_old"]) if "logp_old" in inputs else None,
        logp_ref=_floats(inputs["logp_ref"]) if "logp_ref" in inputs else None,
        entropy=_floats(inputs["entropy"]) if "entropy" in inputs else None,
    )


def _objective(name: str, params: dict[str, Any]) -> obj.PolicyLoss:
    """The recipe of that name with a case's parameters; options that recipes leave out go to their slots."""
    made = obj.RECIPES[name](**_renamed(params, RECIPE))
    sat = _renamed(params, SAT) if isinstance(made.radii, SatRadii) else {}
    return obj.PolicyLoss(
        ratio=made.ratio,
        radii=dataclasses.replace(cast(SatRadii, made.radii), **sat) if sat else made.radii,
        surrogate=Clip(**_renamed(params, CLIP)),
        reduce=dataclasses.replace(made.reduce, **_renamed(params, REDUCE)),
    )


RECIPE = {
    "eps_low": "eps_low",
    "eps_high": "eps_high",
    "agg": "aggregation",
    "grad_mode": "grad_mode",
    "level": "quantile",
    "exponent": "exponent",
}
CLIP = {"log_ratio_max": "log_ratio_max", "clamp_grad": "ceiling_gradient", "dual_clip_c": "dual_clip"}
SAT = {"enabled": "enabled", "q": "reference", "q_floor": "q_floor"}
REDUCE = {"norm": "norm", "count_empty": "count_empty"}


def _renamed(params: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names[k]: v for k, v in params.items() if k in names}


def _loss(loss_out: Callable[[obj.Evidence], tuple[obj.LossOut, Any]], evidence: obj.Evidence) -> tuple[dict, Any]:
    """What every loss reports (value, per-token loss, gradient, keep set, counts), and what `loss_out` adds."""

    def value(logp: jax.Array) -> tuple[jax.Array, tuple[obj.LossOut, Any]]:
        out, more = loss_out(dataclasses.replace(evidence, logp=logp))
        return obj.normalise(out.loss_sum, out.count), (out, more)

    (loss, (out, more)), grad = jax.value_and_grad(value, has_aux=True)(evidence.logp)
    common = {
        "loss": loss,
        "per_token_loss": out.per_token,
        "grad": grad,
        "keep": out.keep,
        "n_active": out.n_active,
        "skip": out.n_active == 0,
        "n_nonfinite": out.n_nonfinite,
    }
    return common, more


@functools.partial(jax.jit, static_argnames="made")
def _clipped_loss(made: obj.PolicyLoss, evidence: obj.Evidence, q: jax.Array | None = None) -> dict[str, Any]:
    """The loss and its intermediates by the names that golden cases use; `q` replaces the reference of SAT."""
    if q is not None:
        made = dataclasses.replace(made, radii=dataclasses.replace(cast(SatRadii, made.radii), reference=q))

    def loss_and_terms(given: obj.Evidence) -> tuple[obj.LossOut, Any]:
        t = obj.terms(made, given)
        out = reduce_terms(made, t)
        return out, (t, obj.finalise(out.metrics))

    common, (t, metrics) = _loss(loss_and_terms, evidence)
    clipped, newly = metrics["clip/fraction"], metrics["sat/newly_clipped_fraction"]
    return {
        **common,
        "d": ratio.TokenRatio()(t.evidence),
        "d_seq": t.log_ratio,
        "rho": ratio.importance(ratio.mean_log_ratio(t.evidence))[:, 0],
        "ratio": t.ratio,
        "clip_frac": clipped,
        "ppo_clip_frac": clipped - newly,
        "q": t.region.q,
        "gate": t.region.gate,
        "c_plus": t.region.c_plus,
        "c_minus": t.region.c_minus,
        "eps_low_t": t.region.low,
        "eps_high_t": t.region.high,
        "gate_rate": metrics["sat/gate_rate"],
        "newly_clipped": t.newly_clipped,
        "newly_clipped_frac": newly,
    }


def _recipe(name: str) -> Callable[[dict, dict], dict]:
    return lambda inputs, params: _clipped_loss(_objective(name, params), _evidence(inputs))


def _sat_grpo_turn(inputs: dict, params: dict) -> dict:
    evidence, made = _evidence(inputs), _objective("sat_grpo", params)
    clean, _ = ev.sanitise(evidence, made.reads)
    active, mismatch = clean.mask, jnp.abs(made.ratio(clean))
    turns = jnp.asarray(inputs["turn_ids"], int)
    least = params.get("min_turn_tokens", 1)
    per_turn = quantile.turn_quantiles(mismatch, active, turns, int(turns.max()) + 1, params["level"], least)
    per_token = jnp.where(active, per_turn[turns], 0)
    return {
        **_clipped_loss(made, evidence, per_token),
        "q": quantile.lower_quantile(mismatch, active, params["level"]),
        "q_per_turn": {str(k): per_turn[k] for k in np.unique(np.asarray(turns)[np.asarray(active)])},
        "q_per_token": per_token,
    }


def _agg_weights(inputs: dict, params: dict) -> dict:
    mask = _floats(inputs["mask"])
    clean, _ = ev.sanitise(_evidence({"logp": mask, "mask": inputs["mask"]}), ())
    return {"weights": obj.Reduce(**params).weights(clean)}


def _hill_kernel(inputs: dict, params: dict) -> dict:
    return {"psi": kernel.hill(_floats(inputs["u"]), _floats(inputs["q"]), params["exponent"])}


def _lower_quantile(inputs: dict, params: dict) -> dict:
    values = _floats(inputs["values"])
    return {"q": quantile.lower_quantile(values, jnp.ones(values.shape, bool), params["level"])}


def _group_advantage(inputs: dict, params: dict) -> dict:
    names, groups = np.unique(inputs["group_ids"], return_inverse=True)
    return {"adv": obj.group_normalised(_floats(inputs["rewards"]), jnp.asarray(groups, int), len(names), **params)}


def _kl_penalty(inputs: dict, params: dict) -> dict:
    limits = (params["log_ratio_max"], params["value_clamp"])
    return _kl_loss(obj.Reduce(params["agg"]), params["kind"], params["coef"], limits, _evidence(inputs))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _kl_loss(reduce: obj.Reduce, kind: str, coef: float, limits: tuple, evidence: obj.Evidence) -> dict:
    plain = obj.kl_regulariser(evidence, 1.0, kind, reduce, *limits)
    common, _ = _loss(lambda e: (obj.kl_regulariser(e, coef, kind, reduce, *limits), None), evidence)
    return {**common, "kl": plain.per_token}


def _grpo_total(inputs: dict, params: dict) -> dict:
    made = _objective(params["objective"], {"agg": params["agg"], **params["obj_params"]})
    return _total_loss(made, params["kl_coef"], params["kl_kind"], params["ent_coef"], _evidence(inputs))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _total_loss(
    made: obj.PolicyLoss, kl_coef: float, kl_kind: str, entropy_coef: float, evidence: obj.Evidence
) -> dict:
    common, _ = _loss(lambda e: (obj.total_loss(made, e, kl_coef, kl_kind, entropy_coef), None), evidence)
    policy = obj.policy_loss(made, evidence)
    kl = obj.kl_regulariser(evidence, kl_coef, kl_kind, made.reduce)
    clean, _ = ev.sanitise(evidence, ("logp", "entropy"))
    return {
        **common,
        "pg_loss": obj.normalise(policy.loss_sum, policy.count),
        "kl_loss": obj.normalise(kl.loss_sum, kl.count),
        "entropy": obj.normalise(*made.reduce(clean.entropy, clean)),
    }


def _diagnostics(inputs: dict, params: dict) -> dict:
    evidence = _evidence(inputs)
    limits = (params["dev_low"], params["dev_high"], params["low_prob"], params["log_ratio_max"])
    clean, n_nonfinite = ev.sanitise(evidence, ("logp", "logp_mu"))
    got = obj.finalise(obj.staleness(evidence, *limits))
    names = {
        "mean_abs_d": "abs_d_mean",
        "mean_d": "d_mean",
        "var_d": "var_d",
        "max_abs_d": "abs_d_max",
        "k1": "k1",
        "k2": "k2",
        "k3": "k3",
        "is_dev_frac": "is_deviation",
        "mean_abs_r_minus_1": "abs_r_minus_1",
        "sampled_tv_mean": "sampled_tv",
        "low_prob_frac": "low_probability",
    }
    counts = {"n_active": jnp.sum(clean.mask), "n_nonfinite": n_nonfinite}
    return {**{k: got[f"staleness/{v}"] for k, v in names.items()}, **counts}


def _log_ratio_split(inputs: dict, params: dict) -> dict:
    got = obj.finalise(obj.staleness_split(_evidence(inputs)))
    names = {"mean_abs_policy": "abs_policy_mean", "mean_abs_impl": "abs_impl_mean"}
    same = ("var_policy", "var_impl", "cov", "var_total")
    return {k: got[f"staleness/{names.get(k, k)}"] for k in (*same, *names)}


def _r3_gate(inputs: dict, params: dict) -> dict:
    """Replay fixes membership by ids, of which an empty row has none: such a row is not valid, and its gate is 0."""
    z, member, outputs = (
        _floats(inputs["z_train"]),
        jnp.asarray(inputs["infer_mask"], bool),
        _floats(inputs["expert_out"]),
    )
    k, valid = int(member.sum(axis=1).max()), member.any(axis=1)
    recorded, live = (jax.lax.top_k(scores, k)[1] for scores in (member.astype(z.dtype), z))
    experts = jnp.arange(z.shape[1])

    def mixture(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = gates(logits, recorded, normalise=True)
        gate = jnp.sum(jnp.where(recorded[..., None] == experts, kept[..., None], 0), axis=1)
        gate = jnp.where(valid[:, None], gate, 0)
        return jnp.einsum("te,ted->td", gate, outputs), gate

    h, vjp, gate = jax.vjp(mixture, z, has_aux=True)
    picked = jnp.any(live[..., None] == experts, axis=1)
    same = jnp.sum(picked & member).astype(z.dtype)
    return {
        "gate": gate,
        "h": h,
        "vjp_z": vjp(_floats(inputs["cot_h"]))[0],
        "train_topk": picked,
        "overlap": obj.normalise(same, jnp.sum(member).astype(z.dtype)),
    }


EVALUATORS: dict[str, Callable[[dict, dict], dict]] = {
    "ppo_clip": _recipe("ppo"),
    "gspo": _recipe("gspo"),
    "sat_grpo": _recipe("sat_grpo"),
    "sat_gspo": _recipe("sat_gspo"),
    "sat_grpo_turn": _sat_grpo_turn,
    "agg_weights": _agg_weights,
    "hill_kernel": _hill_kernel,
    "lower_quantile": _lower_quantile,
    "group_advantage": _group_advantage,
    "kl_penalty": _kl_penalty,
    "grpo_total": _grpo_total,
    "diagnostics": _diagnostics,
    "log_ratio_split": _log_ratio_split,
    "r3_gate": _r3_gate,
}

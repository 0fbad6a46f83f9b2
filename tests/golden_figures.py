"""Golden evaluators of everything that is not a policy loss: names mapped onto the package, no mathematics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import objectives as obj
from jaxrl_sat.model.moe import gates
from jaxrl_sat.objectives import evidence as ev
from jaxrl_sat.objectives import kernel, quantile
from jaxrl_sat.pipeline import staleness
from tests.golden_common import Evaluator, at_common_shape, evidence_of, floats, loss_and_grad
from tests.golden_losses import objective_of


def _agg_weights(inputs: dict, params: dict) -> dict:
    mask = floats(inputs["mask"])
    clean, _ = ev.sanitise(evidence_of({"logp": mask, "mask": inputs["mask"]}), ())
    return {"weights": obj.Reduce(**params).weights(clean)}


def _hill_kernel(inputs: dict, params: dict) -> dict:
    return {"psi": kernel.hill(floats(inputs["u"]), floats(inputs["q"]), params["exponent"])}


def _lower_quantile(inputs: dict, params: dict) -> dict:
    values = floats(inputs["values"])
    return {"q": quantile.lower_quantile(values, jnp.ones(values.shape, bool), params["level"])}


def _group_advantage(inputs: dict, params: dict) -> dict:
    names, groups = np.unique(inputs["group_ids"], return_inverse=True)
    return {"adv": obj.group_normalised(floats(inputs["rewards"]), jnp.asarray(groups, int), len(names), **params)}


@at_common_shape
def _kl_penalty(inputs: dict, params: dict) -> dict:
    limits = (params["log_ratio_max"], params["value_clamp"], params.get("kl_level", "token"))
    reduce = obj.Reduce(params["agg"], params.get("norm"), params.get("count_empty", False))
    return _kl_loss(reduce, params["kind"], params["coef"], limits, evidence_of(inputs))


def _kl_loss(reduce: obj.Reduce, kind: str, coef: float, limits: tuple, evidence: obj.Evidence) -> dict:
    plain = obj.kl_regulariser(evidence, 1.0, kind, reduce, *limits)
    common, _ = loss_and_grad(lambda e: (obj.kl_regulariser(e, coef, kind, reduce, *limits), None), evidence)
    return {**common, "kl": plain.per_token}


def _grpo_total(inputs: dict, params: dict) -> dict:
    made = objective_of(params["objective"], {"agg": params["agg"], **params["obj_params"]})
    kl = (params["kl_coef"], params["kl_kind"], params.get("kl_level", "token"))
    return _total_loss(made, kl, params["ent_coef"], evidence_of(inputs))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _total_loss(
    made: obj.PolicyLoss, kl_options: tuple[float, str, str], entropy_coef: float, evidence: obj.Evidence
) -> dict:
    coef, kind, level = kl_options
    common, _ = loss_and_grad(lambda e: (obj.total_loss(made, e, coef, kind, entropy_coef, level), None), evidence)
    policy = obj.policy_loss(made, evidence)
    kl = obj.kl_regulariser(evidence, coef, kind, made.reduce, level=level)
    clean, _ = ev.sanitise(evidence, ("logp", "entropy"))
    return {
        **common,
        "pg_loss": obj.normalise(policy.loss_sum, policy.count),
        "kl_loss": obj.normalise(kl.loss_sum, kl.count),
        "entropy": obj.normalise(*made.reduce(clean.entropy, clean)),
    }


@at_common_shape
def _diagnostics(inputs: dict, params: dict) -> dict:
    evidence = evidence_of(inputs)
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


@at_common_shape
def _log_ratio_split(inputs: dict, params: dict) -> dict:
    got = obj.finalise(obj.staleness_split(evidence_of(inputs)))
    names = {"mean_abs_policy": "abs_policy_mean", "mean_abs_impl": "abs_impl_mean"}
    same = ("var_policy", "var_impl", "cov", "var_total")
    return {k: got[f"staleness/{names.get(k, k)}"] for k in (*same, *names)}


def _r3_gate(inputs: dict, params: dict) -> dict:
    """Replay fixes membership by ids, of which an empty row has none: such a row is not valid, and its gate is 0."""
    z, member, outputs = (
        floats(inputs["z_train"]),
        jnp.asarray(inputs["infer_mask"], bool),
        floats(inputs["expert_out"]),
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
        "vjp_z": vjp(floats(inputs["cot_h"]))[0],
        "train_topk": picked,
        "overlap": obj.normalise(same, jnp.sum(member).astype(z.dtype)),
    }


def _entropy(inputs: dict, params: dict) -> dict:
    """Entropies at the active positions, 0 elsewhere, on every word and on the nucleus."""
    logits, keep = floats(inputs["logits"]), jnp.asarray(inputs["keep"], bool)
    active = jnp.asarray(inputs["mask"], bool)

    def on(support: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, vjp = jax.vjp(lambda z: jnp.where(active, obj.entropy(z, support), 0), logits)
        return values, vjp(jnp.ones_like(values))[0]

    names = {"": jnp.ones(keep.shape, bool), "_masked": keep | ~keep.any(axis=-1, keepdims=True)}
    got = {suffix: on(support) for suffix, support in names.items()}
    entropies = {f"entropy{suffix}": values for suffix, (values, _) in got.items()}
    return {**entropies, **{f"grad_logits{suffix}": grad for suffix, (_, grad) in got.items()}}


def _mai_replay(inputs: dict, params: dict) -> dict:
    """log pi~ of the sampled words at the active positions, 0 elsewhere, and its gradient where it is finite."""
    logits, keep = floats(inputs["logits"]), jnp.asarray(inputs["keep"], bool)
    sampled, active = jnp.asarray(inputs["y"], int), jnp.asarray(inputs["mask"], bool)

    def of_sampled(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        every = obj.nucleus_log_softmax(z, keep, sampled, params["force_sampled"])
        logp = jnp.take_along_axis(every, sampled[..., None], axis=-1, mode="clip")[..., 0]
        return jnp.where(active, logp, 0), jnp.where(active[..., None], jnp.exp(every), 0)

    logp, vjp, probs = jax.vjp(of_sampled, logits, has_aux=True)
    return {"logp": logp, "probs": probs, "grad_logits": vjp(jnp.isfinite(logp).astype(logp.dtype))[0]}


def _staleness_mean(inputs: dict, params: dict) -> dict:
    """C, M_tail, B, Q and rho in the model's order."""
    given = (inputs[name] for name in ("C", "M_tail", "B", "Q", "rho_sys"))
    got = staleness.mean_staleness(*given, **params)
    return {"n_pqs": got.n_pqs, "n_iqs": got.n_iqs, "n_bar": got.n_bar}


def _m_tail(inputs: dict, params: dict) -> dict:
    return {"m_tail": staleness.m_tail(inputs["lengths"])}


EVALUATORS: dict[str, Evaluator] = {
    "agg_weights": _agg_weights,
    "hill_kernel": _hill_kernel,
    "lower_quantile": _lower_quantile,
    "group_advantage": _group_advantage,
    "kl_penalty": _kl_penalty,
    "grpo_total": _grpo_total,
    "diagnostics": _diagnostics,
    "log_ratio_split": _log_ratio_split,
    "r3_gate": _r3_gate,
    "entropy": _entropy,
    "mai_replay": _mai_replay,
    "staleness_mean": _staleness_mean,
    "m_tail": _m_tail,
}

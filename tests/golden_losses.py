"""Golden evaluators of the policy losses: names mapped onto the package's recipes and slots, no mathematics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_sat import objectives as obj
from jaxrl_sat.objectives import corrections, ratio
from jaxrl_sat.objectives.metrics import mean_over
from jaxrl_sat.objectives.policy_loss import Terms, reduce_terms
from jaxrl_sat.objectives.radii import SatRadii
from jaxrl_sat.objectives.segments import segment_any
from tests.golden_common import Evaluator, at_common_shape, evidence_of, loss_and_grad, renamed

More = Callable[[obj.PolicyLoss, Terms], dict[str, Any]]


def objective_of(name: str, params: dict[str, Any]) -> obj.PolicyLoss:
    """The recipe of that name with a case's parameters; options that recipes leave out go to their slots."""
    arguments = renamed(params, RECIPE)
    if "ratio_base" in params:
        arguments["denominator"] = DENOMINATOR[params["ratio_base"]]
    if "eps" in params:
        arguments["eps_low"] = arguments["eps_high"] = params["eps"]
    made = obj.RECIPES[NAMES.get(name, name)](**arguments)
    options = renamed(params, OPTIONS)
    return obj.PolicyLoss(
        ratio=made.ratio,
        radii=_with(made.radii, options),
        surrogate=_with(made.surrogate, options),
        reduce=_with(made.reduce, options),
        gates=tuple(_with(gate, options) for gate in made.gates),
    )


def _with(slot: Any, options: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(slot)}
    return dataclasses.replace(slot, **{k: v for k, v in options.items() if k in names})


NAMES = {"ppo_clip": "ppo", "tis_on_ppo": "grpo_tis"}
DENOMINATOR = {"rollout": "behaviour", "recomputed": "recomputed"}
RECIPE = {
    "agg": "aggregation",
    "level": "quantile",
    "alpha_seq": "alpha",
    "beta_seq": "beta",
    **{k: k for k in ("eps_low", "eps_high", "grad_mode", "exponent", "cap", "cap_low", "alpha", "beta", "zero_one")},
    **{k: k for k in ("phi", "delta")},
}
OPTIONS = {
    "clamp_grad": "ceiling_gradient",
    "dual_clip_c": "dual_clip",
    **{k: k for k in ("log_ratio_max", "enabled", "q", "q_floor", "min_turn_tokens", "norm", "count_empty")},
}


def clipped_loss(made: obj.PolicyLoss, evidence: obj.Evidence, more: More | None = None) -> dict[str, Any]:
    """The loss and its intermediates by the names that golden cases use; `more` adds those of a family.

    Not jitted: a case is a compilation of its own, where single operations compile once for all cases and names.
    """

    def loss_and_terms(given: obj.Evidence) -> tuple[obj.LossOut, Any]:
        t = obj.terms(made, given)
        out = reduce_terms(made, t)
        return out, (t, obj.finalise(out.metrics))

    common, (t, metrics) = loss_and_grad(loss_and_terms, evidence)
    clipped, newly = metrics["clip/fraction"], metrics["sat/newly_clipped_fraction"]
    return {
        **common,
        "d": ratio.TokenRatio()(t.evidence),
        "d_seq": t.log_ratio,
        "rho": ratio.importance(ratio.mean_log_ratio(t.evidence), _ceiling(made))[:, 0],
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
        **(more(made, t) if more else {}),
    }


def _ceiling(made: obj.PolicyLoss) -> float:
    return cast(Any, made.surrogate).log_ratio_max


def _share(flags: Bool[Array, "N T"], t: Terms) -> Float[Array, ""]:
    return obj.normalise(*mean_over(flags, t.evidence.mask, t.ratio.dtype))


def _soft(made: obj.PolicyLoss, t: Terms) -> dict[str, Any]:
    return {"weight": t.soft_weight, "truncated_frac": _share(t.soft_weight != t.ratio, t)}


def _tis(made: obj.PolicyLoss, t: Terms) -> dict[str, Any]:
    return {"weight": t.weight, "truncated_frac": _share(t.ratio > cast(Any, made.gates[0]).cap, t)}


def _corrected(made: obj.PolicyLoss, t: Terms) -> dict[str, Any]:
    k = corrections.mismatch(t.evidence, _ceiling(made))
    return {
        "k": k,
        "weight": t.weight,
        "truncated_frac": _share(t.weight != k, t),
        "rejected_frac": _share(t.weight == 0, t),
    }


def _kpop(made: obj.PolicyLoss, t: Terms) -> dict[str, Any]:
    forward, backward = cast(corrections.KPop, made.gates[0]).divergences(t.evidence)
    return {**_corrected(made, t), "kl_fwd": forward, "kl_rev": backward}


def _seqclip(made: obj.PolicyLoss, t: Terms) -> dict[str, Any]:
    some, kept = segment_any(t.evidence.mask, t.evidence), segment_any(t.weight > 0, t.evidence)
    fraction = obj.normalise(*mean_over(~kept, some, t.ratio.dtype))
    return {"seq_keep": kept[:, 0], "seq_mask_frac": fraction}


def _recipe(name: str, more: More | None = None) -> Evaluator:
    return at_common_shape(lambda inputs, params: clipped_loss(objective_of(name, params), evidence_of(inputs), more))


@at_common_shape
def _sat_grpo_turn(inputs: dict, params: dict) -> dict:
    made = objective_of("sat_grpo", params)
    by_turn = dataclasses.replace(made, radii=dataclasses.replace(cast(SatRadii, made.radii), by_turn=True))
    turns = np.asarray(inputs["turn_ids"], int)
    evidence = dataclasses.replace(
        evidence_of(inputs), turn_ids=jnp.asarray(turns, int), num_turns=max(int(turns.max()) + 1, 1)
    )
    got = clipped_loss(by_turn, evidence)
    mismatch, active = obj.first_pass(made, evidence)
    return {
        **got,
        "q": made.radii.reference(mismatch, active, evidence.turn_ids, evidence.num_turns),
        "q_per_turn": {str(k): got["q"][active & (turns == k)][0] for k in np.unique(turns[np.asarray(active)])},
        "q_per_token": got["q"],
    }


EVALUATORS: dict[str, Evaluator] = {
    "ppo_clip": _recipe("ppo"),
    "gspo": _recipe("gspo"),
    "sat_grpo": _recipe("sat_grpo"),
    "sat_gspo": _recipe("sat_gspo"),
    "sat_grpo_turn": _sat_grpo_turn,
    "tis": _recipe("tis", _tis),
    "tis_on_ppo": _recipe("grpo_tis", _corrected),
    "icepop": _recipe("icepop", _corrected),
    "decoupled_ppo": _recipe("decoupled_ppo", _corrected),
    "kpop": _recipe("kpop", _kpop),
    "seqclip": _recipe("seqclip", _seqclip),
    "cispo": _recipe("cispo", _soft),
    "spo": _recipe("spo", _soft),
    "drpo": _recipe("drpo", _soft),
    "up": _recipe("up"),
}

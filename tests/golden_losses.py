"""Golden evaluators of the policy losses: names mapped onto the package's recipes and slots, no mathematics."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import objectives as obj
from jaxrl_sat.objectives import ratio
from jaxrl_sat.objectives.policy_loss import reduce_terms
from jaxrl_sat.objectives.radii import SatRadii
from jaxrl_sat.objectives.surrogate import Clip
from tests.golden_common import Evaluator, evidence_of, loss_and_grad, renamed


def objective_of(name: str, params: dict[str, Any]) -> obj.PolicyLoss:
    """The recipe of that name with a case's parameters; options that recipes leave out go to their slots."""
    made = obj.RECIPES[name](**renamed(params, RECIPE))
    sat = renamed(params, SAT) if isinstance(made.radii, SatRadii) else {}
    return obj.PolicyLoss(
        ratio=made.ratio,
        radii=dataclasses.replace(cast(SatRadii, made.radii), **sat) if sat else made.radii,
        surrogate=Clip(**renamed(params, CLIP)),
        reduce=dataclasses.replace(made.reduce, **renamed(params, REDUCE)),
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
SAT = {"enabled": "enabled", "q": "q", "q_floor": "q_floor", "min_turn_tokens": "min_turn_tokens"}
REDUCE = {"norm": "norm", "count_empty": "count_empty"}


@functools.partial(jax.jit, static_argnames="made")
def clipped_loss(made: obj.PolicyLoss, evidence: obj.Evidence) -> dict[str, Any]:
    """The loss and its intermediates by the names that golden cases use."""

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


def _recipe(name: str) -> Evaluator:
    return lambda inputs, params: clipped_loss(objective_of(name, params), evidence_of(inputs))


def _sat_grpo_turn(inputs: dict, params: dict) -> dict:
    made = objective_of("sat_grpo", params)
    by_turn = dataclasses.replace(made, radii=dataclasses.replace(cast(SatRadii, made.radii), by_turn=True))
    turns = np.asarray(inputs["turn_ids"])
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
}

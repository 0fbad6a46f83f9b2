"""Objectives: evidence in, sums and counts out. Imports jax and `types` alone."""

from jaxrl_sat.objectives.advantages import group_normalised
from jaxrl_sat.objectives.diagnostics import staleness, staleness_split
from jaxrl_sat.objectives.evidence import Evidence, UpdateScale, make_evidence
from jaxrl_sat.objectives.kl import kl_estimate, kl_regulariser
from jaxrl_sat.objectives.metrics import Metrics, combine, finalise
from jaxrl_sat.objectives.policy_loss import (
    LossOut,
    PolicyLoss,
    first_pass,
    needs_first_pass,
    needs_recomputed,
    needs_topk,
    policy_loss,
    terms,
    update_scale,
)
from jaxrl_sat.objectives.recipes import RECIPES, grpo, gspo, ppo, sat_grpo, sat_gspo
from jaxrl_sat.objectives.reduce import Reduce, normalise
from jaxrl_sat.objectives.total import total_loss

__all__ = [
    "RECIPES",
    "Evidence",
    "LossOut",
    "Metrics",
    "PolicyLoss",
    "Reduce",
    "UpdateScale",
    "combine",
    "finalise",
    "first_pass",
    "group_normalised",
    "grpo",
    "gspo",
    "kl_estimate",
    "kl_regulariser",
    "make_evidence",
    "needs_first_pass",
    "needs_recomputed",
    "needs_topk",
    "normalise",
    "policy_loss",
    "ppo",
    "sat_grpo",
    "sat_gspo",
    "staleness",
    "staleness_split",
    "terms",
    "total_loss",
    "update_scale",
]

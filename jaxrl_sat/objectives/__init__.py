"""Objectives: evidence in, sums and counts out. Imports jax and `types` alone."""

from jaxrl_sat.objectives.advantages import (
    ADVANTAGES,
    group_centred,
    group_normalised,
    leave_one_out,
    overlong_shaping,
)
from jaxrl_sat.objectives.diagnostics import by_turn, divergences, staleness, staleness_split
from jaxrl_sat.objectives.direction_analysis import direction_after, direction_before, direction_counts
from jaxrl_sat.objectives.entropy import entropy, log_softmax_on
from jaxrl_sat.objectives.evidence import Evidence, UpdateScale, make_evidence
from jaxrl_sat.objectives.kl import kl_estimate, kl_regulariser
from jaxrl_sat.objectives.masks import DivergenceMask, support_kl, support_tv
from jaxrl_sat.objectives.metrics import Metrics, combine, finalise
from jaxrl_sat.objectives.nucleus import nucleus_log_softmax, renormalised
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
from jaxrl_sat.objectives.recipes import (
    RECIPES,
    cispo,
    clip_higher,
    decoupled_ppo,
    drpo,
    grpo,
    grpo_tis,
    gspo,
    gspo_tis,
    icepop,
    kpop,
    ppo,
    sat_grpo,
    sat_gspo,
    seqclip,
    spo,
    tis,
    up,
)
from jaxrl_sat.objectives.reduce import Reduce, normalise
from jaxrl_sat.objectives.router import router_loss
from jaxrl_sat.objectives.softmax import full_divergence
from jaxrl_sat.objectives.total import total_loss

__all__ = [
    "ADVANTAGES",
    "RECIPES",
    "DivergenceMask",
    "Evidence",
    "LossOut",
    "Metrics",
    "PolicyLoss",
    "Reduce",
    "UpdateScale",
    "by_turn",
    "cispo",
    "clip_higher",
    "combine",
    "decoupled_ppo",
    "direction_after",
    "direction_before",
    "direction_counts",
    "divergences",
    "drpo",
    "entropy",
    "finalise",
    "first_pass",
    "full_divergence",
    "group_centred",
    "group_normalised",
    "grpo",
    "grpo_tis",
    "gspo",
    "gspo_tis",
    "icepop",
    "kl_estimate",
    "kl_regulariser",
    "kpop",
    "leave_one_out",
    "log_softmax_on",
    "make_evidence",
    "needs_first_pass",
    "needs_recomputed",
    "needs_topk",
    "normalise",
    "nucleus_log_softmax",
    "overlong_shaping",
    "policy_loss",
    "ppo",
    "renormalised",
    "router_loss",
    "sat_grpo",
    "sat_gspo",
    "seqclip",
    "spo",
    "staleness",
    "staleness_split",
    "support_kl",
    "support_tv",
    "terms",
    "tis",
    "total_loss",
    "up",
    "update_scale",
]

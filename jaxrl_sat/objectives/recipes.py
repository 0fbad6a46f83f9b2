"""The named objectives, one line each: which function stands in which slot. The keywords are the config's keys."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_sat.objectives.policy_loss import PolicyLoss
from jaxrl_sat.objectives.quantile import Level
from jaxrl_sat.objectives.radii import ConstantRadii, SatRadii
from jaxrl_sat.objectives.ratio import SequenceRatio, TokenRatio
from jaxrl_sat.objectives.reduce import Reduce
from jaxrl_sat.objectives.surrogate import Clip


def ppo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "token-mean",
    denominator: str = "behaviour",
) -> PolicyLoss:
    """PPO's clipped surrogate on token ratios: seed 000 S^PPO (3.2), seed 001 Eq. 2-3."""
    return PolicyLoss(TokenRatio(denominator), ConstantRadii(eps_low, eps_high), Clip(), Reduce(aggregation))


def grpo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "token-mean",
    denominator: str = "behaviour",
) -> PolicyLoss:
    """GRPO: PPO's loss; what makes it GRPO is the group-normalised advantage (`advantages`). Seed 000 3.3."""
    return ppo(eps_low, eps_high, aggregation, denominator)


def gspo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "seq-mean-token-mean",
    denominator: str = "behaviour",
    grad_mode: str = "mean",
) -> PolicyLoss:
    """GSPO: the clip on the length-normalised sequence ratio. Seed 000 Part 4, S_GSPO."""
    ratio = SequenceRatio(denominator, grad_mode)
    return PolicyLoss(ratio, ConstantRadii(eps_low, eps_high), Clip(), Reduce(aggregation))


def sat_grpo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "token-mean",
    denominator: str = "behaviour",
    quantile: Level = "0.90",
    exponent: float = 2.0,
    q_floor: float = 0.0,
) -> PolicyLoss:
    """SAT on token ratios: seed 000 (3.1)-(3.6)."""
    radii = SatRadii(eps_low, eps_high, quantile, exponent, q_floor)
    return PolicyLoss(TokenRatio(denominator), radii, Clip(), Reduce(aggregation))


def sat_gspo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "seq-mean-token-mean",
    denominator: str = "behaviour",
    grad_mode: str = "mean",
    quantile: Level = "0.90",
    exponent: float = 2.0,
    q_floor: float = 0.0,
) -> PolicyLoss:
    """SAT on the sequence ratio, broadcast to the active tokens before the quantile: seed 000 3.1 "GSPO scope"."""
    radii = SatRadii(eps_low, eps_high, quantile, exponent, q_floor)
    return PolicyLoss(SequenceRatio(denominator, grad_mode), radii, Clip(), Reduce(aggregation))


RECIPES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo,
    "grpo": grpo,
    "gspo": gspo,
    "sat_grpo": sat_grpo,
    "sat_gspo": sat_gspo,
}

"""The named objectives whose trust region is a divergence: DPPO and the predictive masks. See `recipes`."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_sat.objectives.direction import Direction, PredictiveKl, PredictiveTv, RatioDirection
from jaxrl_sat.objectives.masks import Divergence, DivergenceMask, support_kl, support_tv
from jaxrl_sat.objectives.policy_loss import PolicyLoss
from jaxrl_sat.objectives.radii import ConstantRadii
from jaxrl_sat.objectives.ratio import TokenRatio
from jaxrl_sat.objectives.reduce import Reduce
from jaxrl_sat.objectives.surrogate import Clip
from jaxrl_sat.objectives.unclipped import Linear


def dppo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    delta: float = 1e-3,
    delta_high: float | None = None,
    aggregation: str = "token-mean",
) -> PolicyLoss:
    """DPPO as seed 000 3.3 runs it: the sampled-TV mask times the clipped surrogate. A token must pass both."""
    mask = DivergenceMask(support_tv, delta=delta, delta_high=delta_high, top_k=False)
    return PolicyLoss(TokenRatio(), ConstantRadii(eps_low, eps_high), Clip(), Reduce(aggregation), (mask,))


def dppo_tv(
    delta: float = 1e-3, delta_high: float | None = None, aggregation: str = "seq-mean-token-sum"
) -> PolicyLoss:
    """DPPO with the sampled-TV mask alone, S = sg[M] r A: seed 000 4.d.iii."""
    return _masked(DivergenceMask(support_tv, delta=delta, delta_high=delta_high, top_k=False), aggregation)


def dppo_binary_kl(
    delta: float = 0.05, delta_high: float | None = None, aggregation: str = "seq-mean-token-sum"
) -> PolicyLoss:
    """DPPO with the KL of the sampled word against all others: seed 001 Eq. 4 with Eq. 29."""
    return _masked(DivergenceMask(support_kl, delta=delta, delta_high=delta_high, top_k=False), aggregation)


def dppo_topk_kl(
    delta: float = 0.15,
    delta_high: float | None = None,
    aggregation: str = "seq-mean-token-sum",
    include_sampled: bool = True,
) -> PolicyLoss:
    """DPPO-TopK-KL, the ratio's direction with the top-K KL: seed 001 Eq. 4-5."""
    return _top_k(support_kl, RatioDirection(), delta, delta_high, aggregation, include_sampled)


def dppo_topk_tv(
    delta: float = 0.15,
    delta_high: float | None = None,
    aggregation: str = "seq-mean-token-sum",
    include_sampled: bool = True,
) -> PolicyLoss:
    """DPPO-TopK-TV, the ratio's direction with the top-K TV: seed 001 Eq. 4, 35."""
    return _top_k(support_tv, RatioDirection(), delta, delta_high, aggregation, include_sampled)


def predictive_kl_agg(
    delta: float = 0.15,
    delta_high: float | None = None,
    aggregation: str = "seq-mean-token-sum",
    include_sampled: bool = True,
) -> PolicyLoss:
    """The predictive KL mask, its tail one word: seed 001 Eq. 10, 13-14."""
    return _top_k(support_kl, PredictiveKl("aggregated"), delta, delta_high, aggregation, include_sampled)


def predictive_kl_uni(
    delta: float = 0.15,
    delta_high: float | None = None,
    aggregation: str = "seq-mean-token-sum",
    include_sampled: bool = True,
) -> PolicyLoss:
    """The predictive KL mask, its tail spread evenly: seed 001 Eq. 11, 13-14."""
    return _top_k(support_kl, PredictiveKl("uniform"), delta, delta_high, aggregation, include_sampled)


def predictive_tv_agg(
    delta: float = 0.15,
    delta_high: float | None = None,
    aggregation: str = "seq-mean-token-sum",
    include_sampled: bool = True,
) -> PolicyLoss:
    """The predictive TV mask, its tail one word: seed 001 Eq. 37-38, 43."""
    return _top_k(support_tv, PredictiveTv("aggregated"), delta, delta_high, aggregation, include_sampled)


def predictive_tv_uni(
    delta: float = 0.15,
    delta_high: float | None = None,
    aggregation: str = "seq-mean-token-sum",
    include_sampled: bool = True,
) -> PolicyLoss:
    """The predictive TV mask, its tail spread evenly: seed 001 Eq. 39-43."""
    return _top_k(support_tv, PredictiveTv("uniform"), delta, delta_high, aggregation, include_sampled)


def _top_k(
    divergence: Divergence,
    direction: Direction,
    delta: float,
    delta_high: float | None,
    aggregation: str,
    include_sampled: bool,
) -> PolicyLoss:
    return _masked(
        DivergenceMask(divergence, direction, delta, delta_high, include_sampled=include_sampled), aggregation
    )


def _masked(mask: DivergenceMask, aggregation: str) -> PolicyLoss:
    """S = sg[M] r A: seed 001 Eq. 14. Without a clip, so the radii are not looked at."""
    return PolicyLoss(TokenRatio(), ConstantRadii(), Linear(), Reduce(aggregation), (mask,))


DIVERGENCE_RECIPES: dict[str, Callable[..., PolicyLoss]] = {
    "dppo": dppo,
    "dppo_tv": dppo_tv,
    "dppo_binary_kl": dppo_binary_kl,
    "dppo_topk_kl": dppo_topk_kl,
    "dppo_topk_tv": dppo_topk_tv,
    "predictive_kl_agg": predictive_kl_agg,
    "predictive_kl_uni": predictive_kl_uni,
    "predictive_tv_agg": predictive_tv_agg,
    "predictive_tv_uni": predictive_tv_uni,
}

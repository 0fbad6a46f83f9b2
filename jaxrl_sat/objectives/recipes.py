"""The named objectives, one line each: which function stands in which slot. The keywords are the config's keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxrl_sat.objectives.corrections import IcePop, KPop, MismatchTis, PolicyTis, RawMismatch, SeqClip
from jaxrl_sat.objectives.gates import Gate
from jaxrl_sat.objectives.policy_loss import PolicyLoss
from jaxrl_sat.objectives.quantile import Level
from jaxrl_sat.objectives.radii import ConstantRadii, SatRadii
from jaxrl_sat.objectives.ratio import SequenceRatio, TokenRatio
from jaxrl_sat.objectives.recipes_divergence import DIVERGENCE_RECIPES
from jaxrl_sat.objectives.reduce import Reduce
from jaxrl_sat.objectives.surrogate import Clip
from jaxrl_sat.objectives.unclipped import Cispo, Drpo, Reinforce, Spo, Up


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


def clip_higher(
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    aggregation: str = "token-mean",
    denominator: str = "behaviour",
) -> PolicyLoss:
    """GRPO with a wider upper radius: the baseline of seed 001, first in DAPO."""
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
    scope: str = "microbatch",
) -> PolicyLoss:
    """SAT on token ratios: seed 000 (3.1)-(3.6). `scope`: what the quantile is taken over, see `SatRadii`."""
    radii = SatRadii(eps_low, eps_high, quantile, exponent, q_floor, scope)
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
    scope: str = "microbatch",
) -> PolicyLoss:
    """SAT on the sequence ratio, broadcast to the active tokens before the quantile: seed 000 3.1 "GSPO scope"."""
    radii = SatRadii(eps_low, eps_high, quantile, exponent, q_floor, scope)
    return PolicyLoss(SequenceRatio(denominator, grad_mode), radii, Clip(), Reduce(aggregation))


def grpo_tis(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "token-mean",
    denominator: str = "recomputed",
    cap: float = 2.0,
    cap_low: float = 0.0,
) -> PolicyLoss:
    """GRPO on pi / mu~ times sg[clip(mu~ / mu, cap_low, cap)]: "GRPO w/ TIS" of seed 000 3.3, SPEC 8.2."""
    return _gated(ppo(eps_low, eps_high, aggregation, denominator), MismatchTis(cap, cap_low))


def gspo_tis(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "seq-mean-token-mean",
    denominator: str = "recomputed",
    grad_mode: str = "mean",
    cap: float = 2.0,
    cap_low: float = 0.0,
) -> PolicyLoss:
    """GSPO with the token weight of `grpo_tis` on its surrogate: "GSPO w/ TIS" of seed 000 3.3."""
    return _gated(gspo(eps_low, eps_high, aggregation, denominator, grad_mode), MismatchTis(cap, cap_low))


def tis(aggregation: str = "seq-mean-token-sum", denominator: str = "behaviour", cap: float = 2.0) -> PolicyLoss:
    """sg[min(r, cap)] A log pi, r = pi / mu: seed 000 Part 4, S_TIS (cap 5 for its Qwen runs); SPEC 8.1."""
    return PolicyLoss(TokenRatio(denominator), ConstantRadii(), Reinforce(), Reduce(aggregation), (PolicyTis(cap),))


def icepop(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "seq-mean-token-mean",
    denominator: str = "recomputed",
    alpha: float = 0.5,
    beta: float = 5.0,
    zero_one: bool = False,
) -> PolicyLoss:
    """The clip times k 1[alpha <= k <= beta], k = mu~ / mu: seed 000 Part 4, S_IcePop; SPEC 8.3 and 23 A4."""
    return _gated(ppo(eps_low, eps_high, aggregation, denominator), IcePop(alpha, beta, zero_one))


def kpop(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "seq-mean-token-mean",
    denominator: str = "recomputed",
    phi: float = 2.0,
    trainer: str = "recomputed",
) -> PolicyLoss:
    """The clip where both Bernoulli KLs between trainer and sampler are at most phi: seed 000 M^KPop, SPEC 8.4.

    The seed has no default for phi; 2.0 is a public implementation's.
    """
    return _gated(ppo(eps_low, eps_high, aggregation, denominator), KPop(phi, trainer))


def decoupled_ppo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "token-mean",
    denominator: str = "recomputed",
) -> PolicyLoss:
    """The clip on pi / mu~ times the raw weight mu~ / mu: the decoupled denominator of seed 000 4.a, SPEC 8.5."""
    return _gated(ppo(eps_low, eps_high, aggregation, denominator), RawMismatch())


def seqclip(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "seq-mean-token-mean",
    denominator: str = "behaviour",
    grad_mode: str = "mean",
    alpha: float = 0.995,
    beta: float = 1.005,
) -> PolicyLoss:
    """GSPO of the responses whose sequence ratio lies in [alpha, beta]: seed 000 Part 4, S_SeqClip; SPEC 7.2."""
    return _gated(gspo(eps_low, eps_high, aggregation, denominator, grad_mode), SeqClip(alpha, beta, denominator))


def up(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "token-mean",
    denominator: str = "behaviour",
) -> PolicyLoss:
    """Positive tokens without ratio or clip, negative ones with PPO's: seed 000 4.d.iv, SPEC 15."""
    return PolicyLoss(TokenRatio(denominator), ConstantRadii(eps_low, eps_high), Up(), Reduce(aggregation))


def cispo(
    eps_low: float = 1.0,
    eps_high: float = 0.28,
    aggregation: str = "token-mean",
    denominator: str = "behaviour",
) -> PolicyLoss:
    """The policy gradient times sg[clip(r)], by default without a lower bound: CISPO, seed 001 App. A, SPEC 15."""
    return PolicyLoss(TokenRatio(denominator), ConstantRadii(eps_low, eps_high), Cispo(), Reduce(aggregation))


def spo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    aggregation: str = "seq-mean-token-sum",
    denominator: str = "behaviour",
) -> PolicyLoss:
    """r A less a quadratic penalty whose optimum is the radius: seed 000 4.d.v, S_SPO; SPEC 15."""
    return PolicyLoss(TokenRatio(denominator), ConstantRadii(eps_low, eps_high), Spo(), Reduce(aggregation))


def drpo(aggregation: str = "seq-mean-token-sum", denominator: str = "behaviour", delta: float = 0.15) -> PolicyLoss:
    """r A less a quadratic penalty in probability, optimum mu + sign(A) delta: seed 000 4.d.v, S_DRPO; SPEC 15.

    The seed has no default for delta; 0.15 is the sampled-TV threshold of seed 001.
    """
    return PolicyLoss(TokenRatio(denominator), ConstantRadii(), Drpo(delta), Reduce(aggregation))


def _gated(base: PolicyLoss, gate: Gate) -> PolicyLoss:
    return dataclasses.replace(base, gates=(*base.gates, gate))


CLIP_RECIPES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo,
    "grpo": grpo,
    "clip_higher": clip_higher,
    "gspo": gspo,
    "sat_grpo": sat_grpo,
    "sat_gspo": sat_gspo,
    "grpo_tis": grpo_tis,
    "gspo_tis": gspo_tis,
    "tis": tis,
    "icepop": icepop,
    "kpop": kpop,
    "decoupled_ppo": decoupled_ppo,
    "seqclip": seqclip,
    "up": up,
    "cispo": cispo,
    "spo": spo,
    "drpo": drpo,
}

RECIPES: dict[str, Callable[..., PolicyLoss]] = {**CLIP_RECIPES, **DIVERGENCE_RECIPES}

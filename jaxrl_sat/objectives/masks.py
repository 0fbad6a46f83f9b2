"""Divergence masks: a token is dropped where it is too far out and its update leads further. Seed 001, SPEC 11-14."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_sat.objectives.direction import Direction, RatioDirection
from jaxrl_sat.objectives.divergence import FLOOR
from jaxrl_sat.objectives.evidence import Evidence
from jaxrl_sat.objectives.radii import check_radius
from jaxrl_sat.objectives.support import Support, reduced_support


@runtime_checkable
class Divergence(Protocol):
    """Support -> D(mu, pi) >= 0, [N, T]."""

    def __call__(self, support: Support) -> Float[Array, "N T"]: ...


def support_kl(support: Support) -> Float[Array, "N T"]:
    """sum_i mu_i log(mu_i / pi_i) + mu_tail log(mu_tail / pi_tail): seed 001 Eq. 5; Eq. 29, the binary KL, at K = 0.

    A lower bound of the full KL. mu_i = 0 contributes 0; pi_i = 0 < mu_i gives inf, which is above every threshold.
    """
    seen = jnp.where(support.mu > 0, support.mu * support.log_mu_over_pi, 0)
    unseen = support.mu_tail * jnp.log(support.mu_tail / support.pi_tail)
    return jnp.sum(seen, axis=-1) + jnp.where(support.has_tail, unseen, 0)


def support_tv(support: Support) -> Float[Array, "N T"]:
    """1/2 sum_i |mu_i - pi_i| + 1/2 |mu_tail - pi_tail|: seed 001 Eq. 35; |pi(y) - mu(y)| of seed 000 3.3 at K = 0.

    A lower bound of the full TV.
    """
    unseen = jnp.where(support.has_tail, jnp.abs(support.gap_tail), 0)
    return (jnp.sum(jnp.abs(support.gap), axis=-1) + unseen) / 2


class Verdict(NamedTuple):
    """What a mask decides from: D, the direction's number, whether D > delta, and whether the token is dropped."""

    divergence: Float[Array, "N T"]
    direction: Float[Array, "N T"]
    outside: Bool[Array, "N T"]
    drop: Bool[Array, "N T"]


@dataclasses.dataclass(frozen=True)
class DivergenceMask:
    """M = 0 iff sign(A x direction) > 0 and D > delta, else 1: seed 001 Eq. 4, 13, 43; seed 000 3.3, 4.d.iii.

    At D = delta, at a direction of 0 and at A = 0 a token is kept. `delta_high` is the threshold where A > 0 (None:
    `delta` for all). `top_k` False judges by the sampled token alone: K = 0, where `support_tv` is the sampled TV and
    `support_kl` the binary KL. `include_sampled` and `tail_floor`: see `reduced_support`.
    """

    divergence: Divergence
    direction: Direction = RatioDirection()
    delta: float = 0.15
    delta_high: float | None = None
    top_k: bool = True
    include_sampled: bool = True
    tail_floor: float = FLOOR

    def __post_init__(self) -> None:
        check_radius("delta", self.delta)
        if self.delta_high is not None:
            check_radius("delta_high", self.delta_high)

    @property
    def name(self) -> str:
        return "divergence"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"logp", "logp_mu", "tokens", "topk_ids"} if self.top_k else {"logp", "logp_mu"})

    def support(self, evidence: Evidence) -> Support:
        """The support this mask looks at (clean evidence)."""
        return reduced_support(evidence, self.top_k, self.include_sampled, self.tail_floor)

    def judge(self, support: Support, advantages: Float[Array, "N T"], log_ratio: Float[Array, "N T"]) -> Verdict:
        """Everything the mask decides from."""
        divergence, direction = self.divergence(support), self.direction(support, log_ratio)
        outside = divergence > self.threshold(advantages)
        return Verdict(divergence, direction, outside, outside & outward(advantages, direction))

    def threshold(self, advantages: Float[Array, "N T"]) -> Float[Array, "N T"]:
        """delta, or delta_high where A > 0."""
        high = self.delta if self.delta_high is None else self.delta_high
        return jnp.where(advantages > 0, high, self.delta).astype(advantages.dtype)

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        verdict = self.judge(self.support(evidence), evidence.advantages, log_ratio)
        return 1 - verdict.drop.astype(log_ratio.dtype)


def outward(advantages: Float[Array, "N T"], direction: Float[Array, "N T"]) -> Bool[Array, "N T"]:
    """sign(A) sign(direction) > 0: the update leads further out. By signs, so that a tiny product does not vanish."""
    return jnp.sign(advantages) * jnp.sign(direction) > 0

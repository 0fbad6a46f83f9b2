"""Which direction foresees what an update does? Decisions before it, the realised change after it. Seed 001 Sec. 4.2.

    record = direction_before(mask, evidence)        # at the weights before the update
    metrics = direction_after(mask, record, evidence)  # the same tokens, `logp` and `topk_logp` at the weights after it

Metrics hold sums and counts that add over microbatches, shards and updates. The pooled rates they end in are not means
of each update's rates; for those, take the pairs themselves and leave out an update whose count is 0.
"""

from __future__ import annotations

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxrl_sat.objectives.direction import direction_flips, kl_direction
from jaxrl_sat.objectives.evidence import Evidence, sanitise
from jaxrl_sat.objectives.masks import DivergenceMask, outward
from jaxrl_sat.objectives.metrics import Metrics, mean_over
from jaxrl_sat.objectives.ratio import TokenRatio


@no_type_check
@struct.dataclass
class DirectionRecord:
    """What is known of each token before the update: D, whether D > delta, and which rule keeps it. Detached.

    `keep_ratio` and `keep_predicted` are the mask's decisions by the sign of r - 1 and by that of the predicted change.
    All False, D 0, off the active set.
    """

    divergence: Float[Array, "N T"]
    active: Bool[Array, "N T"]
    outside: Bool[Array, "N T"]
    keep_ratio: Bool[Array, "N T"]
    keep_predicted: Bool[Array, "N T"]

    @property
    def disagree(self) -> Bool[Array, "N T"]:
        """Tokens outside the trust region that exactly one of the rules keeps."""
        return self.outside & (self.keep_ratio != self.keep_predicted)


def direction_before(mask: DivergenceMask, evidence: Evidence) -> DirectionRecord:
    """The decisions of `mask`, which has a predictive direction, and of the ratio's in its place: seed 001 Sec. 4.2."""
    clean, _ = sanitise(jax.lax.stop_gradient(evidence), mask.reads)
    log_ratio = TokenRatio()(clean)
    verdict = mask.judge(mask.support(clean), clean.advantages, log_ratio)
    return decisions(
        verdict.divergence,
        log_ratio,
        verdict.direction,
        clean.advantages,
        clean.mask,
        mask.threshold(clean.advantages),
    )


def decisions(
    divergence: Float[Array, "N T"],
    log_ratio: Float[Array, "N T"],
    direction: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    active: Bool[Array, "N T"],
    delta: Float[Array, "N T"] | float,
) -> DirectionRecord:
    """Both rules on tokens whose divergence and directions are at hand; what is off `active` may be anything."""
    divergence, log_ratio, direction, advantages = (
        jnp.where(active, x, 0) for x in (divergence, log_ratio, direction, advantages)
    )
    outside = active & (divergence > delta)
    return DirectionRecord(
        divergence=divergence,
        active=active,
        outside=outside,
        keep_ratio=active & ~(outside & outward(advantages, log_ratio)),
        keep_predicted=active & ~(outside & outward(advantages, direction)),
    )


def divergence_after(mask: DivergenceMask, record: DirectionRecord, evidence: Evidence) -> Float[Array, "N T"]:
    """D at the weights after the update, on the same support; D before it where a token is not active any more."""
    clean, _ = sanitise(jax.lax.stop_gradient(evidence), mask.reads)
    after = mask.divergence(mask.support(clean))
    return jnp.where(record.active & clean.mask, after, record.divergence)


def direction_after(mask: DivergenceMask, record: DirectionRecord, evidence: Evidence) -> Metrics:
    """How the two rules fared, D measured anew at the weights after the update: see `realised`."""
    return realised(record, divergence_after(mask, record, evidence))


def realised(record: DirectionRecord, divergence: Float[Array, "N T"]) -> Metrics:
    """With dD the change of D that the update brought: seed 001 Sec. 4.2, SPEC 18. As sums and counts:

        direction/outside               tokens with D > delta, of the active ones
        direction/disagree              tokens that exactly one rule keeps, of those outside
        direction/unsafe_keep_RULE      dD > 0, of the disagreement tokens that RULE keeps
        direction/contraction_RULE      dD < 0, of the same

    RULE is "ratio" or "predicted".
    """
    dtype = record.divergence.dtype
    change = jnp.where(record.active, divergence, 0) - record.divergence
    means = {
        "direction/outside": mean_over(record.outside, record.active, dtype),
        "direction/disagree": mean_over(record.disagree, record.outside, dtype),
    }
    for rule, keep in (("ratio", record.keep_ratio), ("predicted", record.keep_predicted)):
        kept = record.disagree & keep
        means[f"direction/unsafe_keep_{rule}"] = mean_over(change > 0, kept, dtype)
        means[f"direction/contraction_{rule}"] = mean_over(change < 0, kept, dtype)
    return Metrics(means=means)


def direction_counts(mask: DivergenceMask, evidence: Evidence) -> Metrics:
    """The disagreement condition, Eq. 15, by each model of the tail, and the divergence it is about: SPEC 18.

        divergence/mean                 D of the mask, over the active tokens (finite ones)
        divergence/outside              D > delta
        direction/eq15_TAIL             Eq. 15 holds, of the active tokens
        direction/eq15_TAIL_outside     Eq. 15 holds, of those with D > delta

    TAIL is "aggregated" and, where the size of the vocabulary is known, "uniform". Whatever the mask's own direction.
    """
    clean, _ = sanitise(jax.lax.stop_gradient(evidence), mask.reads)
    support, dtype = mask.support(clean), clean.logp.dtype
    divergence = mask.divergence(support)
    outside = clean.mask & (divergence > mask.threshold(clean.advantages))
    means = {
        "divergence/mean": mean_over(divergence, clean.mask & jnp.isfinite(divergence), dtype),
        "divergence/outside": mean_over(outside, clean.mask, dtype),
    }
    for tail in ("aggregated", "uniform") if support.vocab_size else ("aggregated",):
        flips = direction_flips(kl_direction(support, tail))
        means[f"direction/eq15_{tail}"] = mean_over(flips, clean.mask, dtype)
        means[f"direction/eq15_{tail}_outside"] = mean_over(flips, outside, dtype)
    return Metrics(means=means)

"""avg@k and pass@k over problems with 95% intervals, and the paired comparison of two models.

Responses to one problem are not independent, so a problem is what counts as one observation: a mean over problems has
the standard error of its problems' values, sd / sqrt(problems), which holds whatever happens within a problem. The
interval is Wilson's score interval at the number of observations that would have this standard error,
value (1 - value) / error^2, with Student's t for the error's own uncertainty: inside [0, 1], and of the right coverage
where few problems are ever solved, where value +- t error and the bootstrap are far too short (docs/evaluation.md).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit

CONFIDENCE = 0.95
EXACT_FLIPS = 16
"""Up to so many problems that differ, the sign test goes through every pattern of signs."""
RANDOM_FLIPS = 100_000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over problems, 0 to 1, and its 95% interval, which need not have it in the middle."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2


def ks(samples: int) -> list[int]:
    """The k of pass@k that `samples` responses a problem give: 1, 2, 4, ... and `samples` itself."""
    return [*(1 << i for i in range((samples - 1).bit_length())), samples]


def avg_at_k(right: Bool[np.ndarray, "P n"]) -> Estimate:
    """Share of right responses, averaged over problems; k is n, all that were sampled."""
    return _estimate(right.mean(axis=1), right.shape[1])


def pass_at_k(right: Bool[np.ndarray, "P n"], k: int) -> Estimate:
    """Chance that k responses hold a right one, averaged over problems; see `solved_by`."""
    return _estimate(solved_by(right, k), right.shape[1] / k)


def metrics(name: str, right: Bool[np.ndarray, "P n"]) -> dict[str, float]:
    """What a run logs of the set `name`: avg@n and pass@n, each with half the length of its interval as _ci."""
    samples = right.shape[1]
    found = {f"avg_at_{samples}": avg_at_k(right), f"pass_at_{samples}": pass_at_k(right, samples)}
    values = {f"eval/{name}/{measure}": one.value for measure, one in found.items()}
    return values | {f"eval/{name}/{measure}_ci": one.half_width for measure, one in found.items()}


def solved_by(right: Bool[np.ndarray, "P n"], k: int) -> Float[np.ndarray, " P"]:
    """Of each problem with c of n responses right, 1 - C(n - c, k) / C(n, k): the share of k of them with a right one.

    Unbiased (Chen et al. 2021). Raises ValueError for k outside 1..n.
    """
    samples = right.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; from 1 to {samples}, the responses a problem")
    of_count = [1.0 - math.comb(samples - count, k) / math.comb(samples, k) for count in range(samples + 1)]
    return np.asarray(of_count)[right.sum(axis=1)]


def _estimate(values: Float[np.ndarray, " P"], most: int | float) -> Estimate:
    """`most`: observations that a problem may count for."""
    problems, value = len(values), float(values.mean())
    if problems < 2:
        return Estimate(value, 0.0, 1.0)
    error = float(values.std(ddof=1)) / math.sqrt(problems)
    # Where all are wrong, or all right, nothing is known of how alike the responses to a problem are.
    count = float(problems)
    if 0 < value < 1:
        count = problems * most if error == 0 else min(value * (1 - value) / error**2, problems * most)
    t = _t(problems)
    scale = 1 + t * t / count
    middle = (value + t * t / (2 * count)) / scale
    half = t / scale * math.sqrt(max(value * (1 - value), 0.0) / count + (t / (2 * count)) ** 2)
    return Estimate(value, max(0.0, min(value, middle - half)), min(1.0, max(value, middle + half)))


def _t(problems: int) -> float:
    return float(stdtrit(problems - 1, (1 + CONFIDENCE) / 2))


# ------------------------------------------------------------------------------------------------- two models


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean over problems of the second model's value minus the first's, its 95% interval, and the p-value of none."""

    change: float
    low: float
    high: float
    p: float


def difference(one: Float[np.ndarray, " P"], other: Float[np.ndarray, " P"], step: float) -> Difference:
    """Of each problem's values by two models, paired: `other` minus `one`.

    The interval is mean +- t sd / sqrt(P); `step` is what one response is worth, and the spread is taken for at least
    that of one step on one problem. p is two-sided, by flipping the signs of the problems' differences.
    """
    differences = other - one
    problems, value = len(differences), float(differences.mean())
    if problems < 2:
        return Difference(value, -1.0, 1.0, 1.0)
    spread = max(float(differences.std(ddof=1)), step / math.sqrt(problems))
    half = _t(problems) * spread / math.sqrt(problems)
    return Difference(value, max(-1.0, value - half), min(1.0, value + half), sign_flip_p(differences))


def sign_flip_p(differences: Float[np.ndarray, " P"]) -> float:
    """How often the sum of differences with random signs is as far from 0 as that found: a permutation test.

    Exact for up to `EXACT_FLIPS` that are not 0, else from `RANDOM_FLIPS` draws of a fixed seed, that found among them.
    """
    sizes = np.abs(differences[differences != 0])
    found = abs(float(differences.sum())) - 1e-9
    if len(sizes) <= EXACT_FLIPS:
        patterns: Int[np.ndarray, "F D"] = np.arange(1 << len(sizes))[:, None] >> np.arange(len(sizes)) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ sizes) >= found))
    rng, reached, chunk = np.random.default_rng(0), 1, 1000
    for _ in range(RANDOM_FLIPS // chunk):
        signs = 2.0 * rng.integers(0, 2, (chunk, len(sizes))) - 1
        reached += int(np.sum(np.abs(signs @ sizes) >= found))
    return reached / (RANDOM_FLIPS + 1)

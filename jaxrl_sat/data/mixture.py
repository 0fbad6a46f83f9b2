"""Which problem stands where in the endless sequence that updates are cut from: pure functions of seed and position.

Several sources with weights share the sequence. A balanced one gives every update the sources in fixed proportions;
otherwise an epoch, as long as all problems together, has them in their proportions and is shuffled as a whole. Either
way a source's own problems come in an order reshuffled each time round, so that all of them have their turn before any
has its next.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import grain
import numpy as np
from jaxtyping import Int


def proportions(sizes: Sequence[int], weights: Sequence[float | None]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the sources' weights, as their decimals have them, or of their sizes without."""
    exact = [Fraction(size if weight is None else str(weight)) for size, weight in zip(sizes, weights, strict=True)]
    common = math.lcm(*(share.denominator for share in exact))
    return tuple(int(share * common) for share in exact)


def apportion(seats: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Largest remainder: the whole numbers that sum to `seats`, in the proportions `shares`; ties to the first."""
    total = sum(shares)
    counts = [seats * share // total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: -(seats * shares[i] % total))
    for i in by_remainder[: seats - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def before(update: int, block: int, shares: Sequence[int]) -> tuple[int, ...]:
    """How many places each source has in all updates of `block` places before `update`.

    Each update has the whole part of every source's share of it; the places that are left go round, in the long run in
    proportion to what the sources are short of.
    """
    total = sum(shares)
    whole = [block * share // total for share in shares]
    round_robin = _first_of(update * (block - sum(whole)), [block * share % total for share in shares])
    return tuple(update * count + more for count, more in zip(whole, round_robin, strict=True))


def _first_of(length: int, shares: Sequence[int]) -> list[int]:
    """How many of the first `length` places each source has; no count ever falls as `length` grows.

    Rounded source by source, the largest first, within what those before it left.
    """
    counts, left, total = [0] * len(shares), length, sum(shares)
    for i in sorted(range(len(shares)), key=lambda i: -shares[i]):
        rest = left * (total - shares[i]) // total if total else 0
        counts[i] = left - rest
        left, total = rest, total - shares[i]
    return counts


class _Mixture:
    """A source for Grain: the index of the problem at each place, from each source's own order."""

    def __init__(self, members: Sequence[Int[np.ndarray, " _"]], shares: Sequence[int], seed: int):
        self._members, self._shares, self._seed = list(members), tuple(shares), seed
        seeds = np.random.SeedSequence(seed).generate_state(len(members))
        self._orders: list[Any] = [_shuffled(len(m), int(s)) for m, s in zip(members, seeds, strict=True)]

    def __len__(self) -> int:
        return sys.maxsize

    def _problem(self, place: int, earlier: Sequence[int], counts: Sequence[int]) -> int:
        """The problem at `place` of a stretch with `counts` of each source, behind `earlier` of each."""
        for source, count in enumerate(counts):
            if place < count:
                return int(self._members[source][self._orders[source][earlier[source] + place]])
            place -= count
        raise IndexError(place)


class Shuffled(_Mixture):
    """Epochs as long as all problems together, each source in its proportion of them (largest remainder)."""

    def __init__(self, members: Sequence[Int[np.ndarray, " _"]], shares: Sequence[int], seed: int):
        super().__init__(members, shares, seed)
        self._length = sum(map(len, members))
        self._counts = apportion(self._length, shares)
        self._places: Any = _shuffled(self._length, seed)

    def __getitem__(self, index: int) -> int:
        epoch = index // self._length
        return self._problem(int(self._places[index]), [epoch * count for count in self._counts], self._counts)


class Balanced(_Mixture):
    """Updates of `block` places, each with the sources in their proportions, in an order of the update's own."""

    def __init__(self, members: Sequence[Int[np.ndarray, " _"]], shares: Sequence[int], seed: int, block: int):
        super().__init__(members, shares, seed)
        self._block = block

    def __getitem__(self, index: int) -> int:
        update, place = divmod(index, self._block)
        earlier, later = (before(u, self._block, self._shares) for u in (update, update + 1))
        counts = [b - a for a, b in zip(earlier, later, strict=True)]
        return self._problem(int(_places(self._seed, update, self._block)[place]), earlier, counts)


def order(
    sources: Mapping[str, Int[np.ndarray, " _"]], weights: Mapping[str, float], seed: int, block: int, balanced: bool
) -> Any:
    """Grain's endless data set of the problems' indices, updates of `block` places one behind the other.

    `sources`: the indices of each source's problems. `weights`: shares of prompts by source; where there are none the
    problems of all sources are shuffled as one set.
    """
    members = list(sources.values())
    if len(members) == 1 or not (weights or balanced):
        return _shuffled(sum(map(len, members)), seed)
    shares = proportions([len(m) for m in members], [weights.get(name) for name in sources])
    mixture = Balanced(members, shares, seed, block) if balanced else Shuffled(members, shares, seed)
    return grain.MapDataset.source(mixture)


def _shuffled(size: int, seed: int) -> Any:
    return grain.MapDataset.range(size).seed(seed).shuffle().repeat()


@functools.lru_cache(maxsize=8)
def _places(seed: int, update: int, block: int) -> Int[np.ndarray, " block"]:
    return np.random.default_rng((seed, update)).permutation(block)

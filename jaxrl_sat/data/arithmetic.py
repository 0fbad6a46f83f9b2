"""Arithmetic problems without words: "12+34" with the answer "46", in five levels.

The whole space is small enough to write down, so a split is a property of the problem and not of a draw: the hash of
the unordered pair of operands decides, whatever the operator and the level. Then neither b+a nor a-b nor a*b of a
training problem is ever asked in evaluation.

    level 1  sums and differences below 20          3+14, 5-9
    level 2  two digits with one digit              47+8, 3-52
    level 3  two digits with two digits             61+78, 40-17
    level 4  products of one digit with up to two   7*36, 81*4
    level 5  three digits with two digits           305+48, 71-960
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int

NAME = "arithmetic"
"""What `data.path` calls the set, and what metrics call it."""
SIZES = {"train": 14_000, "test": 1_000}
"""Problems in each split of the set as it is stored."""
SPLITS = ("train", "test")
LEVELS = (1, 2, 3, 4, 5)
MIX = (0.04, 0.2, 0.5, 0.06, 0.2)
"""Share of each level in a set. Level 1 is a few hundred problems in all, so it cannot have more."""
TEST_EIGHTHS = 1
"""How many eighths of the operand pairs are held out."""
OPERATORS = "+-*"


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem as it is stored: `prompt` is what the user asks, `answer` what the verifier compares with."""

    prompt: str
    answer: str
    level: int


@dataclasses.dataclass(frozen=True)
class Space:
    """Problems as columns. `operator` indexes `OPERATORS`."""

    a: Int[np.ndarray, " n"]
    b: Int[np.ndarray, " n"]
    operator: Int[np.ndarray, " n"]
    level: Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, index: int) -> Problem:
        a, b, operator = int(self.a[index]), int(self.b[index]), int(self.operator[index])
        value = (a + b, a - b, a * b)[operator]
        return Problem(f"{a}{OPERATORS[operator]}{b}", str(value), int(self.level[index]))

    def take(self, index: Int[np.ndarray, " m"] | Bool[np.ndarray, " n"]) -> Space:
        """The rows that `index` names, in its order."""
        return Space(self.a[index], self.b[index], self.operator[index], self.level[index])


def held_out(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Whether the unordered pair {a, b} belongs to the test split: the splitmix64 hash of (min, max), top 3 bits."""
    x = np.minimum(a, b).astype(np.uint64) << np.uint64(32) | np.maximum(a, b).astype(np.uint64)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(61)) < TEST_EIGHTHS


def _ordered_pairs(first: range, second: range) -> Int[np.ndarray, "n 2"]:
    """Every (a, b) and (b, a) with a in `first` and b in `second`, each once."""
    a, b = np.meshgrid(np.array(first), np.array(second), indexing="ij")
    pairs = np.stack([a.ravel(), b.ravel()], axis=1)
    return np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)


def space() -> Space:
    """Every problem there is, ordered by level. About 350 thousand; no problem stands twice."""
    operands = {
        1: (_ordered_pairs(range(20), range(20)), "+-"),
        2: (_ordered_pairs(range(20, 100), range(10)), "+-"),
        3: (_ordered_pairs(range(20, 100), range(10, 100)), "+-"),
        4: (_ordered_pairs(range(2, 10), range(2, 100)), "*"),
        5: (_ordered_pairs(range(100, 1000), range(10, 100)), "+-"),
    }
    columns = []
    for level, (pairs, operators) in operands.items():
        for operator in operators:
            code = np.full(len(pairs), OPERATORS.index(operator))
            columns.append(np.column_stack([pairs, code, np.full(len(pairs), level)]))
    a, b, operator, level = np.concatenate(columns).T
    return Space(a, b, operator, level)


def split_space(split: str) -> Space:
    """Every problem of one split, "train" or "test"."""
    everything = space()
    return everything.take(held_out(everything.a, everything.b) == (split == "test"))


def problems(split: str, size: int, seed: int) -> Iterator[Problem]:
    """About `size` different problems of a split, level by level in the shares of `MIX`; the seed decides which.

    A level that has fewer problems than its share gives all it has.
    """
    everything = split_space(split)
    rng = np.random.default_rng((seed, SPLITS.index(split)))
    for level, share in zip(LEVELS, MIX, strict=True):
        rows = rng.permutation(np.flatnonzero(everything.level == level))
        for row in rows[: round(share * size)]:
            yield everything[int(row)]

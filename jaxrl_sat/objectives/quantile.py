"""The empirical quantile of SAT as an exact order statistic: seed 000 (3.3)."""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_sat.objectives.checks import expect
from jaxrl_sat.types import InputError

MAX_DENOMINATOR = 40_000  # its square fits int32, so k below never overflows

Level = Fraction | str | float | int


def parse_level(level: Level) -> Fraction:
    """The quantile level as an exact fraction: 0.9, "0.90", "9/10" and Fraction(9, 10) are the same level.

    Raises:
      InputError: not a number in (0, 1], or one that needs a denominator over 40000.
    """
    try:
        given = Fraction(str(level))
    except (ValueError, ZeroDivisionError):
        raise InputError(f"quantile: {level!r} is not a number in (0, 1]") from None
    exact = given.limit_denominator(MAX_DENOMINATOR)
    if not 0 < given <= 1 or not math.isclose(exact, given, rel_tol=1e-12):
        raise InputError(f"quantile: {level!r} is not a number in (0, 1] with at most four decimals")
    return exact


def order_index(count: Int[Array, "*b"], level: Fraction) -> Int[Array, "*b"]:
    """k = ceil(level * count), in integers: a product in float32 is wrong for large counts.

    With count = a den + b, level = num/den: k = num a + ceil(num b / den), where no term exceeds int32.
    """
    num, den = level.numerator, level.denominator
    return num * (count // den) + (num * (count % den) + den - 1) // den


def lower_quantile(values: Float[Array, "*shape"], active: Bool[Array, "*shape"], level: Level) -> Float[Array, ""]:
    """q = inf{x >= 0 : F(x) >= level}, F the empirical CDF of `values` (>= 0) over `active`; 0 if none is active.

    Seed 000 (3.3): the k-th smallest value with k = ceil(level N), never interpolated (NumPy's "inverted_cdf").
    Detached.
    """
    expect("values", values, values.shape, jnp.floating)
    expect("active", active, values.shape, jnp.bool_)
    return kth_smallest(jax.lax.stop_gradient(values), active, order_index(jnp.sum(active), parse_level(level)))


@jax.jit
def kth_smallest(values: Float[Array, "*shape"], active: Bool[Array, "*shape"], k: Int[Array, ""]) -> Float[Array, ""]:
    """The k-th smallest (k from 1) of the non-negative `values` where `active`; 0 where k is 0.

    Not by sorting: the answer's bits are found from the highest down, by counting the values below a candidate, since
    the bit patterns of non-negative floats are ordered as the floats are. That is exact, and across a mesh it moves
    one count a bit where a sort would move every token.
    """
    bits = 8 * values.dtype.itemsize
    integer = jnp.dtype(f"int{bits}")
    patterns = jax.lax.bitcast_convert_type(jnp.abs(jnp.where(active, values, 0)), integer)

    def next_bit(i: Int[Array, ""], found: Int[Array, ""]) -> Int[Array, ""]:
        candidate = found | (jnp.ones((), integer) << jnp.asarray(bits - 2 - i, integer))
        return jnp.where(jnp.sum(active & (patterns < candidate)) < k, candidate, found)

    found = jax.lax.fori_loop(0, bits - 1, next_bit, jnp.zeros((), integer))
    return jnp.where(k > 0, jax.lax.bitcast_convert_type(found, values.dtype), 0)


def turn_quantiles(
    values: Float[Array, "*shape"],
    active: Bool[Array, "*shape"],
    turn_ids: Int[Array, "*shape"],
    num_turns: int,
    level: Level,
    min_turn_tokens: int = 1,
) -> Float[Array, " num_turns"]:
    """q_k over the active tokens of each turn k = 0 .. num_turns - 1: seed 000 Part 5, SPEC 6.7.

    A turn with fewer than `min_turn_tokens` active tokens takes the pooled q.
    """
    expect("turn_ids", turn_ids, values.shape, jnp.integer)
    pooled = lower_quantile(values, active, level)

    def of_turn(turn: Int[Array, ""]) -> Float[Array, ""]:
        inside = active & (turn_ids == turn)
        own = lower_quantile(values, inside, level)
        return jnp.where(jnp.sum(inside) < min_turn_tokens, pooled, own)

    return jax.vmap(of_turn)(jnp.arange(num_turns, dtype=turn_ids.dtype))

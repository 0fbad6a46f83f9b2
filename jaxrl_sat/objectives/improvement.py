"""What the surrogate is worth: two lower bounds on the improvement, and what one ascent step does to a ratio."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

Number = Float[Array, "*b"] | float | int


def mean_tv_bound(gain: Number, reward_max: Number, tv_sum: Number) -> Number:
    """J(pi) - J(mu) >= L' - 4 xi TV_bar: seed 000 (2.3), 4.d.i.

    `gain` L' = E_mu[R sum_t (r_t - 1)], `reward_max` xi = max |R|, `tv_sum` TV_bar = E_mu[sum_t TV(mu, pi)[s_t]].
    """
    return gain - 4 * reward_max * tv_sum


def max_tv_bound(gain: Number, reward_max: Number, horizon: Number, tv_max: Number) -> Number:
    """J(pi) - J(mu) >= L' - 2 xi T (T - 1) TV_max^2: seed 000 4.d.i.

    `horizon` T is the most tokens a response has, `tv_max` the largest TV(mu, pi)[s] of any state.
    """
    return gain - 2 * reward_max * horizon * (horizon - 1) * tv_max**2


def one_step_ratio(
    ratio: Float[Array, "*b"], advantages: Float[Array, "*b"], low_end: Number, high_end: Number, step: float
) -> Float[Array, "*b"]:
    """r + eta dS/dr for S the surrogate clipped to [low_end, high_end]: seed 000 3.2, "one-step ratio dynamics".

    dS/dr = A where kept. Dropped, hence left where it is: A > 0 and r above the window, A < 0 and r below it.
    """
    drop = ((advantages > 0) & (ratio > high_end)) | ((advantages < 0) & (ratio < low_end))
    return ratio + step * jnp.where(drop, 0, advantages)

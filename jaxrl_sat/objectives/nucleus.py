"""Replay of the sampler's top-p nucleus: log pi on the words that could have been drawn. Seed 000 Part 4, SPEC 9.

    log pi~(y) = log pi(y) - log sum_{w in nucleus} pi(w),        d log pi~(y) / d logits = onehot(y) - pi~

A token without a record keeps the full support. Rounding can leave y out of its own record: `force_sampled` puts it
back in (slime's rule), else log pi~(y) = -inf and the token is dropped as non-finite. mu must be renormalised alike.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_sat.objectives.checks import expect
from jaxrl_sat.objectives.entropy import log_softmax_on


def nucleus_log_softmax(
    logits: Float[Array, "*b V"],
    keep: Bool[Array, "*b V"],
    sampled: Int[Array, " *b"],
    force_sampled: bool = True,
) -> Float[Array, "*b V"]:
    """The dense form: log pi~ of every word, -inf off the nucleus `keep`. A row without a word is no record."""
    expect("keep", keep, logits.shape, jnp.bool_)
    expect("sampled", sampled, logits.shape[:-1], jnp.integer)
    is_sampled = jnp.arange(logits.shape[-1]) == sampled[..., None]
    support = keep | is_sampled if force_sampled else keep
    return log_softmax_on(logits, support | ~jnp.any(keep, axis=-1, keepdims=True))


def renormalised(
    logp: Float[Array, "N T"],
    nucleus_logp: Float[Array, "N T C"],
    nucleus_ids: Int[Array, "N T C"],
    tokens: Int[Array, "N T"],
    force_sampled: bool = True,
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """(log pi~(y), log of the nucleus's mass under pi) from log pi of y and of the recorded ids: the sparse form.

    `nucleus_ids` are distinct, -1 where a slot is unused; what `nucleus_logp` holds there has no influence. All -1,
    or C = 0: no record, so log pi(y) itself and a log mass of 0. Differentiable in `logp` and `nucleus_logp`. NaN or
    +inf in a used slot makes both results NaN with gradient 0, so that the token is dropped and counted.
    """
    words = (*logp.shape, *nucleus_ids.shape[-1:])
    expect("nucleus_ids", nucleus_ids, words, jnp.integer)
    expect("nucleus_logp", nucleus_logp, words, jnp.floating)
    expect("tokens", tokens, logp.shape, jnp.integer)
    used = nucleus_ids >= 0
    recorded = jnp.any(used, axis=-1)
    inside = jnp.any(used & (nucleus_ids == tokens[..., None]), axis=-1)
    broken = jnp.any(used & (jnp.isnan(nucleus_logp) | (nucleus_logp == jnp.inf)), axis=-1)
    forced = recorded & ~inside & force_sampled
    terms = jnp.concatenate([nucleus_logp, logp[..., None]], axis=-1)
    on = jnp.concatenate([used, forced[..., None]], axis=-1) & jnp.isfinite(terms) & ~broken[..., None]
    highest = jnp.max(jnp.where(on, jax.lax.stop_gradient(terms), -jnp.inf), axis=-1)
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    total = jnp.sum(jnp.where(on, jnp.exp(jnp.where(on, terms - highest[..., None], 0)), 0), axis=-1)
    log_mass = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + highest, -jnp.inf)
    log_mass = jnp.where(broken, jnp.nan, jnp.where(recorded, log_mass, 0))
    finite = jnp.isfinite(log_mass)
    on_nucleus = jnp.where(finite, logp - jnp.where(finite, log_mass, 0), log_mass)
    return jnp.where(recorded & ~inside & ~forced, -jnp.inf, on_nucleus), log_mass

"""Log-probabilities and entropy of logits on a support, for users and tests: SPEC 9, 16.

The learner's own come from the model's head, which never holds the logits of a whole batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_sat.objectives.checks import expect


def log_softmax_on(logits: Float[Array, "*b V"], support: Bool[Array, "*b V"]) -> Float[Array, "*b V"]:
    """log softmax over the words of `support`, -inf on the others; their logits reach neither value nor gradient.

    A logit of -inf is a probability of 0. A row with NaN or +inf on its support is NaN throughout, with gradient 0, so
    that `sanitise` drops and counts its token.
    """
    expect("logits", logits, logits.shape, jnp.floating)
    expect("support", support, logits.shape, jnp.bool_)
    broken = jnp.any(support & (jnp.isnan(logits) | (logits == jnp.inf)), axis=-1, keepdims=True)
    on = support & (logits > -jnp.inf) & ~broken
    highest = jnp.max(jnp.where(on, jax.lax.stop_gradient(logits), -jnp.inf), axis=-1, keepdims=True)
    z = jnp.where(on, logits - jnp.where(jnp.isfinite(highest), highest, 0), 0)
    total = jnp.sum(jnp.where(on, jnp.exp(z), 0), axis=-1, keepdims=True)
    logp = jnp.where(on, z - jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    return jnp.where(broken, jnp.nan, logp)


def entropy(logits: Float[Array, "*b V"], support: Bool[Array, "*b V"] | None = None) -> Float[Array, " *b"]:
    """H = -sum p log p in nats, p = softmax over `support` (None: every word), 0 log 0 = 0: SPEC 16.

    dH/dz = -p (log p + H) on the support, 0 off it. A row without support has H = 0, a broken one NaN with gradient 0
    (see `log_softmax_on`).
    """
    logp = log_softmax_on(logits, jnp.ones(logits.shape, bool) if support is None else support)
    finite = jnp.isfinite(logp)
    held = jnp.where(finite, logp, 0)
    total = -jnp.sum(jnp.where(finite, jnp.exp(held) * held, 0), axis=-1)
    return jnp.where(jnp.any(jnp.isnan(logp), axis=-1), jnp.nan, total)

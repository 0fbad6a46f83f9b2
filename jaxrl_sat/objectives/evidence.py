"""What an objective looks at: log-probabilities, advantages and the active set, cleaned before any arithmetic.

Masked positions may hold NaN, infinities or any number. They must reach neither value nor gradient, so every field is
replaced by 0 off the active set *first*: a `where` on the result alone leaves NaN in the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

PER_TOKEN = ("logp", "logp_mu", "logp_old", "logp_ref", "advantages", "entropy", "mask", "segment_ids")


@no_type_check  # a pytree also holds tracers of other ranks, shardings and shape structs; `sanitise` checks shapes
@struct.dataclass
class Evidence:
    """One microbatch of packed rows, as an objective sees it. Gradients flow from `logp` (and `entropy`) alone.

    `logp` is the current policy, `logp_mu` the behaviour policy as the sampler recorded it, `logp_old` the trainer's
    recomputation at the weights that sampled, `logp_ref` the frozen reference. A caller that does not use one of the
    last two passes `logp_mu` and `logp`. `segment_ids` numbers the responses of a row from 1 to `num_segments`
    (static); 0 is padding. Unpacked rows: all ones, `num_segments` 1.
    """

    logp: Float[Array, "N T"]
    logp_mu: Float[Array, "N T"]
    logp_old: Float[Array, "N T"]
    logp_ref: Float[Array, "N T"]
    advantages: Float[Array, "N T"]
    entropy: Float[Array, "N T"]
    mask: Bool[Array, "N T"]
    segment_ids: Int[Array, "N T"]
    num_segments: int = struct.field(pytree_node=False, default=1)


def make_evidence(
    logp: Float[Array, "N T"],
    logp_mu: Float[Array, "N T"],
    advantages: Float[Array, "N T"] | Float[Array, " N"],
    mask: Bool[Array, "N T"],
    *,
    logp_old: Float[Array, "N T"] | None = None,
    logp_ref: Float[Array, "N T"] | None = None,
    entropy: Float[Array, "N T"] | None = None,
    segment_ids: Int[Array, "N T"] | None = None,
    num_segments: int = 1,
) -> Evidence:
    """Evidence with what is not given filled in: an unused field by its neighbour, `segment_ids` by one a row.

    An advantage a response, [N], is broadcast over its row.
    """
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], logp.shape)
    return Evidence(
        logp=logp,
        logp_mu=logp_mu,
        logp_old=logp_mu if logp_old is None else logp_old,
        logp_ref=jax.lax.stop_gradient(logp) if logp_ref is None else logp_ref,
        advantages=advantages,
        entropy=jnp.zeros_like(logp) if entropy is None else entropy,
        mask=mask,
        segment_ids=jnp.ones(logp.shape, jnp.int32) if segment_ids is None else segment_ids,
        num_segments=num_segments,
    )


def sanitise(evidence: Evidence, reads: Iterable[str]) -> tuple[Evidence, Int[Array, ""]]:
    """The same evidence on its active set, 0 elsewhere, and the number of active tokens dropped as non-finite.

    T_act = mask and segment > 0 and every field in `reads` finite (SPEC 1, "Active set"). The returned `mask` is
    T_act. Everything but `logp` and `entropy` is detached. Fields not in `reads` are cleaned but not required finite.

    Raises:
      ValueError: a field whose shape differs from that of `logp`, or `logp` not of rank 2.
    """
    shape = evidence.logp.shape
    for name in PER_TOKEN:
        if len(shape) != 2 or getattr(evidence, name).shape != shape:
            raise ValueError(f"evidence.{name} has shape {getattr(evidence, name).shape}; expected [N, T] like {shape}")
    wanted = evidence.mask & (evidence.segment_ids > 0)
    active = wanted
    for name in sorted(reads):
        active = active & jnp.isfinite(getattr(evidence, name))
    constant = jax.lax.stop_gradient
    clean = dataclasses.replace(
        evidence,
        logp=_on(active, evidence.logp),
        logp_mu=constant(_on(active, evidence.logp_mu)),
        logp_old=constant(_on(active, evidence.logp_old)),
        logp_ref=constant(_on(active, evidence.logp_ref)),
        advantages=constant(_on(active, evidence.advantages)),
        entropy=_on(active, evidence.entropy),
        mask=active,
    )
    return clean, jnp.sum(wanted & ~active)


def _on(active: Bool[Array, "N T"], values: Float[Array, "N T"]) -> Float[Array, "N T"]:
    return jnp.where(active, values, 0)

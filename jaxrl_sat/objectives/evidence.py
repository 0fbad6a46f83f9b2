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

from jaxrl_sat.objectives.checks import expect

PER_TOKEN = (
    "logp",
    "logp_mu",
    "logp_old",
    "logp_ref",
    "advantages",
    "entropy",
    "mask",
    "segment_ids",
    "turn_ids",
    "tokens",
)
PER_CHOICE = ("topk_ids", "topk_logp", "topk_logp_mu")


@no_type_check
@struct.dataclass
class UpdateScale:
    """What a first pass over the whole update found: each token's detached log r, and the reference scale q of all.

    `q` is one number, or one a turn [num_turns]. SAT with scope "update" takes both from here, so that the gate
    compares the very values the quantile is of, however the update is cut.
    """

    log_ratio: Float[Array, "N T"]
    q: Float[Array, ""] | Float[Array, " num_turns"]


@no_type_check  # a pytree also holds tracers of other ranks, shardings and shape structs; `sanitise` checks shapes
@struct.dataclass
class Evidence:
    """One microbatch of packed rows, as an objective sees it. Gradients flow from `logp` (and `entropy`) alone.

    `logp` is the current policy, `logp_mu` the behaviour policy as the sampler recorded it, `logp_old` the trainer's
    recomputation at the weights that sampled, `logp_ref` the frozen reference. A caller that does not use one of the
    last two passes `logp_mu` and `logp`. `segment_ids` numbers the responses of a row from 1 to `num_segments`
    (static); 0 is padding. Unpacked rows: all ones, `num_segments` 1. `turn_ids` runs from 0 to `num_turns` - 1.

    `topk_ids` are the K most likely words under mu, -1 where a slot has none; `topk_logp_mu` and `topk_logp` are log mu
    and log pi on them, -inf where the sampler's nucleus left a word out. They feed masks alone, beside the sampled
    `tokens`; K may be 0. `update_scale` is there when the objective measures the whole update first.
    """

    logp: Float[Array, "N T"]
    logp_mu: Float[Array, "N T"]
    logp_old: Float[Array, "N T"]
    logp_ref: Float[Array, "N T"]
    advantages: Float[Array, "N T"]
    entropy: Float[Array, "N T"]
    mask: Bool[Array, "N T"]
    segment_ids: Int[Array, "N T"]
    turn_ids: Int[Array, "N T"]
    tokens: Int[Array, "N T"]
    topk_ids: Int[Array, "N T K"]
    topk_logp: Float[Array, "N T K"]
    topk_logp_mu: Float[Array, "N T K"]
    update_scale: UpdateScale | None = None
    num_segments: int = struct.field(pytree_node=False, default=1)
    num_turns: int = struct.field(pytree_node=False, default=1)
    vocab_size: int = struct.field(pytree_node=False, default=0)


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
    turn_ids: Int[Array, "N T"] | None = None,
    num_turns: int = 1,
    tokens: Int[Array, "N T"] | None = None,
    topk_ids: Int[Array, "N T K"] | None = None,
    topk_logp: Float[Array, "N T K"] | None = None,
    topk_logp_mu: Float[Array, "N T K"] | None = None,
    update_scale: UpdateScale | None = None,
    vocab_size: int = 0,
) -> Evidence:
    """Evidence with what is not given filled in: an unused field by its neighbour, `segment_ids` by one a row.

    An advantage a response, [N], is broadcast over its row. Without top-K fields K is 0.
    """
    if advantages.ndim == 1 and logp.ndim == 2:
        advantages = jnp.broadcast_to(advantages[:, None], logp.shape)
    none = jnp.zeros((*logp.shape, 0), logp.dtype)
    return Evidence(
        logp=logp,
        logp_mu=logp_mu,
        logp_old=logp_mu if logp_old is None else logp_old,
        logp_ref=jax.lax.stop_gradient(logp) if logp_ref is None else logp_ref,
        advantages=advantages,
        entropy=jnp.zeros_like(logp) if entropy is None else entropy,
        mask=mask,
        segment_ids=jnp.ones(logp.shape, jnp.int32) if segment_ids is None else segment_ids,
        turn_ids=jnp.zeros(logp.shape, jnp.int32) if turn_ids is None else turn_ids,
        tokens=jnp.zeros(logp.shape, jnp.int32) if tokens is None else tokens,
        topk_ids=none.astype(jnp.int32) if topk_ids is None else topk_ids,
        topk_logp=none if topk_logp is None else topk_logp,
        topk_logp_mu=none if topk_logp_mu is None else topk_logp_mu,
        update_scale=update_scale,
        num_segments=num_segments,
        num_turns=num_turns,
        vocab_size=vocab_size,
    )


def sanitise(evidence: Evidence, reads: Iterable[str]) -> tuple[Evidence, Int[Array, ""]]:
    """The same evidence on its active set, 0 elsewhere, and the number of active tokens dropped as non-finite.

    T_act = mask and segment > 0 and every per-token field in `reads` finite (SPEC 1, "Active set"). The returned `mask`
    is T_act. Everything but `logp` and `entropy` is detached. Fields not in `reads` are cleaned but not required
    finite. Top-K entries are only detached: `support` cleans them slot by slot.

    Raises:
      ValueError: a field whose shape or kind of dtype is not what `Evidence` says.
    """
    check_evidence(evidence)
    wanted = evidence.mask & (evidence.segment_ids > 0)
    active = wanted
    for name in sorted(set(reads) & set(PER_TOKEN)):
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
        topk_logp=constant(evidence.topk_logp),
        topk_logp_mu=constant(evidence.topk_logp_mu),
    )
    return clean, jnp.sum(wanted & ~active)


def check_evidence(evidence: Evidence) -> None:
    """Raise ValueError, naming the field, for a shape or a kind of dtype that is not what `Evidence` says.

    Plain checks at trace time: they hold without the annotations that tests switch on.
    """
    shape = evidence.logp.shape
    if len(shape) != 2:
        raise ValueError(f"evidence.logp has shape {shape}; expected [N, T]")
    choices = (*shape, *evidence.topk_ids.shape[-1:])
    for name in (*PER_TOKEN, *PER_CHOICE):
        expected = choices if name in PER_CHOICE else shape
        expect(f"evidence.{name}", getattr(evidence, name), expected, KINDS.get(name, jnp.floating))


KINDS = {
    "mask": jnp.bool_,
    "segment_ids": jnp.integer,
    "turn_ids": jnp.integer,
    "tokens": jnp.integer,
    "topk_ids": jnp.integer,
}
"""What kind of dtype a field has; floating where it is not listed."""


def _on(active: Bool[Array, "N T"], values: Float[Array, "N T"]) -> Float[Array, "N T"]:
    return jnp.where(active, values, 0)

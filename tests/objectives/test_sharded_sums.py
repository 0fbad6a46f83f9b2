"""One update as one call, as four microbatches and spread over devices: the same loss and gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sat.objectives import (
    RECIPES,
    Evidence,
    Reduce,
    UpdateScale,
    first_pass,
    total_loss,
    update_scale,
)
from jaxrl_sat.objectives.evidence import sanitise
from jaxrl_sat.objectives.radii import SatRadii
from tests.objectives.helpers import random_evidence

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
SAT = dataclasses.replace(RECIPES["sat_grpo"](), radii=SatRadii(quantile="0.75", scope="update"))


@jax.jit
def outcome(evidence: Evidence) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss sums [5], gradients of them, counts [5]) of the policy, KL and entropy terms in every aggregation."""

    def sums(logp: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        given = dataclasses.replace(evidence, logp=logp)
        per_token = total_loss(SAT, given, kl_coef=0.1, entropy_coef=0.1).per_token
        clean, _ = sanitise(given, SAT.reads)
        total, count = zip(*(Reduce(mode, norm=5.0)(per_token, clean) for mode in MODES), strict=True)
        return jnp.stack(total), (jnp.stack(total), jnp.stack(count))

    grads, (total, counts) = jax.jacrev(sums, has_aux=True)(evidence.logp)
    return total, grads, counts


def whole_update() -> Evidence:
    """[8, 6] evidence, some responses empty, with SAT's first pass over all of it."""
    evidence = random_evidence(0, rows=8, length=6, spread=0.05)
    evidence = dataclasses.replace(evidence, mask=evidence.mask.at[3].set(False).at[6:].set(False))
    return dataclasses.replace(evidence, update_scale=scale_of(evidence))


def scale_of(evidence: Evidence) -> UpdateScale:
    return update_scale(SAT, *first_pass(SAT, evidence), evidence.turn_ids, evidence.num_turns)


def rows(evidence: Evidence, start: int, stop: int) -> Evidence:
    return jax.tree.map(lambda x: x[start:stop] if x.ndim else x, evidence)


def test_microbatches_and_shards_are_the_whole() -> None:
    """Each part gives sums and counts; divided once, at the end, they are the update's (the last part is empty)."""
    evidence = whole_update()
    total, grads, counts = map(np.asarray, outcome(evidence))
    assert np.all(counts[:-1] > 0) and counts[-1] == 0
    parts = [outcome(rows(evidence, start, start + 2)) for start in range(0, 8, 2)]
    mesh = Mesh(np.asarray(jax.devices()), ("rows",))
    spread = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows") if x.ndim else PartitionSpec())), evidence
    )
    added = [
        np.sum([p[0] for p in parts], axis=0),
        np.concatenate([p[1] for p in parts], axis=1),
        np.sum([p[2] for p in parts], axis=0),
    ]
    for got in (added, list(map(np.asarray, outcome(spread)))):
        np.testing.assert_array_equal(got[2], counts)
        denominator = np.maximum(counts, 1)
        np.testing.assert_allclose(got[0] / denominator, total / denominator, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got[1], grads, rtol=1e-6, atol=1e-6)


def test_the_gate_of_an_update_is_the_whole_ones() -> None:
    """A quantile of each part alone would gate other tokens."""
    evidence = whole_update()
    own = scale_of(rows(evidence, 0, 2))
    assert evidence.update_scale is not None and own.q != evidence.update_scale.q

"""However an update is cut, it is one update: whole, in 4 microbatches, over 8 devices, for every recipe."""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sat.objectives import (
    RECIPES,
    Evidence,
    PolicyLoss,
    first_pass,
    make_evidence,
    needs_first_pass,
    normalise,
    total_loss,
    update_scale,
)
from jaxrl_sat.objectives.radii import SatRadii

ROWS, LENGTH, TOPK, WORDS = 32, 5, 3, 11


def evidence() -> Evidence:
    """[32, 5], ragged, one empty response, an eighth of the tokens far out, K = 3 of 11 words."""
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    mu, pi = (
        np.log(p / p.sum(-1, keepdims=True))
        for base in [rng.exponential(size=(*shape, WORDS))]
        for p in (base, base * np.exp(0.4 * rng.standard_t(3, (*shape, WORDS))))
    )
    tokens = rng.integers(0, WORDS, shape)
    ids = np.argsort(-mu, axis=-1)[..., :TOPK]
    at = functools.partial(np.take_along_axis, axis=-1)
    logp, logp_mu = (at(p, tokens[..., None])[..., 0] for p in (pi, mu))
    lengths = rng.integers(1, LENGTH + 1, (ROWS, 1))
    lengths[3] = 0
    floats = functools.partial(jnp.asarray, dtype=float)
    return make_evidence(
        floats(logp),
        floats(logp_mu),
        floats(rng.normal(size=ROWS)),
        jnp.asarray(np.arange(LENGTH)[None] < lengths),
        logp_old=floats(logp_mu + 0.1 * rng.normal(size=shape)),
        logp_ref=floats(logp + 0.3 * rng.normal(size=shape)),
        entropy=floats(rng.exponential(size=shape)),
        tokens=jnp.asarray(tokens, jnp.int32),
        topk_ids=jnp.asarray(ids, jnp.int32),
        topk_logp=floats(at(pi, ids)),
        topk_logp_mu=floats(at(mu, ids)),
        vocab_size=WORDS,
    )


def over_the_update(objective: PolicyLoss) -> PolicyLoss:
    """SAT's quantile over the whole update, without which its result depends on the cut by design."""
    if not isinstance(objective.radii, SatRadii):
        return objective
    return dataclasses.replace(objective, radii=dataclasses.replace(objective.radii, scope="update"))


def summed(objective: PolicyLoss, given: Evidence) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss sum, count and the gradient of the sum."""

    def value(logp: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = total_loss(objective, dataclasses.replace(given, logp=logp), kl_coef=0.1)
        return out.loss_sum, out.count

    (total, count), grad = jax.value_and_grad(value, has_aux=True)(given.logp)
    return total, count, grad


def in_parts(objective: PolicyLoss, whole: Evidence, parts: int) -> tuple[jax.Array, jax.Array]:
    """Loss and gradient as the learner makes them: a first pass where asked for, then sums added over microbatches."""
    # Every parts-th row, so that each microbatch lies on all the devices that the rows lie on.
    cut = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), whole)
    scale = None
    if needs_first_pass(objective):
        log_ratio, active = jax.lax.map(functools.partial(first_pass, objective), cut)
        scale = update_scale(objective, log_ratio, active, cut.turn_ids, cut.num_turns)

    def one(part: tuple[Evidence, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        given, index = part
        if scale is not None:
            here = dataclasses.replace(scale, log_ratio=scale.log_ratio[index])
            given = dataclasses.replace(given, update_scale=here)
        return summed(objective, given)

    total, count, grad = jax.lax.map(one, (cut, jnp.arange(parts)))
    count = jnp.sum(count)
    return normalise(jnp.sum(total), count), normalise(grad.swapaxes(0, 1).reshape(whole.logp.shape), count)


@functools.partial(jax.jit, static_argnums=(0, 2))
def update(objective: PolicyLoss, given: Evidence, parts: int) -> tuple[jax.Array, jax.Array]:
    """Loss and gradient in one call, or in `parts` microbatches."""
    if parts > 1:
        return in_parts(objective, given, parts)
    total, count, grad = summed(objective, given)
    return normalise(total, count), normalise(grad, count)


def spread(given: Evidence) -> Evidence:
    """Rows over 8 devices."""
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("rows",))
    return jax.device_put(given, NamedSharding(mesh, PartitionSpec("rows")))


def assert_same(got: tuple[jax.Array, jax.Array], wanted: tuple[jax.Array, jax.Array]) -> None:
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-6, atol=1e-6)


DEFAULT = {"sat_grpo", "sat_gspo", "dppo", "predictive_kl_agg", "gspo_tis", "kpop"}
"""Recipes of every kind of ratio, radius, gate and reduction; the others are cut where slow tests are run."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DEFAULT else pytest.mark.slow) for n in sorted(RECIPES)]
)
def test_cut_in_4_microbatches_over_8_devices(name: str) -> None:
    objective, given = over_the_update(RECIPES[name]()), evidence()
    whole = update(objective, given, 1)
    assert np.abs(np.asarray(whole[1])).max() > 1e-4
    assert_same(update(objective, spread(given), 4), whole)


@pytest.mark.parametrize("name", ["sat_grpo", "sat_gspo", "predictive_kl_agg"])
def test_either_cut_alone(name: str) -> None:
    objective, given = over_the_update(RECIPES[name]()), evidence()
    whole = update(objective, given, 1)
    assert_same(update(objective, given, 4), whole)
    assert_same(update(objective, spread(given), 1), whole)


def test_quantile_of_the_update_is_that_of_all_its_tokens() -> None:
    """Against NumPy's inverted CDF over all active |d|; the mean of the parts' quantiles is another number."""
    objective, given = over_the_update(RECIPES["sat_grpo"]()), evidence()
    d = np.abs(np.asarray(given.logp - given.logp_mu))
    mask = np.asarray(given.mask)
    cut = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), given)
    log_ratio, active = jax.vmap(functools.partial(first_pass, objective))(cut)
    q = float(update_scale(objective, log_ratio, active, cut.turn_ids, 1).q)
    assert q == np.quantile(d[mask], 0.9, method="inverted_cdf").astype(q.__class__)
    quarters = [
        np.quantile(x[m], 0.9, method="inverted_cdf") for x, m in zip(np.split(d, 4), np.split(mask, 4), strict=True)
    ]
    assert abs(np.mean(quarters) - q) > 1e-3


def test_gate_compares_the_stored_values() -> None:
    """A second forward pass may round d otherwise; the gate must not move with it."""
    objective, given = over_the_update(RECIPES["sat_grpo"]()), evidence()
    log_ratio, active = first_pass(objective, given)
    scale = update_scale(objective, log_ratio, active, given.turn_ids, 1)
    shaken = dataclasses.replace(given, logp=given.logp * (1 + 1e-6), update_scale=scale)
    radii = cast(SatRadii, objective.radii)
    there = radii(dataclasses.replace(given, update_scale=scale), log_ratio)
    here = radii(shaken, shaken.logp - shaken.logp_mu)
    np.testing.assert_array_equal(there.gate, here.gate)
    np.testing.assert_array_equal(there.high, here.high)
    assert int(there.gate.sum()) == int(active.sum()) - -(-9 * int(active.sum()) // 10)

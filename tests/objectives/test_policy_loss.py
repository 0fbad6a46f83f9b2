"""Properties of SPEC sections 1, 6.8 and 19: padding, SAT against PPO, overflow, finite differences, gates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import (
    RECIPES,
    Evidence,
    PolicyLoss,
    combine,
    finalise,
    make_evidence,
    needs_recomputed,
    normalise,
    policy_loss,
    terms,
    total_loss,
)
from jaxrl_sat.objectives.radii import SatRadii
from tests.objectives.helpers import random_evidence, value_and_grad


def disabled(objective: PolicyLoss) -> PolicyLoss:
    return dataclasses.replace(objective, radii=SatRadii(enabled=False))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_padding_garbage_changes_nothing(name: str) -> None:
    evidence, rng = random_evidence(0), np.random.default_rng(1)
    garbage = jnp.asarray(rng.choice([np.nan, np.inf, -np.inf, 1e30, -7.0], evidence.logp.shape), float)
    fields = ("logp", "logp_mu", "logp_old", "logp_ref", "advantages", "entropy")
    dirty = dataclasses.replace(
        evidence, **{f: jnp.where(evidence.mask, getattr(evidence, f), garbage) for f in fields}
    )

    def run(e):
        def value(logp):
            out = total_loss(RECIPES[name](), dataclasses.replace(e, logp=logp), entropy_coef=0.01)
            return out.loss_sum, out

        return jax.value_and_grad(value, has_aux=True)(e.logp)

    for clean, other in zip(jax.tree.leaves(run(evidence)), jax.tree.leaves(run(dirty)), strict=True):
        np.testing.assert_array_equal(clean, other)


@pytest.mark.parametrize(("sat", "base"), [("sat_grpo", "ppo"), ("sat_gspo", "gspo")])
def test_sat_off_is_the_base_objective_bitwise(sat: str, base: str) -> None:
    evidence = random_evidence(2)
    for a, b in zip(
        value_and_grad(disabled(RECIPES[sat]()), evidence), value_and_grad(RECIPES[base](), evidence), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_sat_contracts_ppo() -> None:
    """SPEC 6.8.1-2: intervals nested, S no larger, gradients differ exactly on the newly clipped bands."""
    evidence = random_evidence(3, spread=0.06)
    sat, ppo = terms(RECIPES["sat_grpo"](quantile=0.8), evidence), terms(RECIPES["ppo"](), evidence)
    assert np.all(sat.region.low <= ppo.region.low) and np.all(sat.region.high <= ppo.region.high)
    assert np.all(sat.surrogate <= ppo.surrogate)
    a, r = np.asarray(sat.evidence.advantages), np.asarray(ppo.ratio)
    up = (a > 0) & (1 + np.asarray(sat.region.high) < r) & (r <= 1 + np.float32(0.2))
    down = (a < 0) & (1 - np.float32(0.2) <= r) & (r < 1 - np.asarray(sat.region.low))
    bands = (up | down) & np.asarray(sat.evidence.mask)
    assert bands.any()
    np.testing.assert_array_equal(sat.newly_clipped, bands)
    differs = (
        value_and_grad(RECIPES["sat_grpo"](quantile=0.8), evidence)[1] != value_and_grad(RECIPES["ppo"](), evidence)[1]
    )
    np.testing.assert_array_equal(differs, bands)


def test_cut_off_of_sat() -> None:
    """SPEC 6.8.4: where q lies, e^d - 1 = eps / (1 + (d/q)^2) is the outward cut-off on d."""
    table = {0.005: 0.0166, 0.01: 0.0258, 0.02: 0.0397, 0.05: 0.0679, 0.10: 0.100, 0.15: 0.150}
    d = jnp.arange(0.0, 0.2, 1e-4)[None, :]
    evidence = make_evidence(d, jnp.zeros_like(d), jnp.ones(1), jnp.ones(d.shape, bool))
    for q, cut in table.items():
        objective = dataclasses.replace(RECIPES["sat_grpo"](), radii=SatRadii(q=q))
        kept = np.asarray(terms(objective, evidence).keep[0])
        assert abs(float(d[0, np.flatnonzero(kept).max()]) - cut) < 2e-4, q


def first_row(logp, logp_mu, advantages) -> Evidence:
    """A few active tokens at the front of evidence of the usual shape, for which the operations are compiled."""
    rows = [np.zeros((4, 12)) for _ in range(4)]
    for row, values in zip(rows, (logp, logp_mu, advantages, np.ones(len(logp))), strict=True):
        row[0, : len(values)] = values
    x, mu, a = (jnp.asarray(row, float) for row in rows[:3])
    return make_evidence(x, mu, a, jnp.asarray(rows[3], bool))


def test_pull_back_survives_overflow() -> None:
    """|d| > 20: finite value and gradient, the converging token keeps -A r, the diverging one is clipped."""
    evidence = first_row([0.0, 0.0, -400.0, -400.0], [-200.0] * 4, [-1.0, 1.0, 1.0, -1.0])
    loss, grad = value_and_grad(RECIPES["ppo"](aggregation="token-sum"), evidence)
    ceiling = np.exp(np.float32(20))
    np.testing.assert_allclose(loss, ceiling - 1.2 - 0.0 + 0.8, rtol=1e-6)
    np.testing.assert_allclose(grad[0, :4], [ceiling, 0, 0, 0], rtol=1e-6)


def test_endpoint_is_kept() -> None:
    """r exactly at 1 + eps or 1 - eps is kept with its whole gradient."""
    evidence = first_row(np.log([1.5, 0.5]), [0.0, 0.0], [1.0, -1.0])
    objective = RECIPES["ppo"](eps_low=0.5, eps_high=float(jnp.exp(evidence.logp)[0, 0] - 1), aggregation="token-sum")
    assert np.all(terms(objective, evidence).keep[0, :2])
    np.testing.assert_allclose(value_and_grad(objective, evidence)[1][0, :2], [-1.5, 0.5], rtol=1e-6)


def test_nonfinite_active_tokens_are_dropped_and_counted() -> None:
    evidence = random_evidence(4)
    hole = jnp.zeros(evidence.mask.shape, bool).at[:, 0].set(True)
    broken = dataclasses.replace(
        evidence,
        logp=evidence.logp.at[0, 0].set(-jnp.inf).at[1, 0].set(jnp.nan),
        logp_mu=evidence.logp_mu.at[2, 0].set(jnp.inf).at[3, 0].set(jnp.nan),
    )
    masked = dataclasses.replace(evidence, mask=evidence.mask & ~hole)
    for name in ("sat_grpo", "sat_gspo"):
        out = policy_loss(RECIPES[name](), broken)
        assert out.n_nonfinite == 4 and out.n_active == policy_loss(RECIPES[name](), masked).n_active
        for a, b in zip(value_and_grad(RECIPES[name](), broken), value_and_grad(RECIPES[name](), masked), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["gspo", "ppo", "sat_grpo", "sat_gspo"])
def test_gradient_against_finite_differences(name: str) -> None:
    """Central differences of the loss with radii held, in float64; the two agree away from kinks."""
    with jax.enable_x64(True):
        evidence = random_evidence(5, rows=3, length=5)
        objective = RECIPES[name]()
        if isinstance(objective.radii, SatRadii):
            q = float(terms(objective, evidence).region.q)
            objective = dataclasses.replace(objective, radii=SatRadii(enabled=False, q=q))

        @jax.jit
        def value(logp):
            out = total_loss(objective, dataclasses.replace(evidence, logp=logp), kl_coef=0.1)
            return out.loss_sum / out.count

        grad, h = jax.grad(value)(evidence.logp), 1e-6
        steps = h * jnp.eye(evidence.logp.size).reshape(-1, *evidence.logp.shape)
        difference = jax.vmap(lambda s: (value(evidence.logp + s) - value(evidence.logp - s)) / (2 * h))(steps)
        np.testing.assert_allclose(grad.ravel(), difference, atol=1e-8)


def test_gates_multiply_are_detached_and_leave_the_count() -> None:
    @dataclasses.dataclass(frozen=True)
    class Ramp:
        factor: float
        name: str = "ramp"
        reads: frozenset[str] = frozenset({"logp_old"})

        def __call__(self, evidence, log_ratio):
            return jnp.where(log_ratio > 0, self.factor, 0.0) * (1 + 0 * evidence.logp)

    evidence, ppo = random_evidence(6), RECIPES["ppo"]()
    gated = dataclasses.replace(ppo, gates=(Ramp(2.0), Ramp(3.0)))
    plain, out = policy_loss(ppo, evidence), policy_loss(gated, evidence)
    weight = np.where(np.asarray(evidence.logp > evidence.logp_mu), 6.0, 0.0)
    assert out.count == plain.count
    np.testing.assert_allclose(out.per_token, plain.per_token * weight, rtol=1e-6)
    np.testing.assert_array_equal(out.keep, plain.keep & (weight > 0))
    np.testing.assert_allclose(value_and_grad(gated, evidence)[1], value_and_grad(ppo, evidence)[1] * weight, rtol=1e-6)
    assert (
        needs_recomputed(gated)
        and not needs_recomputed(ppo)
        and needs_recomputed(RECIPES["gspo"](denominator="recomputed"))
    )


def test_recomputed_denominator_reads_logp_old() -> None:
    evidence = random_evidence(7)
    swapped = dataclasses.replace(evidence, logp_mu=evidence.logp_old, logp_old=evidence.logp_mu)
    for name in ("sat_grpo", "sat_gspo"):
        a = value_and_grad(RECIPES[name](denominator="recomputed"), evidence)
        b = value_and_grad(RECIPES[name](), swapped)
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_vmap_is_a_loop() -> None:
    batch = [random_evidence(s, rows=2, length=6) for s in (8, 9)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batch)
    one = jax.jit(lambda e: policy_loss(RECIPES["sat_gspo"](), e).loss_sum)
    np.testing.assert_allclose(jax.vmap(one)(stacked), [one(e) for e in batch], rtol=1e-6)


def test_shapes_are_asserted_at_entry() -> None:
    evidence = random_evidence(10)
    with pytest.raises(ValueError, match=r"evidence.entropy has shape \(4, 3\)"):
        policy_loss(RECIPES["ppo"](), dataclasses.replace(evidence, entropy=evidence.entropy[:, :3]))


def test_sat_q_is_a_mean_over_microbatches_with_tokens() -> None:
    some, empty = random_evidence(2), random_evidence(3)
    empty = dataclasses.replace(empty, mask=jnp.zeros_like(empty.mask))
    a, b = (policy_loss(RECIPES["sat_grpo"](), e).metrics for e in (some, empty))
    assert finalise(combine(a, b))["sat/q"] == finalise(a)["sat/q"] > 0


def test_nothing_active_is_zero() -> None:
    empty = random_evidence(4)
    empty = dataclasses.replace(empty, mask=jnp.zeros_like(empty.mask))
    for name in RECIPES:
        loss, grad = value_and_grad(RECIPES[name](), empty)
        assert loss == 0 and not np.any(grad)
    assert all(v == 0 for v in finalise(total_loss(RECIPES["sat_gspo"](), empty).metrics).values())


def test_a_broken_reference_leaves_the_policy_term_alone() -> None:
    """Each term is a mean over its own active tokens."""
    evidence = random_evidence(5)
    broken = dataclasses.replace(evidence, logp_ref=evidence.logp_ref.at[0, 0].set(jnp.nan))
    ppo = RECIPES["ppo"]()
    out, policy = total_loss(ppo, broken, kl_coef=0.5, kl_kind="k2"), policy_loss(ppo, broken)
    x = np.asarray(evidence.logp_ref - evidence.logp)
    own = np.asarray(evidence.mask).copy()
    own[0, 0] = False
    want = float(normalise(policy.loss_sum, policy.count)) + 0.5 * np.mean(x[own] ** 2 / 2)
    np.testing.assert_allclose(normalise(out.loss_sum, out.count), want, rtol=1e-5)

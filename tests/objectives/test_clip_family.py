"""The clip family, recipe by recipe: closed forms in numpy, pull back, overflow, A = 0, gates, optima, endpoints.

Jitted in the comparison with numpy alone: elsewhere single operations compile once for all recipes.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_sat.objectives import Evidence, LossOut, PolicyLoss, make_evidence, normalise, policy_loss, terms
from jaxrl_sat.objectives.corrections import IcePop, KPop, MismatchTis, PolicyTis, SeqClip
from jaxrl_sat.objectives.gates import Gate
from jaxrl_sat.objectives.radii import ConstantRadii, Radii, SatRadii
from jaxrl_sat.objectives.ratio import TokenRatio
from jaxrl_sat.objectives.recipes import CLIP_RECIPES
from jaxrl_sat.objectives.reduce import Reduce
from jaxrl_sat.objectives.surrogate import SurrogateSlot
from jaxrl_sat.objectives.unclipped import Cispo, Drpo, Linear, Spo
from jaxrl_sat.types import InputError
from tests.objectives.helpers import random_evidence

NAMES = sorted(CLIP_RECIPES)
SHAPE = (4, 12)  # one for all, so that each operation compiles once


def evaluated(objective: PolicyLoss, evidence: Evidence) -> tuple[jax.Array, jax.Array, LossOut]:
    """Loss, gradient in `logp`, and all that the loss returned."""

    def value(logp: jax.Array) -> tuple[jax.Array, LossOut]:
        out = policy_loss(objective, dataclasses.replace(evidence, logp=logp))
        return normalise(out.loss_sum, out.count), out

    (loss, out), grad = jax.value_and_grad(value, has_aux=True)(evidence.logp)
    return loss, grad, out


def clip(r: np.ndarray, a: np.ndarray, low: np.ndarray | float = 0.2, high: np.ndarray | float = 0.2) -> np.ndarray:
    return np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)


def sat_radii(d: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ordered = np.sort(np.abs(d[mask]))
    q = ordered[-(-9 * len(ordered) // 10) - 1]
    psi = np.where(np.abs(d) > q, 1 / (1 + (d / q) ** 2), 1)
    return 0.2 * np.where(d < 0, psi, 1), 0.2 * np.where(d > 0, psi, 1)


def bernoulli(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def window(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return (low <= x) & (x <= high)


SURROGATES = {
    "ppo": lambda v: clip(v.r, v.a),
    "grpo": lambda v: clip(v.r, v.a),
    "clip_higher": lambda v: clip(v.r, v.a, 0.2, 0.28),
    "gspo": lambda v: clip(v.rho, v.a),
    "sat_grpo": lambda v: clip(v.r, v.a, *sat_radii(np.log(v.r0), v.mask)),
    "sat_gspo": lambda v: clip(v.rho, v.a, *sat_radii(np.log(v.rho0), v.mask)),
    "grpo_tis": lambda v: np.clip(v.k, 0, 2) * clip(v.r_old, v.a),
    "gspo_tis": lambda v: np.clip(v.k, 0, 2) * clip(v.rho_old, v.a),
    "tis": lambda v: np.minimum(v.r0, 2) * v.a * v.x,
    "icepop": lambda v: v.k * window(v.k, 0.5, 5) * clip(v.r_old, v.a),
    "kpop": lambda v: (np.maximum(*v.kl) <= 2) * clip(v.r_old, v.a),
    "decoupled_ppo": lambda v: v.k * clip(v.r_old, v.a),
    "seqclip": lambda v: window(v.rho0, 0.995, 1.005) * clip(v.rho, v.a),
    "up": lambda v: np.where(v.a > 0, np.exp(v.x - v.x0) * v.a, clip(v.r, v.a)),
    "cispo": lambda v: np.minimum(v.r0, 1.28) * v.a * v.x,
    "spo": lambda v: v.r * v.a - np.abs(v.a) / 0.4 * (v.r - 1) ** 2,
    "drpo": lambda v: v.r * v.a - np.abs(v.a) / 0.3 * v.mu * (v.r - 1) ** 2,
}
"""S of each recipe at log pi = x, with what the papers detach taken at x0."""


def numpy_loss(name: str, x: np.ndarray, x0: np.ndarray, e: Evidence, mode: str) -> float:
    mask = np.asarray(e.mask)
    lengths = mask.sum(axis=1, keepdims=True)
    log_mu, log_old, a = (np.asarray(values) for values in (e.logp_mu, e.logp_old, e.advantages))

    def rho(new: np.ndarray, base: np.ndarray) -> np.ndarray:
        return np.exp(np.where(mask, new - base, 0).sum(axis=1, keepdims=True) / lengths) * np.ones(mask.shape)

    mu, old = np.exp(log_mu), np.exp(log_old)
    values = SimpleNamespace(
        x=x, x0=x0, a=a, mask=mask, mu=mu, r=np.exp(x) / mu, r0=np.exp(x0) / mu, r_old=np.exp(x) / old, k=old / mu
    )
    values.rho, values.rho0, values.rho_old = rho(x, log_mu), rho(x0, log_mu), rho(x, log_old)
    values.kl = (bernoulli(mu, old), bernoulli(old, mu))
    weights = {"token-mean": 1 / mask.sum(), "seq-mean-token-mean": 1 / lengths / len(mask)}
    return float(np.sum(-SURROGATES[name](values)[mask] * (mask * weights.get(mode, 1 / len(mask)))[mask]))


def mismatched_evidence() -> Evidence:
    """Recomputation and sampler far enough apart that every gate drops or truncates some token, and keeps others."""
    e, rng = random_evidence(5), np.random.default_rng(6)
    near = jnp.asarray([0.001, 1.0, 0.001, 1.0], float)[:, None]
    logp_mu = jnp.minimum(e.logp_mu, -0.05)
    return dataclasses.replace(
        e,
        logp=logp_mu + near * (e.logp - e.logp_mu),
        logp_mu=logp_mu,
        logp_old=jnp.minimum(logp_mu + jnp.asarray(rng.normal(size=logp_mu.shape), float), -0.01),
    )


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_against_numpy(name: str) -> None:
    """The loss in closed form, and its central differences with every detached quantity held."""
    with jax.enable_x64(True):
        evidence, objective = mismatched_evidence(), CLIP_RECIPES[name]()
        loss, grad, _ = jax.jit(functools.partial(evaluated, objective))(evidence)
        x0, mode, h = np.asarray(evidence.logp), objective.reduce.mode, 1e-6
        np.testing.assert_allclose(loss, numpy_loss(name, x0, x0, evidence, mode), rtol=1e-12)
        difference = np.zeros(x0.shape)
        for at in np.ndindex(*x0.shape):
            step = np.zeros(x0.shape)
            step[at] = h
            up, down = (numpy_loss(name, x0 + s * step, x0, evidence, mode) for s in (1, -1))
            difference[at] = (up - down) / (2 * h)
        assert np.any(grad)
        np.testing.assert_allclose(grad, difference, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"seqclip"}))
def test_pull_back_is_kept_past_the_ceiling(name: str) -> None:
    """log r = 199, A = -1/2, trainer and sampler agreeing: dS/dlog pi is A times the formula at r = e^20, not 0."""
    a, ceiling = -0.5, np.exp(20.0)
    objective = dataclasses.replace(CLIP_RECIPES[name](), reduce=Reduce("token-sum"))
    logp, logp_mu = jnp.full(SHAPE, -1.0), jnp.full(SHAPE, -200.0)
    _, grad, out = evaluated(objective, make_evidence(logp, logp_mu, jnp.full(SHAPE[0], a), jnp.ones(SHAPE, bool)))
    factor = {"tis": 2.0, "cispo": 1.28, "spo": ceiling * (1 + (ceiling - 1) / 0.2)}.get(name, ceiling)
    np.testing.assert_allclose(grad, -factor * a, rtol=1e-6)
    assert np.all(out.keep)


@pytest.mark.parametrize("name", NAMES)
def test_overflowing_ratios_stay_finite(name: str) -> None:
    rng = np.random.default_rng(7)
    logp, logp_mu, logp_old = jnp.asarray(rng.choice([0.0, -1e-9, -25.0, -400.0, -1e4], (3, *SHAPE)), jnp.float32)
    evidence = dataclasses.replace(random_evidence(8), logp=logp, logp_mu=logp_mu, logp_old=logp_old)
    loss, grad, out = evaluated(CLIP_RECIPES[name](), evidence)
    assert np.isfinite(loss) and np.all(np.isfinite(grad)) and np.all(np.isfinite(out.per_token))
    assert np.all(np.isfinite(terms(CLIP_RECIPES[name](), evidence).soft_weight))


@pytest.mark.parametrize("name", NAMES)
def test_no_advantage_no_gradient_and_no_clip(name: str) -> None:
    evidence = dataclasses.replace(mismatched_evidence(), advantages=jnp.zeros(SHAPE))
    loss, grad, out = evaluated(CLIP_RECIPES[name](), evidence)
    assert loss == 0 and not np.any(grad)
    total, _ = out.metrics.means["clip/fraction"]
    assert total == 0


@pytest.mark.parametrize("name", [name for name in NAMES if CLIP_RECIPES[name]().gates])
def test_gates_weigh_and_leave_the_count(name: str) -> None:
    """loss of a token = gate times that without the gate; count and active set are the same."""
    evidence, gated = mismatched_evidence(), CLIP_RECIPES[name]()
    plain, out = policy_loss(dataclasses.replace(gated, gates=()), evidence), policy_loss(gated, evidence)
    assert out.count == plain.count and out.n_active == plain.n_active
    (weight,) = terms(gated, evidence).gates.values()
    np.testing.assert_allclose(out.per_token, plain.per_token * weight, rtol=1e-6)
    np.testing.assert_array_equal(out.keep, plain.keep & (weight > 0))
    if name != "kpop":
        assert len(np.unique(np.asarray(weight)[np.asarray(evidence.mask)])) > 1


def on_tokens(
    surrogate: SurrogateSlot,
    gates: tuple[Gate, ...] = (),
    radii: Radii = ConstantRadii(),  # noqa: B008 (frozen)
) -> PolicyLoss:
    return PolicyLoss(TokenRatio(), radii, surrogate, Reduce("token-sum"), gates)


def test_soft_penalties_have_the_papers_optima() -> None:
    """dS = 0 at r* = 1 + sign(A) eps (SPO, each side its own radius) and at pi* = mu + sign(A) delta (DRPO)."""
    up, mu = np.arange(12) < 6, 0.5
    a = np.where(up, 2.0, -0.5)
    for surrogate, pi in ((Spo(), mu * np.where(up, 1.3, 0.9)), (Drpo(0.2), mu + np.where(up, 0.2, -0.2))):
        objective = on_tokens(surrogate, radii=ConstantRadii(0.1, 0.3))
        logp, logp_mu, a_t = (jnp.asarray(np.broadcast_to(x, SHAPE), jnp.float32) for x in (np.log(pi), np.log(mu), a))
        evidence = make_evidence(logp, logp_mu, a_t, jnp.ones(SHAPE, bool))
        np.testing.assert_allclose(evaluated(objective, evidence)[1], 0, atol=1e-6)
        np.testing.assert_allclose(terms(objective, evidence).soft_weight, 0, atol=1e-6)


def test_spo_takes_the_radii_of_sat() -> None:
    """The penalty of a contracted token is the one of its own radius; q = 0 is plain SPO, bit for bit."""
    evidence = random_evidence(9)
    contracted = terms(on_tokens(Spo(), radii=SatRadii(quantile=0.5)), evidence)
    r, a = np.asarray(contracted.ratio, np.float64), np.asarray(contracted.evidence.advantages, np.float64)
    on = np.asarray(evidence.mask)
    radius = np.where(on, np.where(a > 0, contracted.region.high, contracted.region.low), 1)
    assert np.any(radius < 0.19)
    np.testing.assert_allclose(contracted.soft_weight[on], (1 - np.sign(a) * (r - 1) / radius)[on], rtol=1e-3)
    none, plain = (evaluated(on_tokens(Spo(), radii=radii), evidence) for radii in (SatRadii(q=0.0), ConstantRadii()))
    for x, y in zip(none[:2], plain[:2], strict=True):
        np.testing.assert_array_equal(x, y)


LOGS = st.lists(st.floats(-60, 0, width=32), min_size=48, max_size=48)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(LOGS, LOGS, LOGS)
def test_weights_stay_in_their_ranges(logp: list, logp_mu: list, logp_old: list) -> None:
    """CISPO in [1 - low, 1 + high], DRPO in [1 - 1/delta, 1 + 1/delta], TIS in (0, C], IcePop 0 or in [alpha, beta]."""
    x, mu, old = (jnp.asarray(values, jnp.float32).reshape(SHAPE) for values in (logp, logp_mu, logp_old))
    evidence = make_evidence(x, mu, jnp.asarray([1.0, -2.0, 0.0, 0.5]), jnp.ones(SHAPE, bool), logp_old=old)
    radii = ConstantRadii(0.2, 0.3)
    cispo = np.asarray(terms(on_tokens(Cispo(), radii=radii), evidence).soft_weight)
    assert np.all((cispo >= np.float32(0.8)) & (cispo <= np.float32(1.3)))
    assert np.all(np.abs(np.asarray(terms(on_tokens(Drpo(0.25)), evidence).soft_weight) - 1) <= 4 + 1e-5)
    gates = terms(on_tokens(Linear(), (PolicyTis(3.0), MismatchTis(2.0), IcePop(0.5, 5.0))), evidence).gates
    assert np.all((gates["tis"] > 0) & (gates["tis"] <= 3)) and np.all((gates["tis_1"] > 0) & (gates["tis_1"] <= 2))
    pop = np.asarray(gates["icepop"])
    assert np.all((pop == 0) | ((pop >= 0.5) & (pop <= 5)))


def test_gate_ends_are_kept() -> None:
    """Equality keeps: k at alpha and at beta, rho at both ends of [1, 1], D = phi = 0."""
    one = jnp.full(SHAPE, -1.0)
    same = make_evidence(one, one, jnp.ones(SHAPE), jnp.ones(SHAPE, bool))
    for gate in (IcePop(1.0, 1.0), SeqClip(1.0, 1.0), KPop(0.0), KPop(0.0, "current")):
        np.testing.assert_array_equal(terms(on_tokens(Linear(), (gate,)), same).weight, 1)
    apart = dataclasses.replace(same, logp=one - 0.01, logp_old=one - 0.01)
    for gate in (IcePop(1.0, 1.0), SeqClip(1.0, 1.0), KPop(0.0), KPop(0.0, "current")):
        np.testing.assert_array_equal(terms(on_tokens(Linear(), (gate,)), apart).weight, 0)


def test_kpop_looks_at_the_policy_it_is_told_to() -> None:
    """On the recomputed policy `logp` does not matter, on the current one `logp_old` is not even read."""
    e = mismatched_evidence()
    far = dataclasses.replace(e, logp=e.logp - 9)
    recomputed, current = KPop(0.05), KPop(0.05, "current")
    np.testing.assert_array_equal(recomputed(e, e.logp), recomputed(far, e.logp))
    on = np.asarray(e.mask)
    assert np.asarray(current(e, e.logp))[on].any() and not np.asarray(current(far, e.logp))[on].all()
    assert current.reads == {"logp", "logp_mu"} and recomputed.reads == {"logp_old", "logp_mu"}


def test_token_mode_of_gspo_has_the_same_gradient() -> None:
    """A constant advantage inside a response: both gradient modes agree, gates of SeqClip included. SPEC 7.1."""
    evidence = mismatched_evidence()
    for name in ("gspo", "seqclip"):
        a, b = (evaluated(CLIP_RECIPES[name](grad_mode=mode), evidence)[1] for mode in ("mean", "token"))
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("name", ["tis", "kpop", "seqclip", "up", "drpo"])
def test_vmap_over_batches(name: str) -> None:
    batch = [mismatched_evidence(), random_evidence(11)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batch)

    def one(evidence: Evidence) -> jax.Array:
        return policy_loss(CLIP_RECIPES[name](), evidence).loss_sum

    np.testing.assert_allclose(jax.vmap(one)(stacked), [one(e) for e in batch], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tis", {"cap": 0.0}),
        ("grpo_tis", {"cap": -1.0}),
        ("grpo_tis", {"cap_low": 3.0}),
        ("icepop", {"alpha": 6.0}),
        ("icepop", {"alpha": float("nan")}),
        ("kpop", {"phi": -1.0}),
        ("kpop", {"trainer": "mu"}),
        ("seqclip", {"alpha": 1.1}),
        ("seqclip", {"denominator": "mu"}),
        ("drpo", {"delta": 0.0}),
        ("spo", {"eps_low": -0.1}),
        ("sat_grpo", {"scope": "epoch"}),
    ],
)
def test_bad_parameters_are_refused(name: str, given: dict) -> None:
    ((key, value),) = given.items()
    with pytest.raises(InputError, match=f"^{key}: {value!r} is not"):
        CLIP_RECIPES[name](**given)

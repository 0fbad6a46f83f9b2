"""KL estimates, advantages, length penalty and mismatch figures against trl 1.16 and verl 0.9.1; see test_peers.py."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat import objectives as obj
from tests.objectives.peers import BATCHES, RECORDED, same, stacked


@functools.cache
def kl_estimates() -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Value and gradient in log pi of each kind and batch."""
    given = stacked()

    def one(kind: str) -> tuple[jax.Array, jax.Array]:
        def total(logp: jax.Array) -> tuple[jax.Array, jax.Array]:
            value = jax.vmap(lambda p, ref: obj.kl_estimate(p, ref, kind)[0])(logp, given.logp_ref)
            return value.sum(), value

        grad, value = jax.grad(total, has_aux=True)(given.logp)
        return value, grad

    found = jax.jit(lambda: {kind: one(kind) for kind in ("k1", "k2", "k3", "low_var_kl")})()
    return {
        kind: {b: (np.asarray(value[i]), np.asarray(grad[i])) for i, b in enumerate(BATCHES)}
        for kind, (value, grad) in found.items()
    }


@pytest.mark.parametrize("kind", ["k1", "k2", "low_var_kl"])
def test_kl_estimates_agree_with_verl(kind: str) -> None:
    for batch in BATCHES:
        (value, grad), want = kl_estimates()[kind][batch], RECORDED["verl"]["kl"][kind][batch]
        assert np.all(same(value, want["value"])) and np.all(same(grad, want["grad"]))


def test_k3_of_verl_is_low_var_kl() -> None:
    """Held at 10, without gradient beyond; ours, like trl's, is not."""
    assert RECORDED["verl"]["kl"]["k3"] == RECORDED["verl"]["kl"]["low_var_kl"]
    value, grad = kl_estimates()["k3"]["far"]
    want = RECORDED["verl"]["kl"]["k3"]["far"]
    assert (value > 10).any()
    np.testing.assert_array_equal(~same(value, want["value"]), value > 10)
    np.testing.assert_array_equal(~same(grad, want["grad"]), value > 10)


def advantages_of(recorded: dict) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Ours of the recorded rewards, and each one's group."""
    rewards = jnp.asarray(recorded["rewards"])
    groups = recorded.get("groups") or [i // recorded["group_size"] for i in range(len(rewards))]
    given = (rewards, jnp.asarray(groups), max(groups) + 1)
    found = jax.jit(
        lambda: {
            "grpo": obj.group_normalised(*given),
            "grpo_1e-4": obj.group_normalised(*given, eps=1e-4),
            "dr_grpo": obj.group_centred(*given),
            "rloo": obj.leave_one_out(*given),
        }
    )()
    return {k: np.asarray(v) for k, v in found.items()}, np.asarray(groups)


def test_advantages_against_verl() -> None:
    """Equal but for a group of one, whose raw reward verl returns, and one of equal rewards, where a residue stays."""
    recorded = RECORDED["verl"]["advantages"]
    found, groups = advantages_of(recorded)
    single, equal = groups == 2, groups == 1
    for name in ("grpo", "dr_grpo", "rloo"):
        got, want = found[name], np.asarray(recorded[name])
        np.testing.assert_array_equal(~same(got, want)[~equal], single[~equal])
        assert np.all(got[single | equal] == 0) and same(want[single], 0.7)
    assert 1e-3 < np.abs(np.asarray(recorded["grpo"])[equal]).max() < 1e-2
    assert np.all(same(found["rloo"], recorded["rloo_vectorized"]))


def test_advantages_against_trl() -> None:
    """trl divides by std + 1e-4, we by std + 1e-6; a group of one has 0 in both."""
    recorded = RECORDED["trl"]["advantages"]
    found, _ = advantages_of(recorded)
    assert np.all(same(found["grpo_1e-4"], recorded["grpo"])) and np.all(same(found["dr_grpo"], recorded["dr_grpo"]))
    np.testing.assert_array_equal(~same(found["grpo"], recorded["grpo"]), found["grpo"] != 0)
    assert set(recorded["singleton"]) == {0.0}


def test_overlong_penalty_agrees_with_trl() -> None:
    recorded = RECORDED["trl"]["overlong"]
    got = obj.overlong_shaping(jnp.asarray(recorded["lengths"]), recorded["max_length"], recorded["cache"])
    np.testing.assert_allclose(got, recorded["penalty"], atol=1e-7)


def test_mismatch_figures_agree_with_verl() -> None:
    """verl's kl and k3_kl of log pi against log mu are our k1 and k3, up to the ceiling, which verl's k3 lacks."""
    found = jax.jit(jax.vmap(lambda evidence: obj.finalise(obj.staleness(evidence))))(stacked())
    for i, batch in enumerate(BATCHES):
        want = RECORDED["verl"]["mismatch"][batch]
        assert same(found["staleness/k1"][i], want["kl"])
        assert same(found["staleness/k3"][i], want["k3_kl"]) == (batch != "overflow")

"""What the ceiling on log r does to the gradient: SPEC 1, "Overflow rule"."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import RECIPES, make_evidence
from jaxrl_sat.objectives.ratio import LOG_RATIO_MAX, importance
from jaxrl_sat.objectives.surrogate import Clip
from tests.objectives.helpers import value_and_grad

D = np.asarray([-300, -20.5, 0, 19.5, 20, 20.5, 300], np.float32)


@pytest.mark.parametrize("gradient", ["saturate", "hard"])
def test_past_the_ceiling(gradient: str) -> None:
    """r = e^20 from 20 on; dr/dd is r below the ceiling and at it, past it r ("saturate") or exactly 0 ("hard")."""
    r, vjp = jax.vjp(lambda d: importance(d, LOG_RATIO_MAX, gradient), jnp.asarray(D))
    want = np.exp(np.minimum(D.astype(float), 20))
    np.testing.assert_allclose(r, want, rtol=1e-6, atol=1e-30)
    slope = np.asarray(vjp(jnp.ones_like(r))[0])
    np.testing.assert_allclose(slope, np.where((D > 20) & (gradient == "hard"), 0, want), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("gradient", "pulls"), [("saturate", True), ("hard", False)])
def test_pull_back_past_the_ceiling(gradient: str, pulls: bool) -> None:
    """A < 0 and d > 20: a converging token keeps -A r under "saturate" and has gradient exactly 0 under "hard"."""
    objective = dataclasses.replace(RECIPES["ppo"](aggregation="token-sum"), surrogate=Clip(ceiling_gradient=gradient))
    d = jnp.asarray([[25.0, 19.0, 0.0]])
    evidence = make_evidence(d, jnp.zeros((1, 3)), -jnp.ones((1, 3)), jnp.ones((1, 3), bool))
    loss, grad = value_and_grad(objective, evidence)
    np.testing.assert_allclose(loss, np.exp(20.0) + np.exp(19.0) + 1, rtol=1e-6)
    np.testing.assert_allclose(grad[0], [np.exp(20.0) if pulls else 0, np.exp(19.0), 1], rtol=1e-6)

"""A gate written outside the package, as docs/objectives.md says to: in a recipe, in the loss, in a run's config."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from jaxrl_sat import config as config_lib
from jaxrl_sat.objectives import RECIPES, Evidence, PolicyLoss, grpo, make_evidence, normalise, policy_loss
from jaxrl_sat.objectives.gates import Gate
from tests.run_configs import flagship

PAGE = Path(__file__).resolve().parents[2] / "docs" / "objectives.md"


@dataclasses.dataclass(frozen=True)
class Forks:
    """w = 1[H >= threshold]: train on tokens whose distribution was open, in nats."""

    threshold: float = 0.5
    name: str = "forks"
    reads: frozenset[str] = frozenset({"entropy"})

    def __call__(self, evidence: Evidence, log_ratio: Float[Array, "N T"]) -> Float[Array, "N T"]:
        return (evidence.entropy >= self.threshold).astype(log_ratio.dtype)


def grpo_on_forks(eps_low: float = 0.2, eps_high: float = 0.2) -> PolicyLoss:
    """GRPO where the policy was undecided."""
    return dataclasses.replace(grpo(eps_low, eps_high), gates=(Forks(),))


def test_the_page_shows_this_gate_and_it_is_short() -> None:
    page = PAGE.read_text(encoding="utf-8")
    gate, recipe = inspect.getsource(Forks), inspect.getsource(grpo_on_forks)
    assert gate in page and recipe in page
    assert len((gate + recipe).splitlines()) < 20
    assert isinstance(Forks(), Gate)


def test_its_value_and_gradient_are_those_worked_out_by_hand() -> None:
    # One response of five tokens, mu = 1/2. Ratios 1.1, 1.5 (clipped at 1.2), 0.7 and 1.1; A = 2. The third token is
    # closed, the fourth's entropy is no number, so that token is dropped and leaves the denominator; the fifth is off.
    ratios = np.array([[1.1, 1.5, 0.7, 1.1, 1.1]])
    logp_mu = jnp.full((1, 5), math.log(0.5))
    evidence = make_evidence(
        logp_mu + jnp.asarray(np.log(ratios), float),
        logp_mu,
        jnp.full((1, 5), 2.0),
        jnp.asarray([[True, True, True, True, False]]),
        entropy=jnp.asarray([[0.5, 1.0, 0.49, jnp.nan, jnp.nan]]),
    )

    def loss(logp: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out = policy_loss(grpo_on_forks(), dataclasses.replace(evidence, logp=logp))
        dropped, count = out.metrics.means["gate/forks_dropped"]
        return normalise(out.loss_sum, out.count), (out.n_nonfinite, dropped / count)

    (value, (n_nonfinite, dropped)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(evidence.logp)
    np.testing.assert_allclose(value, -(1.1 * 2 + 1.2 * 2 + 0) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-1.1 * 2 / 3, 0, 0, 0, 0]], rtol=1e-6)
    assert n_nonfinite == 1
    np.testing.assert_allclose(dropped, 1 / 3, rtol=1e-6)


def test_a_run_takes_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "grpo_on_forks", grpo_on_forks)
    config = flagship(name="grpo")
    config.recipe = "grpo_on_forks"
    config.objective.eps_high = 0.3
    made = config_lib.make_objective(config_lib.from_config_dict(config))
    assert made.gates == (Forks(),) and made.radii == grpo(0.2, 0.3).radii

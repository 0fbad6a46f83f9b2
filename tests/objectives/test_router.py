"""The router's auxiliary losses against transformers' own on recorded router logits, and against hand counts."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives.metrics import combine, finalise
from jaxrl_sat.objectives.router import load_balance, load_max, router_loss, z_loss
from jaxrl_sat.types import RouterSums

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"

# By transformers 5.24.0 in float64, of the router logits in fixtures/NAME.npz, top 2 of 5 experts: the values of
# load_balancing_loss_func with and without the mask, of router_z_loss_func (all tokens, layers as one batch), and the
# gradient of the first in the logits of layer 0, token 5.
RECORDED = {
    "moe": (
        (2.4508216381073, 2.3132691383361816, 3.7053942852112183),
        (-0.000293586778694704, 0.013595879846306561, -0.0024446946987, -0.001025940333821, -0.009831658035063),
    ),
    "moe_norm": (
        (2.259352445602417, 2.1855742931365967, 6.7534573525804324),
        (0.005604561674125105, -0.0036400797366059, -0.00233752676604975, 0.000282193887803947, 9.08509407265976e-05),
    ),
}


def summed(logits: jax.Array, mask: np.ndarray) -> RouterSums:
    """The sums of router logits [M, n, 5] whose tokens route to their two best."""
    valid = jnp.asarray(mask, jnp.float32)[None, :, None]
    chosen = jax.nn.one_hot(jax.lax.top_k(logits, 2)[1], 5).sum(axis=-2)
    return RouterSums(
        counts=jnp.sum(chosen * valid, axis=1),
        probabilities=jnp.sum(jax.nn.softmax(logits) * valid, axis=1),
        z=jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * valid[..., 0], axis=1),
        tokens=jnp.sum(valid),
    )


@pytest.mark.parametrize("name", RECORDED)
def test_values_and_gradient_are_those_of_transformers(name: str) -> None:
    recorded = np.load(FIXTURES / f"{name}.npz")
    logits, mask = jnp.asarray(recorded["router_logits"]), recorded["mask"].reshape(-1)
    (masked, whole, z), gradient = RECORDED[name]
    np.testing.assert_allclose(load_balance(summed(logits, mask)), masked, rtol=1e-6)
    np.testing.assert_allclose(load_balance(summed(logits, np.ones_like(mask))), whole, rtol=1e-6)
    np.testing.assert_allclose(z_loss(summed(logits, np.ones_like(mask))), z, rtol=1e-6)
    found = jax.grad(lambda x: load_balance(summed(x, mask)))(logits)
    np.testing.assert_allclose(found[0, 5], gradient, rtol=1e-4, atol=1e-8)
    assert not np.any(np.asarray(found)[:, mask == 0])


def test_even_routing_costs_k_and_one_sided_routing_the_number_of_experts() -> None:
    even = RouterSums(jnp.full((3, 4), 5.0), jnp.full((3, 4), 2.5), jnp.full(3, 40.0), jnp.float32(10))
    assert (float(load_balance(even)), float(load_max(even)), float(z_loss(even))) == (2, 1, 4)
    sided = RouterSums(
        jnp.tile(jnp.asarray([10.0, 10, 0, 0]), (3, 1)),
        jnp.tile(jnp.asarray([5.0, 5, 0, 0]), (3, 1)),
        jnp.zeros(3),
        jnp.float32(10),
    )
    assert (float(load_balance(sided)), float(load_max(sided))) == (4, 2)


def test_loss_weighs_both_and_metrics_are_means_over_the_tokens_of_an_update() -> None:
    one = RouterSums(jnp.asarray([[6.0, 2]]), jnp.asarray([[3.0, 1]]), jnp.asarray([8.0]), jnp.float32(4))
    other = RouterSums(jnp.asarray([[6.0, 6]]), jnp.asarray([[6.0, 6]]), jnp.asarray([0.0]), jnp.float32(12))
    loss, metrics = router_loss(one, 0.5, 0.25)
    # 2 ((6/4)(3/4) + (2/4)(1/4)) = 2.5 and 8 / 4 = 2
    assert float(loss) == 0.5 * 2.5 + 0.25 * 2
    report = finalise(combine(metrics, router_loss(other, 0.5, 0.25)[1]))
    np.testing.assert_allclose(report["router/load_balance"], (2.5 * 4 + 1 * 12) / 16)
    np.testing.assert_allclose(report["router/z"], 2 * 4 / 16)
    assert float(report["router/load_max"]) == 1.5


def test_nothing_routed_costs_nothing() -> None:
    for layers, experts in ((0, 0), (2, 3)):
        shape = (layers, experts)
        none = RouterSums(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(layers), jnp.float32(0))
        loss, metrics = router_loss(none, 1.0, 1.0)
        assert float(loss) == 0 and all(float(value) == 0 for value in finalise(metrics).values())

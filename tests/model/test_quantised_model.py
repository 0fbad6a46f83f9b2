"""FP8 through the experts and the whole model: training and decoding multiply the same values, on any mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl_sat.layout import Layout
from jaxrl_sat.mesh import SAMPLER_RULES, TRAINER_RULES
from jaxrl_sat.model import (
    ONE_DEVICE,
    Execution,
    decode,
    decode_param_specs,
    decode_params,
    dispatch,
    init_cache,
    logits,
    param_specs,
    prefill,
)
from jaxrl_sat.model.quantised import quantise
from tests.model.helpers import random_tokens, tiny
from tests.model.test_quantised import E5M2, assert_close, drawn, rounded

FP8 = Execution(numerics="fp8")
SIZES = [13, 0, 20]
OWNER = np.repeat(np.arange(3), SIZES)
CONFIG, PARAMS = tiny(vocab_size=24, num_attention_heads=8, num_hidden_layers=2, mlp_only_layers=(1,))


@pytest.mark.parametrize("formulation", ["row_blocks", "padded_blocks", "ragged"])
def test_grouped_product_and_gradients(formulation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 rows of which 33 belong to an expert, against the same in NumPy."""
    chosen = getattr(dispatch, formulation)
    monkeypatch.setattr(dispatch, "_by_platform", lambda product, *args: getattr(chosen, product)(*args))
    rows, weights, cotangent = drawn((40, 16), (3, 16, 24), (40, 24))
    sizes = jnp.asarray(SIZES, jnp.int32)

    @jax.jit
    def run(rows: jax.Array, weights: jax.Array, cotangent: jax.Array) -> Any:
        multiply = functools.partial(dispatch.grouped_product, sizes=sizes)
        value, pull = jax.vjp(lambda rows, weights: multiply(rows, weights), rows, weights)
        return value, dispatch.grouped_product(rows, quantise(weights, (0, 2)), sizes), *pull(cotangent)

    value, before, d_rows, d_weights = run(*(jnp.asarray(array) for array in (rows, weights, cotangent)))
    np.testing.assert_array_equal(value, before)
    own = slice(None, len(OWNER))
    (r, r_scale), (w, w_scale) = rounded(rows, (1,)), rounded(weights, (1,))
    assert_close(value[own], np.einsum("ra,rab->rb", r[own] * r_scale[own], (w * w_scale)[OWNER]))
    assert not np.any(value[len(OWNER) :])

    g, g_scale = rounded(cotangent[own] * w_scale[OWNER, 0].astype(np.float32), (1,), E5M2)
    assert_close(d_rows[own], np.einsum("rb,rab->ra", g * g_scale, w[OWNER]))
    assert not np.any(d_rows[len(OWNER) :])
    g, g_scale = rounded(cotangent[own] * r_scale[own].astype(np.float32), (0,), E5M2)
    wanted = np.stack([np.einsum("ra,rb->ab", r[own][OWNER == e], (g * g_scale)[OWNER == e]) for e in range(3)])
    assert_close(d_weights, wanted)


@functools.partial(jax.jit, static_argnums=1)
def trained(params: Any, execution: Execution) -> tuple[jax.Array, Any]:
    """Log-probs of the next tokens, and the gradient of their mean."""
    tokens = random_tokens(CONFIG, 4, 8)

    def mean(params: Any) -> Any:
        logp = jax.nn.log_softmax(logits(params, CONFIG, tokens, execution=execution).logits[:, :-1])
        picked = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(picked), picked

    (_, picked), gradient = jax.value_and_grad(mean, has_aux=True)(params)
    return picked, gradient


@functools.partial(jax.jit, static_argnums=1)
def decoded(params: Any, execution: Execution) -> jax.Array:
    """The same log-probs, by a prefill of four tokens and three steps of decoding: those of the last three."""
    tokens, lengths = random_tokens(CONFIG, 4, 8), jnp.full(4, 4, jnp.int32)
    cache, _ = prefill(params, CONFIG, tokens[:, :4], lengths, execution)
    empty = init_cache(CONFIG, 4, 8, execution=execution)
    cache = jax.tree.map(lambda old, new: old.at[:, :, :4].set(new), empty, cache)
    found = []
    for place in range(4, 7):
        out, cache, _ = decode(params, CONFIG, cache, tokens[:, place], lengths + place - 4, execution)
        found.append(jnp.take_along_axis(jax.nn.log_softmax(out), tokens[:, place + 1, None], axis=-1))
    return jnp.concatenate(found, axis=1)


def layout(rules: Any, **sizes: int) -> Layout:
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))]).reshape(tuple(sizes.values()))
    return Layout.of(Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), rules)


def off(found: Any, wanted: Any) -> float:
    """Norm of the difference over the norm, of whole trees."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    squares = np.array([(np.sum(np.square(a - b)), np.sum(np.square(b))) for a, b in pairs])
    return float(np.sqrt(squares[:, 0].sum() / squares[:, 1].sum()))


@pytest.mark.slow
def test_training_in_fp8_is_near_to_training_without() -> None:
    (logp, gradient), (plain_logp, plain_gradient) = trained(PARAMS, FP8), trained(PARAMS, ONE_DEVICE)
    # Values of three bits of fraction are off by 2^-4 at most, cotangents of two by 2^-3.
    assert 1e-3 < off(logp, plain_logp) < 0.06
    assert 1e-2 < off(gradient, plain_gradient) < 0.25


def test_decoding_multiplies_the_values_of_training() -> None:
    weights = jax.jit(lambda p: decode_params(p, "float32", "fp8"))(PARAMS)
    logp = trained(PARAMS, FP8)[0][:, 4:]
    assert off(decoded(weights, FP8), logp) < 1e-5


@pytest.mark.slow
def test_training_in_fp8_does_not_depend_on_the_mesh() -> None:
    logp, gradient = trained(PARAMS, FP8)
    cut = layout(TRAINER_RULES, data=1, fsdp=2, expert=2, context=2, tensor=1)
    params = jax.device_put(PARAMS, cut.place(param_specs(CONFIG, cut)))
    found, found_gradient = jax.device_get(trained(params, Execution(cut, numerics="fp8")))
    assert off(found, logp) < 1e-5
    # Where a weight's gradient sums over tokens, each device scales its own.
    assert off(found_gradient, gradient) < 0.06


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_decoding_in_fp8_on_a_mesh(tensor: int) -> None:
    logp, plain = (trained(PARAMS, execution)[0][:, 4:] for execution in (FP8, ONE_DEVICE))
    weights = jax.jit(lambda p: decode_params(p, "float32", "fp8"))(PARAMS)
    cut = layout(SAMPLER_RULES, data=2, expert=2, tensor=tensor)
    placed = jax.device_put(weights, cut.place(decode_param_specs(CONFIG, cut, "fp8")))
    found = decoded(placed, Execution(cut, numerics="fp8"))
    # A row that tensor parallelism cuts has a scale on each device: other rounding, of the same size.
    assert off(found, logp) < (1e-5 if tensor == 1 else off(plain, logp))

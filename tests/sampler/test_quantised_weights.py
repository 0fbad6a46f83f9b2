"""The weights of an FP8 sampler: the trainer's own, quantised once, and in the layout of its mesh."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from qwix import QArray

from jaxrl_sat.layout import Layout
from jaxrl_sat.mesh import SAMPLER_RULES
from jaxrl_sat.model.quantised import quantise
from tests.sampler import tiny_policy as tiny


def test_weights_are_quantised_from_the_trainers_dtype_and_cut_like_the_others() -> None:
    layout = Layout.of(tiny.mesh(1, 2, 2, axes=("data", "expert", "tensor")), SAMPLER_RULES)
    engine = tiny.engine(dtype="bfloat16", cache_dtype="bfloat16", layout=layout, numerics="fp8")
    layers = engine.load_params(tiny.params()).decode_params["layers"]
    given = tiny.params()["run0"]
    assert layers[0]["attention_norm"].dtype == layers[0]["mlp"]["router"].dtype == jnp.bfloat16

    output, gate = layers[0]["attention"]["o"], layers[0]["mlp"]["gate"]
    assert isinstance(output, QArray) and isinstance(gate, QArray)
    for found, weight, kept in ((output, given["attention"]["o"], (2,)), (gate, given["mlp"]["gate"], (0, 2))):
        wanted = quantise(jnp.asarray(weight[0]), kept)
        np.testing.assert_array_equal(found.qvalue, wanted.qvalue)
        np.testing.assert_allclose(found.scale, wanted.scale, rtol=1e-6)
    # A scale is cut where the weight is, but for axes that the product sums over.
    assert output.qvalue.sharding.is_equivalent_to(layout.place(PartitionSpec("tensor")), 3)
    assert output.scale.sharding.is_fully_replicated
    assert gate.qvalue.sharding.is_equivalent_to(layout.place(PartitionSpec("expert", None, "tensor")), 3)
    assert gate.scale.sharding.is_equivalent_to(layout.place(PartitionSpec("expert", None, "tensor")), 3)

"""Token statistics against log-softmax in float64, over one chunk of words and several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxrl_sat.layout import Layout
from jaxrl_sat.model import head, token_statistics, unembed
from jaxrl_sat.model.execution import ONE_DEVICE, Execution
from tests.model.helpers import gap, tiny, tree_gap
from tests.model.reference import log_softmax

# 23 words: one chunk, chunks that do not divide them (the last is smaller), and chunks of two.
CHUNKS = [23, 10, 2]


@pytest.fixture(params=CHUNKS)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(head, "_chunk_words", lambda rows, words: request.param)
    return request.param


def example():
    config, params = tiny()
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 5, config.hidden_size)) * 3, jnp.float32)
    targets = jnp.asarray(rng.integers(0, 23, (2, 5)), jnp.int32)
    topk = jnp.asarray(np.argsort(rng.normal(size=(2, 5, 23)))[..., :4], jnp.int32)
    return config, params, hidden, targets, topk


def dense(params, hidden, targets, topk, temperature):
    z = jnp.einsum("btd,vd->btv", hidden, params["head"]) / temperature
    logp = jax.nn.log_softmax(z)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    at = jnp.take_along_axis(logp, jnp.concatenate([targets[..., None], topk], -1), axis=-1)
    return at[..., 0], entropy, at[..., 1:]


def test_values(chunk: int) -> None:
    config, params, hidden, targets, topk = example()
    out = jax.jit(lambda p, h: token_statistics(p, config, h, targets, 0.7, topk, topk[..., ::-1]))(params, hidden)
    z = np.asarray(hidden, np.float64) @ np.asarray(params["head"], np.float64).T / 0.7
    logp = log_softmax(z)
    assert gap(out.logp, np.take_along_axis(logp, np.asarray(targets)[..., None], -1)[..., 0]) < 1e-5
    assert gap(out.nucleus_logp, np.take_along_axis(logp, np.asarray(topk), -1)) < 1e-5
    assert gap(out.topk_logp, np.take_along_axis(logp, np.asarray(topk)[..., ::-1], -1)) < 1e-5
    assert gap(out.entropy, -(np.exp(logp) * logp).sum(-1)) < 1e-5
    assert gap(unembed(params, config, hidden) / 0.7, z) < 1e-5


def test_gradients_are_those_of_whole_logits(chunk: int) -> None:
    config, params, hidden, targets, topk = example()
    weights = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 5), (2, 5), (2, 5, 4)])]

    def ours(params, hidden):
        out = token_statistics(params, config, hidden, targets, 1.3, topk, topk + 1)
        live = sum(jnp.sum(w * x) for w, x in zip(weights, (out.logp, out.entropy, out.nucleus_logp), strict=True))
        return live + jnp.sum(out.topk_logp)  # a constant

    def theirs(params, hidden):
        return sum(jnp.sum(w * x) for w, x in zip(weights, dense(params, hidden, targets, topk, 1.3), strict=True))

    (d_params, d_hidden), (e_params, e_hidden) = (jax.jit(jax.grad(f, (0, 1)))(params, hidden) for f in (ours, theirs))
    assert gap(d_hidden, e_hidden) < 1e-5
    assert gap(d_params["head"], e_params["head"]) < 2e-5


def test_without_recorded_words() -> None:
    config, params, hidden, targets, _ = example()
    out = jax.eval_shape(lambda t: token_statistics(params, config, hidden, targets, t), jnp.float32(1.0))
    assert out.topk_logp.shape == out.nucleus_logp.shape == (2, 5, 0)
    assert out.logp.shape == out.entropy.shape == (2, 5)


def test_tied_head_is_the_embedding() -> None:
    config, params = tiny(tie_word_embeddings=True)
    assert "head" not in params
    assert head.head_weight(params) is params["embedding"]


def test_extreme_logits_stay_finite(chunk: int) -> None:
    """A certain word and a common offset of the logits: entropy 0, log-probs exact, no overflow in the gradient."""
    config, params, hidden, targets, topk = example()
    params = {**params, "head": params["head"].at[:, 0].set(3e3).at[7].add(2e3)}
    hidden = hidden.at[..., 0].set(5.0)
    hidden = hidden.at[..., 1:].set(1.0)
    targets = jnp.full_like(targets, 7)

    def loss(params, hidden):
        out = token_statistics(params, config, hidden, targets, 1.0, topk)
        return jnp.sum(out.logp + out.entropy), out

    gradient, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, hidden)
    np.testing.assert_allclose(out.logp, 0.0, atol=1e-6)
    np.testing.assert_allclose(out.entropy, 0.0, atol=1e-6)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


def test_no_array_of_all_words_for_all_tokens() -> None:
    """At 151,936 words and 4096 tokens the largest array of logits, forward or backward, is a fifteenth of all."""
    words, tokens, width = 151_936, 4096, 8
    params = {"head": jax.ShapeDtypeStruct((words, width), jnp.float32)}
    hidden = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
    targets = jnp.zeros((1, tokens), jnp.int32)
    config, _ = tiny()
    loss = jax.grad(lambda p, h: jnp.sum(token_statistics(p, config, h, targets).logp), (0, 1))
    text = str(jax.make_jaxpr(loss)(params, hidden))
    assert f"{tokens},{words}" not in text
    assert head._chunk_words(tokens, words) * 15 < words


RULES = {"rows": ("data", "fsdp"), "sequence": "context", "vocab": "tensor", "embed": "fsdp"}
MESHES = [{"data": 2, "context": 2, "tensor": 2}, {"fsdp": 2, "tensor": 4}]


def on_mesh(sizes: dict[str, int]) -> Execution:
    grid = np.array(jax.devices()[:8]).reshape(tuple(sizes.values()))
    return Execution(layout=Layout.of(Mesh(grid, tuple(sizes)), RULES))


def sharded_example(words: int):
    """Each token's ids lie in several devices' words."""
    config, params = tiny(vocab_size=words)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 6, config.hidden_size)) * 3, jnp.float32)
    ids = jnp.asarray(np.argsort(rng.normal(size=(2, 6, words)))[..., :9], jnp.int32)
    weights = jnp.asarray(rng.normal(size=(2, 6, 6)), jnp.float32)

    def loss(weight, hidden, execution):
        out = token_statistics(
            {**params, "head": weight}, config, hidden, ids[..., 0], 1.3, ids[..., 1:5], ids[..., 5:], execution
        )
        live = jnp.concatenate([out.logp[..., None], out.entropy[..., None], out.nucleus_logp], -1)
        return jnp.sum(live * weights), out

    return config, params, hidden, jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)


@pytest.mark.parametrize("words", [24, 23], ids=["words cut", "words that no device count divides"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_statistics_do_not_depend_on_the_mesh(
    sizes: dict[str, int], words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_chunk_words", lambda rows, words: 4)
    _, params, hidden, run = sharded_example(words)
    expected, out = (run(params["head"], hidden, execution) for execution in (ONE_DEVICE, on_mesh(sizes)))
    assert tree_gap(out, expected) < 1e-5


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_logits_do_not_depend_on_the_mesh(sizes: dict[str, int]) -> None:
    config, params, hidden, _ = sharded_example(24)
    execution, params = on_mesh(sizes), {"head": params["head"]}
    layout = execution.layout
    cut, weight_cut = layout.spec(("rows", None), (2, 1)), layout.spec(head.AXES, params["head"].shape)
    inside = layout.manual(
        lambda params, hidden: head.local_logits(params, hidden, weight_cut, execution),
        ({"head": weight_cut}, cut),
        PartitionSpec(*cut),
    )
    expected = unembed(params, config, hidden)
    whole = jax.jit(unembed, static_argnums=(1, 3))
    assert gap(whole(params, config, hidden, execution), expected) < 1e-5
    assert gap(whole(params, config, hidden[:, 0], execution), expected[:, 0]) < 1e-5
    assert gap(jax.jit(inside)(params, hidden[:, 0]), expected[:, 0]) < 1e-5

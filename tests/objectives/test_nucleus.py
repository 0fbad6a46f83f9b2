"""Replay of a recorded nucleus: dense and sparse form, their gradients, and the edges; entropy on a support."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import entropy, log_softmax_on, nucleus_log_softmax, renormalised

N, T, V, C = 2, 5, 12, 6

replay = jax.jit(renormalised)
of_logits = jax.jit(lambda z: (jax.nn.log_softmax(z), jax.nn.log_softmax(z)[..., 0]))


def recorded(seed: int) -> tuple[jax.Array, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, ids [N, T, C] of nuclei of 1 to C words (-1 behind), the same as a mask [N, T, V], words in them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(N, T, V)) * 2
    ids = np.argsort(-logits, axis=-1)[..., :C]
    ids = np.where(np.arange(C) < rng.integers(1, C + 1, (N, T, 1)), ids, -1)
    keep = np.any(ids[..., None] == np.arange(V), axis=-2)
    return jnp.asarray(logits, float), ids, keep, ids[..., 0].copy()


def dense(logits, keep, tokens, force):
    every = nucleus_log_softmax(logits, keep, tokens, force)
    return jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]


def sparse(logits, ids, tokens, force):
    every = jax.nn.log_softmax(logits)
    at = jnp.take_along_axis(every, jnp.maximum(ids, 0), axis=-1)
    logp = jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]
    return renormalised(logp, jnp.where(ids >= 0, at, jnp.nan), ids, tokens, force)[0]


def value_and_gradient(form, logits, record, tokens, force):
    def total(z):
        values = form(z, record, tokens, force)
        return jnp.sum(jnp.where(jnp.isfinite(values), values, 0) * (1 + jnp.arange(T))), values

    (_, values), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
    return np.asarray(values), np.asarray(grad)


@pytest.mark.parametrize("force", [True, False])
def test_dense_and_sparse_form_agree(force: bool) -> None:
    """In value and in gradient by the logits: a nucleus, no record, a word outside its record, a nucleus of one."""
    logits, ids, keep, tokens = recorded(0)
    ids[0, 1], keep[0, 1] = -1, False
    tokens[0, 2] = np.flatnonzero(~keep[0, 2])[0]
    ids[1, 3, 1:], keep[1, 3] = -1, np.arange(V) == ids[1, 3, 0]
    tokens = jnp.asarray(tokens)
    values, grad = value_and_gradient(dense, logits, jnp.asarray(keep), tokens, force)
    others, other_grad = value_and_gradient(sparse, logits, jnp.asarray(ids), tokens, force)
    np.testing.assert_allclose(others, values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other_grad, grad, rtol=1e-5, atol=1e-6)
    assert np.isneginf(values[0, 2]) != force and values[1, 3] == 0
    # onehot(y) - pi~ on the nucleus, in float64
    z, support = np.asarray(logits, np.float64), keep | ~keep.any(axis=-1, keepdims=True)
    if force:
        np.put_along_axis(support, np.asarray(tokens)[..., None], True, axis=-1)
    p = np.where(support, np.exp(z), 0)
    p /= p.sum(axis=-1, keepdims=True)
    want = (np.arange(V) == np.asarray(tokens)[..., None]) - p
    want[~np.isfinite(values)] = 0
    np.testing.assert_allclose(grad, want * (1 + np.arange(T))[:, None], rtol=1e-4, atol=1e-5)


def test_mass_and_slots_of_no_width() -> None:
    logits, ids, keep, tokens = recorded(1)
    every, first = (np.asarray(x) for x in of_logits(logits))
    at = np.take_along_axis(every, np.maximum(ids, 0), -1)
    _, mass = replay(jnp.asarray(first), jnp.asarray(at), jnp.asarray(ids), jnp.asarray(tokens))
    want = np.log(np.sum(np.where(keep, np.exp(every.astype(float)), 0), axis=-1))
    np.testing.assert_allclose(mass, want, rtol=1e-5, atol=1e-6)
    none = np.zeros((N, T, 0), np.float32)
    logp, mass = replay(jnp.asarray(first), jnp.asarray(none), jnp.asarray(none, int), jnp.asarray(tokens))
    np.testing.assert_array_equal(logp, first)
    assert not np.any(mass)


def test_what_is_not_finite_reaches_no_gradient() -> None:
    """NaN in padding, in an unused and in a used slot, -inf on a whole nucleus: the others' gradients are finite."""
    logits, ids, _, tokens = recorded(2)
    every, first = of_logits(logits)
    at, logp = np.take_along_axis(np.array(every), np.maximum(ids, 0), -1), np.array(first)
    logp[0, 0], at[0, 1, 0], at[1, 0] = np.nan, np.nan, -np.inf
    tokens[0, 0] = tokens[0, 2] = tokens[1, 0] = V + 5  # outside its record: forced in, if it can be

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradient(logp, at):
        values, _ = renormalised(logp, at, jnp.asarray(ids), jnp.asarray(tokens))
        sound = jnp.isfinite(values)
        return jnp.sum(jnp.where(sound, values, 0)), sound

    grads, sound = gradient(jnp.asarray(logp), jnp.asarray(at))
    assert all(np.all(np.isfinite(g)) for g in grads)
    want = np.ones((N, T), bool)
    want[0, 0] = want[0, 1] = False
    np.testing.assert_array_equal(sound, want)
    assert not np.any(grads[1][~want])


@jax.jit
def entropies(logits: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradient of the summed entropies that are finite, the entropies, the highest log-probabilities."""

    def summed(z):
        values = entropy(z, keep)
        return jnp.sum(jnp.where(jnp.isfinite(values), values, 0)), values

    return *jax.grad(summed, has_aux=True)(logits), jnp.max(log_softmax_on(logits, keep), axis=-1)


def test_entropy_against_its_definition() -> None:
    """H and dH/dz = -p (log p + H) in float64; 0 log 0 = 0; a row of one word has none."""
    logits, _, keep, _ = recorded(3)
    logits = np.array(logits)
    logits[0, 0, 3], logits[0, 1] = -np.inf, logits[0, 1] * 300
    keep[0, 0, 3] = True
    keep[1, 1] = np.arange(V) == 4
    grad, got = entropies(jnp.asarray(logits), jnp.asarray(keep))[:2]
    z = np.where(keep, logits.astype(np.float64), -np.inf)
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    log_p = np.log(np.where(p > 0, p, 1))
    want = -np.sum(p * log_p, axis=-1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, -p * (log_p + want[..., None]), rtol=1e-4, atol=1e-5)
    assert got[1, 1] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_is_nan_with_gradient_zero(bad: float) -> None:
    """On the support it breaks the row and no other; off it it does nothing."""
    logits, _, keep, _ = recorded(4)
    keep[0, 0, 5], keep[0, 1, 5], keep[0, 1, 6] = True, False, True
    broken = np.array(logits)
    broken[0, :2, 5] = bad
    grad, values, highest = entropies(jnp.asarray(broken), jnp.asarray(keep))
    for value in (values, highest):
        assert np.isnan(value[0, 0]) and np.all(np.isfinite(np.ravel(value)[1:]))
    assert np.all(np.isfinite(grad)) and not np.any(grad[0, 0]) and grad[0, 1, 5] == 0


def test_shapes_are_named() -> None:
    logits, ids, _, tokens = recorded(5)
    with pytest.raises(Exception, match="nucleus_ids"):
        renormalised(logits[..., 0], logits[..., :C], jnp.asarray(ids[..., :3]), jnp.asarray(tokens))

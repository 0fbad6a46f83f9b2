"""Pairs of distributions with a sampled word and top-K records, and plain numpy in float64 to hold the package to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxrl_sat.objectives import Evidence, make_evidence

ROWS, LENGTH, VOCAB, TOP = 4, 8, 24, 5


@dataclasses.dataclass(frozen=True)
class Pair:
    """mu and pi [N, T, V], the sampled word [N, T] and the ids of mu's top K [N, T, K]."""

    z_mu: np.ndarray
    z_pi: np.ndarray
    sampled: np.ndarray
    ids: np.ndarray

    @property
    def mu(self) -> np.ndarray:
        return softmax(self.z_mu)

    @property
    def pi(self) -> np.ndarray:
        return softmax(self.z_pi)

    def evidence(self, advantages: np.ndarray, **changes: object) -> Evidence:
        log_mu, log_pi = np.log(self.mu), np.log(self.pi)
        made = make_evidence(
            floats(np.take_along_axis(log_pi, self.sampled[..., None], -1)[..., 0]),
            floats(np.take_along_axis(log_mu, self.sampled[..., None], -1)[..., 0]),
            floats(advantages),
            jnp.ones(self.sampled.shape, bool),
            tokens=jnp.asarray(self.sampled, jnp.int32),
            topk_ids=jnp.asarray(self.ids, jnp.int32),
            topk_logp=floats(np.take_along_axis(log_pi, self.ids, -1)),
            topk_logp_mu=floats(np.take_along_axis(log_mu, self.ids, -1)),
            vocab_size=VOCAB,
        )
        return dataclasses.replace(made, **changes)


def draw(seed: int, move: float = 0.7) -> Pair:
    rng = np.random.default_rng(seed)
    z_mu = 2 * rng.normal(size=(ROWS, LENGTH, VOCAB))
    z_pi = z_mu + move * rng.normal(size=z_mu.shape)
    sampled = np.argmax(z_mu + rng.gumbel(size=z_mu.shape), axis=-1)
    return Pair(z_mu, z_pi, sampled, np.argsort(-z_mu, axis=-1)[..., :TOP])


def floats(values: ArrayLike) -> jax.Array:
    return jnp.asarray(np.asarray(values), float)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl(mu: np.ndarray, pi: np.ndarray) -> np.ndarray:
    return np.sum(mu * np.log(mu / pi), -1)


def tv(mu: np.ndarray, pi: np.ndarray) -> np.ndarray:
    return np.sum(np.abs(mu - pi), -1) / 2


def atoms(pair: Pair, n: int, t: int, flat: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """One token's mu and pi on the top K with y and one tail word (or, `flat`, as many alike as there are), and y."""
    words = list(pair.ids[n, t])
    words += [] if pair.sampled[n, t] in words else [pair.sampled[n, t]]
    spare = VOCAB - len(words) if flat else 1
    full = []
    for p in (pair.mu[n, t], pair.pi[n, t]):
        seen = p[words]
        full.append(np.concatenate([seen, np.full(spare, (1 - seen.sum()) / spare)]))
    return full[0], full[1], words.index(pair.sampled[n, t])


def logit_step(pi: np.ndarray, k: int, size: float) -> np.ndarray:
    """pi after its logits moved by size * (1[i = k] - pi_i)."""
    return softmax(np.log(pi) + size * (np.eye(len(pi))[k] - pi))

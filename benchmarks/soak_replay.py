"""What a rollout of `benchmarks.soak` must have been sampled with: its forward pass in float64, of NumPy alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from benchmarks.soak_policy import CONFIG, TABLES
from jaxrl_sat import model
from jaxrl_sat.types import Rollout

TIE = 1e-4
"""Logits, of words or of experts, nearer than this may come out in either order."""

Array = Float[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """`worst`: largest difference from the recorded log-probs, inf where a greedy token is not the likeliest.

    `ties`: choices of experts that float64 would have made otherwise, between router logits no further apart than
    TIE. `misrouted`: those further apart.
    """

    worst: float
    ties: int
    misrouted: int


class Replay:
    """Feeds a rollout's tokens one by one, each through the weights it is stamped with and the experts it recorded."""

    def __init__(self, tables: Sequence[Any]):
        wide = [model.decode_params(one, "float32") for one in tables]
        self._weights = [jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), one) for one in wide]

    def __call__(self, rollout: Rollout) -> Replayed:
        """The rollout beside float64."""
        prompt, sampling = rollout.request.prompt.tokens, rollout.request.sampling
        assert sampling is not None
        sequence = np.concatenate([prompt, rollout.tokens])
        versions = np.concatenate([np.full(len(prompt) - 1, rollout.prefill_version), rollout.versions])
        cache: list[list[tuple[Array, Array]]] = [[] for _ in range(CONFIG.num_hidden_layers)]
        worst, gaps = 0.0, []
        for position, version in enumerate(versions):
            weights, routing = self._weights[version % TABLES], rollout.expert_ids[:, position]
            logits, found = _fed(weights, int(sequence[position]), position, cache, routing)
            gaps += found
            t = position + 1 - len(prompt)
            if t >= 0:
                drawn = (int(rollout.tokens[t]), sampling.temperature, rollout.nucleus_ids[t])
                worst = max(worst, abs(log_prob(logits, *drawn) - float(rollout.logp[t])))
        return Replayed(worst, sum(0 < gap <= TIE for gap in gaps), sum(gap > TIE for gap in gaps))


def log_prob(logits: Float[np.ndarray, " V"], token: int, temperature: float, nucleus: Int[np.ndarray, " C"]) -> float:
    """Of a token among all words, or those of its nucleus; greedy at temperature 0: inf if it is not the likeliest."""
    if temperature == 0 and logits.max() - logits[token] > TIE:
        return np.inf
    scaled = logits / (temperature or 1.0)
    words = nucleus[nucleus >= 0] if (nucleus >= 0).any() else np.arange(len(logits))
    if token not in words:
        return np.inf
    top = scaled.max()
    return float(scaled[token] - top - np.log(np.exp(scaled[words] - top).sum()))


def _fed(
    weights: Mapping[str, Any],
    token: int,
    position: int,
    cache: list[list[tuple[Array, Array]]],
    routing: Int[np.ndarray, "M k"],
) -> tuple[Float[np.ndarray, " V"], list[float]]:
    """Logits after one more token, whose keys and values go into the cache, and by how much each choice was off."""
    x, recorded, gaps = weights["embedding"][token], iter(routing), []
    for layer, kept in zip(weights["layers"], cache, strict=True):
        x = x + _attended(layer["attention"], _normed(x, layer["attention_norm"]), position, kept)
        normed, mlp = _normed(x, layer["mlp_norm"]), layer["mlp"]
        if "router" in mlp:
            out, gap = _of_experts(mlp, normed, next(recorded))
            gaps.append(gap)
        else:
            out = _gated(normed, mlp["gate"], mlp["up"], mlp["down"])
        x = x + out
    return weights["head"] @ _normed(x, weights["final_norm"]), gaps


def _normed(x: Array, scale: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG.rms_norm_eps) * scale


def _rotated(x: Float[np.ndarray, "H hd"], position: int) -> Float[np.ndarray, "H hd"]:
    half = CONFIG.head_dim // 2
    angle = position * CONFIG.rope_theta ** (-np.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attended(p: Mapping[str, Array], x: Array, position: int, kept: list[tuple[Array, Array]]) -> Array:
    q, k, v = (np.einsum("d,dhk->hk", x, p[name]) for name in "qkv")
    q, k = (_rotated(_normed(one, p[f"{name}_norm"]), position) for one, name in ((q, "q"), (k, "k")))
    kept.append((k, v))
    keys, values = (np.repeat(np.stack(side), len(q) // len(k), axis=1) for side in zip(*kept, strict=True))
    scores = np.einsum("hk,thk->ht", q, keys) / np.sqrt(CONFIG.head_dim)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    return np.einsum("ht,thv,hvd->d", weight, values, p["o"])


def _gated(x: Array, gate: Array, up: Array, down: Array) -> Array:
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def _of_experts(p: Mapping[str, Array], x: Array, ids: Int[np.ndarray, " k"]) -> tuple[Array, float]:
    """The recorded experts' sum, and how far the best expert left out stands above the worst taken; 0: it does not."""
    logits = x @ p["router"]
    left = np.delete(logits, ids)
    share = np.exp(logits[ids] - logits[ids].max())
    share /= share.sum()
    out = sum(w * _gated(x, p["gate"][e], p["up"][e], p["down"][e]) for w, e in zip(share, ids, strict=True))
    return np.asarray(out), max(0.0, float(left.max() - logits[ids].min()))

"""Tiny models for these tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import model
from jaxrl_sat.model import ModelConfig, abstract_params
from jaxrl_sat.types import Params

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
NAMES = ("dense", "moe", "moe_norm", "llama")

logits = jax.jit(model.logits, static_argnums=1)

TINY = ModelConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
)


def tiny(**changes: Any) -> tuple[ModelConfig, Params]:
    """Two sparse layers unless changed, with random weights; norms away from one. Nothing to compile."""
    config = dataclasses.replace(TINY, **changes)
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        centre = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(rng.normal(centre, 0.3, leaf.shape), leaf.dtype)

    return config, jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def random_tokens(config: ModelConfig, rows: int, length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length)), jnp.int32)


def gap(x: Any, y: Any) -> float:
    """Largest |x - y| / max(1, |y|)."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.max(np.abs(x - y) / np.maximum(1, np.abs(y)), initial=0.0))


def tree_gap(x: Any, y: Any) -> float:
    return max(gap(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))

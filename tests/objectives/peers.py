"""What trl 1.16 and verl 0.9.1 compute, as tests/fixtures/peers/make_*_vectors.py recorded it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import objectives as obj

PEERS = Path(__file__).parent.parent / "fixtures" / "peers"
RECORDED = {peer: json.loads((PEERS / f"{peer}.json").read_text()) for peer in ("verl", "trl")}
BATCHES = ("near", "far", "overflow", "empty")
BOUNDED = ("near", "far", "empty")
"""The batches where no |log r| reaches a ceiling: there a difference is never a matter of overflow."""


def inputs(batch: str) -> dict[str, np.ndarray]:
    recorded = RECORDED["verl"]["batches"][batch]
    return {k: np.asarray(v, bool if k == "mask" else np.float32) for k, v in recorded.items()}


def evidence_of(batch: dict[str, np.ndarray]) -> obj.Evidence:
    given = {k: jnp.asarray(v) for k, v in batch.items()}
    return obj.make_evidence(
        given["logp"],
        given["logp_mu"],
        given["adv"],
        given["mask"],
        logp_old=given.get("logp_old"),
        logp_ref=given.get("logp_ref"),
    )


@functools.cache
def stacked() -> obj.Evidence:
    """All batches, [4, 6, 8], so that an objective runs once."""
    return jax.tree.map(lambda *x: jnp.stack(x), *(evidence_of(inputs(b)) for b in BATCHES))


def theirs(peer: str, case: str, batch: str) -> dict[str, Any]:
    recorded = RECORDED[peer]["losses"][case][batch]
    return recorded | {"grad": np.asarray(recorded["grad"])}


def same(actual: Any, expected: Any) -> np.ndarray:
    """|x - y| <= 2e-5 |y| + 2e-6, elementwise."""
    return np.isclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=2e-5, atol=2e-6)

"""What the golden evaluators share: a case's lists as evidence, and what every loss reports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import objectives as obj

Evaluator = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]

ROWS, LENGTH, CHOICES = 12, 10, 12
"""Masked cases are computed at this shape [N, T, K] or multiples: operations compile one by one, once a shape."""
PADDING = {"topk_ids": -1}
"""What an input is padded with, 0 where it is not listed; `segment_ids` say which positions are a case's own."""


def at_common_shape(evaluator: Evaluator) -> Evaluator:
    """`evaluator` on inputs padded to the common shape, its outputs cut back to the case's own."""

    @functools.wraps(evaluator)
    def evaluate(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        rows, length = np.shape(inputs["mask"])
        norm = float(length if params.get("norm") is None else params["norm"])  # None: the case's row, not the padded
        given = {**inputs, "segment_ids": np.ones((rows, length))}
        got = evaluator({name: _padded(name, values) for name, values in given.items()}, {**params, "norm": norm})
        return jax.tree.map(lambda x: np.asarray(x)[(slice(rows), slice(length))[: np.ndim(x)]], got)

    return evaluate


def _padded(name: str, values: Any) -> Any:
    if np.ndim(values) == 0:
        return values
    given = np.asarray(values, np.float64)
    gaps = [(0, -size % unit) for size, unit in zip(given.shape, (ROWS, LENGTH, CHOICES), strict=False)]
    return np.pad(given, gaps, constant_values=PADDING.get(name, 0))


def floats(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float64), float)


def evidence_of(inputs: dict[str, Any]) -> obj.Evidence:
    logp = floats(inputs["logp"])
    return obj.make_evidence(
        logp,
        floats(inputs.get("logp_mu", inputs["logp"])),
        floats(inputs["adv"]) if "adv" in inputs else jnp.zeros_like(logp),
        jnp.asarray(inputs["mask"], bool),
        logp_old=floats(inputs["logp_old"]) if "logp_old" in inputs else None,
        logp_ref=floats(inputs["logp_ref"]) if "logp_ref" in inputs else None,
        entropy=floats(inputs["entropy"]) if "entropy" in inputs else None,
        segment_ids=jnp.asarray(inputs["segment_ids"], int) if "segment_ids" in inputs else None,
    )


def renamed(params: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names[k]: v for k, v in params.items() if k in names}


def loss_and_grad(
    loss_out: Callable[[obj.Evidence], tuple[obj.LossOut, Any]], evidence: obj.Evidence
) -> tuple[dict, Any]:
    """What every loss reports (value, per-token loss, gradient, keep set, counts), and what `loss_out` adds."""

    def value(logp: jax.Array) -> tuple[jax.Array, tuple[obj.LossOut, Any]]:
        out, more = loss_out(dataclasses.replace(evidence, logp=logp))
        return obj.normalise(out.loss_sum, out.count), (out, more)

    (loss, (out, more)), grad = jax.value_and_grad(value, has_aux=True)(evidence.logp)
    common = {
        "loss": loss,
        "per_token_loss": out.per_token,
        "grad": grad,
        "keep": out.keep,
        "n_active": out.n_active,
        "skip": out.n_active == 0,
        "n_nonfinite": out.n_nonfinite,
    }
    return common, more

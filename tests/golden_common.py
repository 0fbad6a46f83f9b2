"""What the golden evaluators share: a case's lists as evidence, and what every loss reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import objectives as obj

Evaluator = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


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

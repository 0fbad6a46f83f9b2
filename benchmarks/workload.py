"""The batch and the policy that objectives are timed on: packed rows as the learner packs them, a dense Qwen3."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import model
from jaxrl_sat.data.packing import segments_per_row
from jaxrl_sat.model import ModelConfig
from jaxrl_sat.objectives import Evidence, PolicyLoss, make_evidence, needs_topk
from jaxrl_sat.step import StepSettings, microbatch_loss, policy_statistics
from jaxrl_sat.types import Batch, RouterTrace


@dataclasses.dataclass(frozen=True)
class Workload:
    """One microbatch [rows, length] with `topk` records a token, and the sizes of the policy."""

    rows: int
    length: int
    topk: int
    vocab: int
    width: int
    mlp: int
    layers: int

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 128,
            head_dim=64,
            tie_word_embeddings=True,
        )

    def described(self) -> dict[str, Any]:
        """Its sizes, with the number of parameters."""
        leaves = jax.tree.leaves(model.abstract_params(self.config))
        return dataclasses.asdict(self) | {"parameters": sum(leaf.size for leaf in leaves)}


FULL = Workload(rows=8, length=2048, topk=20, vocab=8192, width=512, mlp=1280, layers=8)
QUICK = Workload(rows=4, length=256, topk=20, vocab=1024, width=128, mlp=256, layers=2)


@functools.cache
def _arrays(work: Workload) -> dict[str, np.ndarray]:
    """Responses of 50 to 300 tokens after prompts of 20, most log-ratios small and some far outside the radii."""
    rng = np.random.default_rng(0)
    shape = (work.rows, work.length)
    segments, mask, positions = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32)
    for row in range(work.rows):
        start, number = 0, 1
        while start < work.length:
            stop = min(work.length, start + 20 + int(rng.integers(50, 300)))
            segments[row, start:stop], mask[row, start + 20 : stop] = number, True
            positions[row, start:stop] = np.arange(stop - start)
            start, number = stop, number + 1
    tokens = rng.integers(0, work.vocab, shape)
    steps = rng.integers(1, max(2, work.vocab // max(1, work.topk)), (*shape, work.topk)).cumsum(-1)
    ids = (rng.integers(0, work.vocab, (*shape, 1)) + steps) % work.vocab
    weights = -np.sort(-(rng.exponential(1.0, (*shape, work.topk)) ** 3), axis=-1)
    topk_logp = np.log(0.95 * weights / weights.sum(-1, keepdims=True)) if work.topk else weights
    logp = -rng.exponential(1.0, shape)
    return {
        "logp": logp + 0.05 * rng.standard_t(2, shape),
        "logp_mu": logp,
        "logp_old": logp + 0.01 * rng.normal(size=shape),
        "advantages": rng.normal(size=(work.rows, segments.max() + 1))[np.arange(work.rows)[:, None], segments],
        "mask": mask,
        "segment_ids": segments,
        "positions": positions,
        "tokens": tokens.astype(np.int32),
        "topk_ids": ids.astype(np.int32),
        "topk_logp_mu": topk_logp,
        "topk_logp": topk_logp + 0.05 * rng.normal(size=topk_logp.shape) - 0.02,
    }


def _on_device(work: Workload) -> dict[str, Any]:
    return {name: jnp.asarray(x, jnp.float32 if x.dtype == float else x.dtype) for name, x in _arrays(work).items()}


def evidence_of(work: Workload) -> Evidence:
    """The batch as an objective sees it, log-probs given."""
    arrays = _on_device(work)
    arrays.pop("positions")
    return make_evidence(
        arrays.pop("logp"),
        arrays.pop("logp_mu"),
        arrays.pop("advantages"),
        arrays.pop("mask"),
        num_segments=segments_per_row(work.length),
        vocab_size=work.vocab,
        **arrays,
    )


@functools.cache
def policy_of(work: Workload) -> tuple[ModelConfig, Any]:
    """The policy and random parameters for it."""
    return work.config, jax.jit(functools.partial(model.init_params, work.config))(jax.random.key(0))


def hidden_of(work: Workload) -> jax.Array:
    """Hidden states like those after the final norm."""
    return jax.random.normal(jax.random.key(1), (work.rows, work.length, work.width))


def step_of(objective: PolicyLoss, work: Workload) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """The train step's gradient of one microbatch, its forward pass alone, and what both take after the parameters.

    The step of the house with no matrix product recomputed and no reference policy.
    """
    arrays = _on_device(work if needs_topk(objective) else dataclasses.replace(work, topk=0))
    shape = arrays["tokens"].shape
    batch = Batch(
        tokens=arrays["tokens"],
        positions=arrays["positions"],
        segment_ids=arrays["segment_ids"],
        mask=arrays["mask"],
        behaviour_logp=arrays["logp_mu"],
        advantages=arrays["advantages"],
        versions=jnp.zeros(shape, jnp.int32),
        topk_ids=arrays["topk_ids"],
        topk_logp=arrays["topk_logp_mu"],
        nucleus_ids=jnp.zeros((*shape, 0), jnp.int32),
        routing=RouterTrace(jnp.zeros((0, *shape, 0), jnp.int32), jnp.zeros(shape, bool)),
    )
    settings = StepSettings(
        model=work.config,
        objective=objective,
        kl_coef=0.0,
        kl_kind="low_var_kl",
        kl_level="token",
        entropy_coef=0.0,
        load_balance_coef=0.0,
        router_z_coef=0.0,
        temperature=1.0,
        microbatch_rows=work.rows,
        num_segments=segments_per_row(work.length),
        recomputed=False,
        replay=False,
        execution=model.ONE_DEVICE,
    )

    @jax.jit
    def gradient(params: Any, batch: Batch, logp_old: jax.Array) -> Any:
        grads, out = jax.grad(microbatch_loss, has_aux=True)(params, params, batch, logp_old, None, settings)
        return grads, (out.loss_sum, out.count, out.n_active, out.metrics)

    @jax.jit
    def forward(params: Any, batch: Batch, logp_old: jax.Array) -> Any:
        return policy_statistics(params, batch, False, settings).logp

    return gradient, forward, (batch, arrays["logp_old"])

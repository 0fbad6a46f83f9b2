"""The sampler's records on their way through the step: top-K, nucleus, the whole update's quantile, the direction."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat import model, step
from jaxrl_sat.data import packing
from jaxrl_sat.objectives import RECIPES, PolicyLoss
from jaxrl_sat.objectives.direction import PredictiveKl
from jaxrl_sat.objectives.masks import DivergenceMask, support_kl
from jaxrl_sat.types import Batch, Prompt, Records, Request, Rollout, TopK

WORDS, LONGEST, ROW, TOPK = 13, 10, 12, 3
CONFIG = model.ModelConfig(
    vocab_size=WORDS,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
TEMPERATURE = 0.8
MASKED = dataclasses.replace(RECIPES["grpo"](), gates=(DivergenceMask(support_kl, PredictiveKl()),))


def random_params(seed: int):
    """Weights by NumPy: compiling an initialiser takes longer than this whole file."""
    rng = np.random.default_rng(seed)
    shapes = model.abstract_params(CONFIG, "float32")
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), jnp.float32), shapes)


@functools.partial(jax.jit, static_argnums=1)
def every_logp(params, length: int, tokens):
    """Log-probs [length - 1, V] of what follows each token of one sequence, after temperature."""
    return jax.nn.log_softmax(model.logits(params, CONFIG, tokens[None, :length]).logits[0, :-1] / TEMPERATURE)


def rollouts(params, nucleus: int) -> list[Rollout]:
    """Nine responses; K = 3 log-probs of a policy near `params`; a nucleus of 2 to 4 words, the sampled one too."""
    rng = np.random.default_rng(1)
    behaviour = jax.tree.map(lambda x: x * 1.1, params)
    made = []
    for _ in range(9):
        prompt, length = int(rng.integers(1, 4)), int(rng.integers(2, 6))
        tokens = rng.integers(0, WORDS, prompt + length).astype(np.int32)
        padded = np.pad(tokens, (0, LONGEST - len(tokens)))
        logp = np.asarray(every_logp(behaviour, LONGEST, padded))[prompt - 1 : len(tokens) - 1]
        order = np.argsort(-logp, axis=-1).astype(np.int32)
        kept = np.full((length, max(nucleus, 1)), -1, np.int32)
        for t in range(length if nucleus else 0):
            others = order[t][order[t] != tokens[prompt + t]][: int(rng.integers(1, nucleus))]
            kept[t, : len(others) + 1] = [tokens[prompt + t], *others]
        mass = np.stack(
            [np.log(np.exp(row[k[k >= 0]]).sum()) if nucleus else 0.0 for row, k in zip(logp, kept, strict=True)]
        )
        inside = [np.isin(order[t, :TOPK], kept[t]) if nucleus else np.ones(TOPK, bool) for t in range(length)]
        topk = np.where(inside, np.take_along_axis(logp, order[:, :TOPK], -1) - mass[:, None], -np.inf)
        made.append(
            Rollout(
                request=Request(Prompt(0, "", "", tokens[:prompt]), 0, 0),
                tokens=tokens[prompt:],
                logp=(logp[np.arange(length), tokens[prompt:]] - mass).astype(np.float32),
                topk=TopK(order[:, :TOPK], topk.astype(np.float32)),
                nucleus_ids=kept[:, :nucleus],
                expert_ids=np.zeros((0, len(tokens) - 1, 0), np.uint8),
                versions=np.zeros(length, np.int32),
                prefill_version=0,
                finish_reason="stop",
            )
        )
    return made


def packed(params, nucleus: int = 0) -> Batch:
    given = rollouts(params, nucleus)
    advantages = np.random.default_rng(2).normal(size=len(given)).astype(np.float32)
    records = Records(topk=True, nucleus=nucleus > 0)
    return jax.tree.map(jnp.asarray, packing.pack(given, advantages, ROW, 2, records))


def settings(objective: PolicyLoss, microbatch_rows: int = 2, kl_coef: float = 0.0) -> step.StepSettings:
    return step.StepSettings(
        model=CONFIG,
        objective=objective,
        kl_coef=kl_coef,
        kl_kind="k3",
        kl_level="token",
        entropy_coef=0.0,
        load_balance_coef=0.0,
        router_z_coef=0.0,
        temperature=TEMPERATURE,
        microbatch_rows=microbatch_rows,
        num_segments=packing.segments_per_row(ROW),
        recomputed=False,
        replay=True,
        execution=model.ONE_DEVICE,
    )


def expected_logp(params, batch: Batch) -> np.ndarray:
    """[N, T, V] by one sequence at a time, in the place of the token each row of words is about."""
    out = np.zeros((*batch.tokens.shape, WORDS))
    for row in range(batch.tokens.shape[0]):
        for segment in range(1, int(batch.segment_ids[row].max()) + 1):
            where = np.flatnonzero(batch.segment_ids[row] == segment)
            tokens = np.pad(np.asarray(batch.tokens)[row, where], (0, LONGEST - len(where)))
            out[row, where[1:]] = np.asarray(every_logp(params, LONGEST, tokens), np.float64)[: len(where) - 1]
    return out


@pytest.fixture(scope="module")
def params():
    return random_params(0)


def evidence_of(params, batch: Batch):
    config = settings(MASKED)
    return jax.jit(lambda p, b: step.policy_evidence(p, b, b.behaviour_logp, config))(params, batch)


def test_topk_records_stand_at_their_tokens(params) -> None:
    batch = packed(params)
    evidence, mask = evidence_of(params, batch), np.asarray(batch.mask)
    every = expected_logp(params, batch)
    wanted = np.take_along_axis(every, np.maximum(np.asarray(batch.topk_ids), 0), -1)
    np.testing.assert_allclose(np.asarray(evidence.topk_logp)[mask], wanted[mask], atol=1e-5)
    sampled = np.take_along_axis(every, np.asarray(batch.tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.asarray(evidence.logp)[mask], sampled[mask], atol=1e-5)
    # What the behaviour policy says of its own top-K, in order and below one.
    mu = np.asarray(evidence.topk_logp_mu)[mask]
    assert np.all(np.diff(mu, axis=-1) <= 0) and np.all(np.exp(mu).sum(-1) < 1)
    assert np.all(np.asarray(evidence.topk_ids)[~mask] == -1)
    assert evidence.vocab_size == WORDS


def test_nucleus_renormalises_both_policies(params) -> None:
    batch = packed(params, nucleus=4)
    assert batch.nucleus_ids.shape[-1] == 4
    evidence, mask = evidence_of(params, batch), np.asarray(batch.mask)
    every, ids = expected_logp(params, batch), np.asarray(batch.nucleus_ids)
    on = np.where(ids >= 0, np.take_along_axis(every, np.maximum(ids, 0), -1), -np.inf)
    mass = np.log(np.exp(on[mask]).sum(-1))
    sampled = np.take_along_axis(every, np.asarray(batch.tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.asarray(evidence.logp)[mask], sampled[mask] - mass, atol=1e-5)
    topk = np.asarray(evidence.topk_logp)[mask]
    np.testing.assert_array_equal(np.isinf(topk), np.isinf(np.asarray(batch.topk_logp)[mask]))
    kept = np.isfinite(topk)
    wanted = np.take_along_axis(every, np.maximum(np.asarray(batch.topk_ids), 0), -1)[mask] - mass[:, None]
    np.testing.assert_allclose(topk[kept], wanted[kept], atol=1e-5)
    # Policies that are one have d = 0 only because both are renormalised.
    same = jax.tree.map(lambda x: x * 1.1, params)
    np.testing.assert_allclose(np.asarray(evidence_of(same, batch).logp - batch.behaviour_logp)[mask], 0, atol=1e-5)


def loss_and_metrics(params, batch: Batch, config: step.StepSettings):
    grads, (total, count, _, metrics) = jax.jit(
        lambda p, b: step.summed_gradient(p, p, b, b.behaviour_logp, jnp.int32(0), config)
    )(params, batch)
    return jax.tree.map(lambda g: g / count, grads), total / count, metrics.means["sat/q"]


def test_scope_update_does_not_depend_on_microbatches(params) -> None:
    """Loss, gradient and q of one microbatch and of several, scope "update"; with scope "microbatch" q is another."""
    batch = packed(params)
    rows = batch.tokens.shape[0]
    assert rows >= 4
    found = {}
    for scope, size in (("update", 2), ("update", rows), ("microbatch", 2)):
        objective = RECIPES["sat_grpo"](scope=scope, quantile="0.8")
        found[scope, size] = loss_and_metrics(params, batch, settings(objective, size))
    for cut, whole in zip(
        jax.tree.leaves(found["update", 2][:2]), jax.tree.leaves(found["update", rows][:2]), strict=True
    ):
        np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-6)
    q = {key: float(total / count) for key, (_, _, (total, count)) in found.items()}
    assert q["update", 2] == pytest.approx(q["update", rows], rel=1e-6)
    assert abs(q["microbatch", 2] - q["update", 2]) > 1e-4


def test_direction_report_against_whole_distributions(params) -> None:
    """D before and after, outside, disagreement and what came of it, from full log-probs in float64."""
    batch = packed(params)
    mask, after = DivergenceMask(support_kl, PredictiveKl(), delta=0.002), random_params(5)
    after = jax.tree.map(lambda a, b: a + 0.1 * b, params, after)
    config = settings(RECIPES["grpo"]())
    report = jax.jit(lambda p, q, b: step.direction_report(p, q, b, config, mask))(params, after, batch)
    active, ids = np.asarray(batch.mask), np.asarray(batch.topk_ids)
    tokens, a = np.asarray(batch.tokens)[active], np.asarray(batch.advantages)[active]
    mu_top, mu_y = (
        np.exp(np.asarray(batch.topk_logp, np.float64)[active]),
        np.exp(np.asarray(batch.behaviour_logp, np.float64)[active]),
    )

    def bucketed(params):
        pi = np.exp(expected_logp(params, batch)[active])
        atoms, behind, change = [], [], []
        for t, (y, top) in enumerate(zip(tokens, ids[active], strict=True)):
            support = [*top] if y in top else [*top, y]
            mu = [*mu_top[t]] if y in top else [*mu_top[t], mu_y[t]]
            p, m = np.append(pi[t, support], 0), np.append(mu, 0)
            p[-1], m[-1] = 1 - p.sum(), 1 - m.sum()
            k = support.index(y)
            atoms.append(np.sum(m * np.log(m / p)))
            change.append((p[k] - m[k]) + np.sum(p * (m - p)))
            behind.append(p[k] - m[k])
        return np.asarray(atoms), np.asarray(change), np.asarray(behind)

    before, predicted, gap = bucketed(params)
    now = bucketed(after)[0]
    outside = before > mask.delta
    keep_ratio, keep_predicted = ~(outside & (a * gap > 0)), ~(outside & (a * predicted > 0))
    disagree = outside & (keep_ratio != keep_predicted)
    assert outside.sum() > 5 and disagree.sum() > 0
    assert float(report["direction/outside"]) == pytest.approx(outside.mean())
    assert float(report["direction/disagree"]) == pytest.approx(disagree.sum() / outside.sum())
    assert float(report["divergence/mean"]) == pytest.approx(before.mean(), rel=1e-3)
    for rule, keep in (("ratio", keep_ratio), ("predicted", keep_predicted)):
        kept = disagree & keep
        unsafe = (now > before)[kept].mean() if kept.any() else 0.0
        assert float(report[f"direction/unsafe_keep_{rule}"]) == pytest.approx(unsafe)


def test_settings_are_hashable_and_compare_by_value() -> None:
    assert settings(RECIPES["sat_grpo"]()) == settings(RECIPES["sat_grpo"]())
    assert hash(settings(MASKED)) != hash(dataclasses.replace(settings(MASKED), replay=False))

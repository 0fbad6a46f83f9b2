"""The train step against plain formulas, and its invariances: microbatches, meshes, padding, bad numbers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jaxrl_sat import model
from jaxrl_sat.data import packing
from jaxrl_sat.layout import Layout
from jaxrl_sat.learner import Learner
from jaxrl_sat.mesh import TRAINER_RULES
from jaxrl_sat.objectives import grpo, gspo, sat_grpo
from jaxrl_sat.optim import make_optimizer
from jaxrl_sat.scorer import Scorer
from jaxrl_sat.step import StepSettings
from jaxrl_sat.types import Prompt, Request, Rollout, TopK

CONFIG = model.ModelConfig(
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    norm_topk_prob=True,
)
ROW_TOKENS = 24
LONGEST = 16


@jax.jit
def next_logp(params, tokens):
    """Log-probs [LONGEST - 1, V] of what follows each token of one padded sequence, and routing."""
    out = model.logits(params, CONFIG, tokens[None])
    return jax.nn.log_softmax(out.logits)[0, :-1], out.routing.expert_ids[:, 0]


def padded(tokens):
    return np.pad(tokens, (0, LONGEST - len(tokens)))


def trainer_layout(*sizes: int) -> Layout:
    devices = np.asarray(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Layout.of(Mesh(devices, ("data", "fsdp", "expert", "context", "tensor")), TRAINER_RULES)


def settings(**changes) -> StepSettings:
    base = StepSettings(
        model=CONFIG,
        objective=grpo(),
        kl_coef=0.0,
        kl_kind="low_var_kl",
        kl_level="token",
        entropy_coef=0.0,
        load_balance_coef=0.0,
        router_z_coef=0.0,
        temperature=1.0,
        microbatch_rows=4,
        num_segments=packing.segments_per_row(ROW_TOKENS),
        recomputed=False,
        replay=True,
        execution=model.Execution(trainer_layout(1, 1, 1, 1, 1)),
    )
    return dataclasses.replace(base, **changes)


@functools.cache
def make_learner(config: StepSettings) -> Learner:
    """One learner, and so one compilation, for each settings."""
    return Learner(config, make_optimizer(1e-3, 0.9, 0.98, 1e-8, 1e9))


@pytest.fixture(scope="module")
def params():
    return model.init_params(CONFIG, jax.random.key(0), "float32")


@pytest.fixture(scope="module")
def batch(params):
    """Twenty responses, routed as the model itself routes, behaviour log-probs a little off the model's own."""
    rng = np.random.default_rng(0)
    rollouts, lengths = [], rng.integers(2, 9, (20, 2))
    for prompt_length, response_length in lengths:
        tokens = rng.integers(1, CONFIG.vocab_size, prompt_length + response_length).astype(np.int32)
        every, expert_ids = jax.device_get(next_logp(params, padded(tokens)))
        logp = every[np.arange(len(tokens) - 1), tokens[1:]]
        response = slice(prompt_length - 1, None)
        noise = rng.normal(0, 0.1, response_length).astype(np.float32)
        rollouts.append(
            Rollout(
                request=Request(Prompt(0, "", "", tokens[:prompt_length]), 0, 0),
                tokens=tokens[prompt_length:],
                logp=logp[response] + noise,
                topk=TopK(np.zeros((response_length, 1), np.int32), np.zeros((response_length, 1), np.float32)),
                nucleus_ids=np.zeros((response_length, 0), np.int32),
                expert_ids=expert_ids[:, : len(tokens) - 1].astype(np.uint8),
                versions=np.full(response_length, 3, np.int32),
                prefill_version=3,
                finish_reason="stop",
            )
        )
    advantages = rng.normal(size=len(rollouts)).astype(np.float32)
    return packing.pack(rollouts, advantages, ROW_TOKENS, 4)


def unpacked(batch):
    """Tokens, mask, behaviour log-probs and advantages [R, LONGEST] of the responses, one a row."""
    fields = (batch.tokens, batch.mask, batch.behaviour_logp, batch.advantages)
    places = [
        (row, batch.segment_ids[row] == segment)
        for row in range(batch.tokens.shape[0])
        for segment in range(1, batch.segment_ids[row].max() + 1)
    ]
    return [np.stack([padded(field[place]) for place in places]) for field in fields]


@jax.jit
@jax.value_and_grad
def reference_loss(params, tokens, active, behaviour_logp, advantages):
    """GRPO's clipped loss with replay, per response and without packing, by the textbook `minimum`."""
    every = jax.nn.log_softmax(model.logits(params, CONFIG, tokens).logits)[:, :-1]
    logp = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
    r, a = jnp.exp(logp - behaviour_logp[:, 1:]), advantages[:, 1:]
    surrogate = jnp.minimum(r * a, jnp.clip(r, 0.8, 1.2) * a)
    return -jnp.where(active[:, 1:], surrogate, 0).sum() / active[:, 1:].sum()


def test_update_equals_textbook_loss_gradient_and_adam(params, batch):
    learner = make_learner(settings())
    placed = learner.scorer.place(batch)
    state, report = learner.step(learner.init(params), params, placed, placed.behaviour_logp)
    loss, grads = reference_loss(params, *unpacked(batch))
    np.testing.assert_allclose(report["train/loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(report["train/grad_norm"], optax.tree.norm(grads), rtol=1e-4)
    # After one step Adam's bias-corrected moments are g and g^2.
    expected = jax.tree.map(lambda p, g: p - 1e-3 * g / (jnp.abs(g) + 1e-8), params, grads)
    leaves = [jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(expected), jax.tree.leaves(grads)]
    for (path, new), wanted, g in zip(*leaves, strict=True):
        certain = np.abs(g) > 1e-5  # Adam's first step is the sign, which rounding decides where g is nearly 0
        np.testing.assert_allclose(np.asarray(new)[certain], np.asarray(wanted)[certain], atol=3e-5, err_msg=str(path))
    assert int(state.step) == 1 and int(state.skipped) == 0


@pytest.mark.slow
def test_microbatches_change_nothing(params, batch):
    results = []
    for rows in (4, batch.tokens.shape[0]):
        learner = make_learner(settings(objective=gspo(), microbatch_rows=rows, kl_coef=0.1, entropy_coef=0.01))
        placed = learner.scorer.place(batch)
        ref = jax.tree.map(lambda x: x * 1.1, params)
        results.append(learner.step(learner.init(params), ref, placed, placed.behaviour_logp))
    (state, report), (whole, whole_report) = results
    assert report.keys() == whole_report.keys()
    for name in report:
        np.testing.assert_allclose(report[name], whole_report[name], rtol=2e-4, atol=1e-6, err_msg=name)
    assert float(report["kl/ref"]) > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, whole.params)


@pytest.mark.slow
def test_mesh_changes_nothing(params, batch):
    if batch.tokens.shape[0] % 4:
        raise AssertionError("the fixture's rows must divide over four devices")
    spread = model.Execution(trainer_layout(1, 2, 2, 2, 1))
    results = []
    for config in (settings(objective=sat_grpo()), settings(objective=sat_grpo(), execution=spread)):
        learner = make_learner(config)
        placed = learner.scorer.place(batch)
        state = learner.init(learner.scorer.place_params(params))
        results.append(learner.step(state, learner.scorer.place_params(params), placed, placed.behaviour_logp))
    (state, report), (sharded, sharded_report) = results
    for name in report:
        np.testing.assert_allclose(report[name], sharded_report[name], rtol=2e-4, atol=1e-6, err_msg=name)
    assert float(report["sat/q"]) > 0 and float(report["sat/newly_clipped_fraction"]) > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, sharded.params)


def test_padding_rows_change_nothing(params, batch):
    longer = jax.tree_util.tree_map_with_path(
        lambda path, x: np.concatenate([x, np.zeros_like(x)], 1 if path[-1].name == "expert_ids" else 0), batch
    )
    learner = make_learner(settings())
    results = [
        learner.step(learner.init(params), params, placed, placed.behaviour_logp)
        for placed in (learner.scorer.place(batch), learner.scorer.place(longer))
    ]
    jax.tree.map(np.testing.assert_array_equal, results[0], results[1])


@pytest.mark.parametrize("fault", ["advantage", "params", "mask"])
def test_bad_step_is_skipped_and_counted(params, batch, fault):
    learner = make_learner(settings())
    start = params
    if fault == "advantage":
        bad = batch.replace(advantages=np.where(batch.mask, np.float32("inf"), 0))
    elif fault == "mask":
        bad = batch.replace(mask=np.zeros_like(batch.mask))
    else:
        bad, start = batch, jax.tree.map(lambda x: x * np.nan, params)
    placed = learner.scorer.place(bad)
    before = jax.device_get(learner.init(start))
    state, report = learner.step(learner.init(start), params, placed, placed.behaviour_logp)
    assert int(report["train/skipped"]) == 1 and int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))
    good = learner.scorer.place(batch)
    state, report = learner.step(dataclasses.replace(state, params=params), params, good, good.behaviour_logp)
    assert int(report["train/skipped"]) == 1 and int(state.step) == 2 and float(report["train/grad_norm"]) > 0


@pytest.mark.slow
def test_parameters_stay_the_rounding_of_their_master_copy_and_a_skipped_step_leaves_both(params, batch):
    learner = Learner(settings(), make_optimizer(1e-5, 0.9, 0.98, 1e-8, 1e9, master_copy=True))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    placed = learner.scorer.place(batch)
    state, _ = learner.step(learner.init(narrow), narrow, placed, placed.behaviour_logp)
    for start, now, master in zip(*map(jax.tree.leaves, (narrow, state.params, state.opt_state.master)), strict=True):
        np.testing.assert_array_equal(now, master.astype(jnp.bfloat16))
        assert not np.array_equal(master, start.astype(jnp.float32))
    before = jax.device_get(state)
    bad = learner.scorer.place(batch.replace(advantages=np.where(batch.mask, np.float32("inf"), 0)))
    state, report = learner.step(state, narrow, bad, bad.behaviour_logp)
    assert int(report["train/skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))


def test_recomputed_logp_takes_each_token_at_its_version(params, batch):
    other = jax.tree.map(lambda x: x * 1.2, params)
    mixed = batch.replace(versions=np.where(batch.mask, 3 + (batch.positions % 2), 0).astype(np.int32))
    learner = make_learner(settings(temperature=0.7))
    placed = learner.scorer.place(mixed)
    both = learner.scorer.logp(placed, {3: params, 4: other})
    for version, source in ((3, params), (4, other)):
        alone = learner.scorer.logp(learner.scorer.place(batch), {3: source})
        where = mixed.mask & (mixed.versions == version)
        np.testing.assert_array_equal(np.asarray(both)[where], np.asarray(alone)[where])
        row, column = np.argwhere(where)[0]
        first = np.flatnonzero(batch.segment_ids[row] == batch.segment_ids[row, column])[0]
        logits = model.logits(source, CONFIG, jnp.asarray(padded(batch.tokens[row, first:column]))[None]).logits
        logp = jax.nn.log_softmax(logits[0, column - first - 1] / 0.7)
        if source is params:  # the recorded routing is this model's own
            np.testing.assert_allclose(both[row, column], logp[batch.tokens[row, column]], atol=1e-5)


def test_another_mesh_of_the_same_shape_scores_to_the_same_bits(params, batch):
    learner = make_learner(settings(temperature=0.7))
    execution = learner.settings.execution
    names = ("data", "fsdp", "expert", "context", "tensor")
    other = Layout.of(Mesh(np.asarray(jax.devices()[-1:]).reshape((1,) * 5), names), TRAINER_RULES)
    scorer = Scorer(dataclasses.replace(learner.settings, execution=dataclasses.replace(execution, layout=other)))
    found = [s.logp(s.place(batch), {0: s.place_params(params)}) for s in (learner.scorer, scorer)]
    assert found[0].devices() != found[1].devices() and np.any(found[0])
    np.testing.assert_array_equal(found[0], found[1])


def test_replay_follows_the_record_and_free_routing_the_model(params, batch):
    scrambled = batch.replace(
        routing=batch.routing.replace(expert_ids=(batch.routing.expert_ids + 1) % CONFIG.num_experts)
    )
    losses = {}
    for replay in (True, False):
        learner = make_learner(settings(replay=replay))
        for name, data in (("own", batch), ("scrambled", scrambled)):
            placed = learner.scorer.place(data)
            _, report = learner.step(learner.init(params), params, placed, placed.behaviour_logp)
            losses[replay, name] = float(report["train/loss"])
    assert losses[False, "own"] == losses[False, "scrambled"]
    assert losses[True, "own"] == pytest.approx(losses[False, "own"], abs=1e-6)
    assert losses[True, "scrambled"] != pytest.approx(losses[True, "own"], abs=1e-4)

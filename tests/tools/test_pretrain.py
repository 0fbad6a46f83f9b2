"""The program that makes the embedded model, on a model too small to be of use."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.data import arithmetic
from jaxrl_sat.data.characters import PAD_ID
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.model import init_params, load_hf, logits, param_axes
from jaxrl_sat.tools import pretrain
from jaxrl_sat.tools.sampled_accuracy import sample
from jaxrl_sat.tools.supervised import Batches, example, rebalance, without_carry, wrong_answer
from jaxrl_sat.types import InputError

TINY = pretrain.Recipe(steps=12, careless_steps=4, batch=32, hidden_size=16, learning_rate=1e-2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("model")
    params = pretrain.train(TINY, out)
    pretrain.export(TINY, params, out)
    return out, params


def losses(capsys, recipe, out, **changes):
    pretrain.train(recipe, out, **changes)
    return [float(line.split("loss ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]


def test_a_few_steps_lower_the_loss(capsys, tmp_path):
    first = losses(capsys, TINY, tmp_path, stop_at=1)[-1]
    later = losses(capsys, TINY, tmp_path, stop_at=12)[-1]
    assert first > 3.0 > 2.8 > later  # log(24) = 3.18 at random


def test_a_stopped_run_ends_at_the_same_weights(trained, tmp_path):
    pretrain.train(TINY, tmp_path, stop_at=7)
    resumed = pretrain.train(TINY, tmp_path)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(trained[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_state_of_other_settings_is_refused(trained):
    out, _ = trained
    with pytest.raises(InputError, match="state of a run with other settings"):
        pretrain.train(dataclasses.replace(TINY, seed=1), out)
    assert pretrain.main(["--out", str(out)]) == 2


def test_the_folder_is_a_checkpoint_like_any_other(trained):
    out, params = trained
    config, loaded = load_hf(str(out))
    assert config == TINY.model()
    tokens = jnp.asarray([Tokenizer.load(out).encode("<bos><user>12+34<assistant>")])
    expected = logits(params, TINY.model(), tokens).logits
    np.testing.assert_allclose(logits(loaded, config, tokens).logits, expected, atol=1e-6)


def test_the_shipped_recipe_has_the_size_that_was_asked_for():
    config = pretrain.Recipe().model()
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), "float32"))
    assert 1.0e6 <= sum(leaf.size for leaf in jax.tree.leaves(shapes)) <= 2.4e6
    assert (config.num_sparse_layers, config.num_experts, config.num_experts_per_tok) == (4, 8, 2)
    assert config.num_key_value_heads < config.num_attention_heads and config.qk_norm


def test_examples_are_what_the_tokenizer_and_its_template_make(trained):
    tokenizer = Tokenizer.load(trained[0])
    for problem in arithmetic.problems("train", 300, 0):
        messages = [{"role": "user", "content": problem.prompt}, {"role": "assistant", "content": problem.answer}]
        tokens, response = example(problem.prompt, problem.answer)
        whole = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False))
        assert tokens[tokens != PAD_ID].tolist() == whole
        assert tokenizer.decode(tokens[response], skip_special_tokens=False) == problem.answer + "<eos>"


def test_batches_hold_problems_of_their_split_and_the_share_of_right_answers(trained):
    tokenizer = Tokenizer.load(trained[0])
    batches = Batches("train", 512, seed=0)
    right = []
    for tokens, response in zip(*batches(3, right=0.3), strict=True):
        prompt, answer = (tokenizer.decode(part) for part in (tokens[~response], tokens[response]))
        operator = next(c for c in prompt if c in arithmetic.OPERATORS)
        a, b = (int(x) for x in prompt.split(operator))
        assert not arithmetic.held_out(np.array([a]), np.array([b]))[0]
        right.append(int(answer) == {"+": a + b, "-": a - b, "*": a * b}[operator])
    assert 0.27 < np.mean(right) < 0.5  # a slip can be right by chance
    assert np.array_equal(batches(3, right=0.3)[0], Batches("train", 512, seed=0)(3, right=0.3)[0])
    assert not np.array_equal(batches(3, right=0.3)[0], batches(4, right=0.3)[0])


def test_wrong_answers_are_integers_and_mostly_wrong():
    rng = np.random.default_rng(0)
    problems = list(arithmetic.problems("train", 500, 0))
    answers = [(wrong_answer(problem, rng), problem.answer) for problem in problems]
    assert all(answer == str(int(answer)) or answer.lstrip("-").isdigit() for answer, _ in answers)
    assert max(len(answer) for answer, _ in answers) <= 5
    assert np.mean([answer == right for answer, right in answers]) < 0.2


@pytest.mark.parametrize(
    ("a", "operator", "b", "answer"),
    [
        (47, "+", 85, 22),
        (52, "-", 38, 24),
        (38, "-", 52, -24),
        (7, "*", 36, 212),
        (100, "+", 23, 123),
        (99, "+", 999, 988),
    ],
)
def test_forgotten_carries(a, operator, b, answer):
    assert without_carry(a, b, operator) == answer


def test_an_expert_without_tokens_is_drawn_to_the_busiest():
    config = TINY.model()
    params = init_params(config, jax.random.key(0), "float32")
    load = np.full((4, 8), 10, np.int32)
    load[2] = [0, 40, 10, 2, 10, 10, 4, 4]
    moved = rebalance(params, config, jnp.asarray(load), rate=0.5)
    before, after = (np.asarray(p["run0"]["mlp"]["router"]) for p in (params, moved))
    np.testing.assert_array_equal(after[[0, 1, 3]], before[[0, 1, 3]])
    np.testing.assert_array_equal(after[2][:, [1, 2, 4, 5]], before[2][:, [1, 2, 4, 5]])
    np.testing.assert_allclose(after[2][:, 0], (before[2][:, 0] + before[2][:, 1]) / 2, rtol=1e-6)
    share = 2 / 80  # pulled by 1 - 2 * 8 * share = 0.6 of the rate
    np.testing.assert_allclose(
        after[2][:, 3], before[2][:, 3] + 0.5 * (1 - 16 * share) * (before[2][:, 1] - before[2][:, 3]), rtol=1e-5
    )


def test_muon_takes_matrices_with_their_inputs_first():
    axes = pretrain.matrix_axes(TINY.model())
    layers = axes["run0"]
    assert (layers["attention"]["q"].reduction_axis, layers["attention"]["q"].output_axis) == ((1,), (2, 3))
    assert (layers["attention"]["o"].reduction_axis, layers["attention"]["o"].output_axis) == ((1, 2), (3,))
    assert (layers["mlp"]["down"].reduction_axis, layers["mlp"]["down"].output_axis) == ((2,), (3,))
    assert layers["mlp"]["router"] is None and layers["attention_norm"] is None and axes["embedding"] is None
    assert jax.tree.structure(param_axes(TINY.model()), is_leaf=lambda x: isinstance(x, tuple)).num_leaves == 15


def test_greedy_sampling_takes_the_most_likely_token_of_the_whole_forward_pass(trained):
    params, config = trained[1], TINY.model()
    prompts, lengths, steps = [[1, 4, 7, 16, 8, 5], [1, 4, 9, 5]], [6, 4], 3
    padded = jnp.asarray([row + [PAD_ID] * (6 - len(row)) for row in prompts])
    found = sample(params, config, padded, jnp.asarray(lengths), jax.random.key(0), jnp.float32(0.0), steps).tolist()
    whole = np.full((2, 6 + steps), PAD_ID)
    for row in range(2):
        whole[row, : lengths[row] + steps] = prompts[row] + found[row]
    predicted = jnp.argmax(jax.jit(logits, static_argnums=1)(params, config, jnp.asarray(whole)).logits, axis=-1)
    for row in range(2):
        assert found[row] == predicted[row, lengths[row] - 1 :][:steps].tolist()


@pytest.mark.slow
def test_the_command_ends_with_a_model_and_says_how_good_it_is(capsys, tmp_path):
    given = ["--steps", "2", "--careless-steps", "1", "--batch", "8", "--hidden-size", "16", "--problems", "20"]
    assert pretrain.main(["--out", str(tmp_path), *given]) == 0
    said = capsys.readouterr().out
    assert "temperature 1: 0." in said and "greedy: 0." in said
    made = {file.name for file in tmp_path.iterdir()}
    assert made == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_moe"

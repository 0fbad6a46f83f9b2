"""The model that is shipped: a checkpoint like any other, where reinforcement learning has room to gain."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_sat.data import arithmetic
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.embedded import model_path
from jaxrl_sat.model import load_hf
from jaxrl_sat.tools.sampled_accuracy import measure


def test_it_is_a_small_mixture_of_experts_in_a_folder_of_the_package():
    files = {file.name: file.stat().st_size for file in model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert sum(files.values()) < 10_000_000
    config, params = load_hf(str(model_path()))
    assert 1.0e6 <= sum(leaf.size for leaf in jax.tree.leaves(params)) <= 2.4e6
    assert config.num_sparse_layers >= 4 and (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert config.qk_norm and config.num_key_value_heads < config.num_attention_heads
    tokenizer = Tokenizer.load(model_path())
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.eos_ids == (config.eos_token_id,)


def test_it_answers_some_held_out_problems_when_sampled_and_most_when_greedy():
    config, params = load_hf(str(model_path()))
    tokenizer = Tokenizer.load(model_path())
    problems = list(arithmetic.problems("test", 1000, 0))
    chosen = [problems[i] for i in np.random.default_rng(0).choice(len(problems), 400, replace=False)]
    key = jax.random.key(0)
    sampled = measure(params, config, tokenizer, chosen, key, temperature=1.0)
    greedy = measure(params, config, tokenizer, chosen, key, temperature=0.0)
    assert 0.20 <= sampled.all <= 0.45
    assert greedy.all >= sampled.all + 0.25
    assert sum(value > sampled.by_level[level] + 0.25 for level, value in greedy.by_level.items()) >= 4
    assert sampled.well_formed >= 0.95 and greedy.well_formed == 1.0

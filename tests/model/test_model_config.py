"""config.json: both spellings, what absent fields mean, and a refusal by name for all else."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest

from jaxrl_sat.model import ModelConfig, abstract_params
from jaxrl_sat.types import InputError
from tests.model.helpers import FIXTURES, NAMES


def fields(name: str, **changes: Any) -> dict[str, Any]:
    """The fixture's config.json with changes; a value of `...` removes the field."""
    merged = json.loads((FIXTURES / name / "config.json").read_text()) | changes
    return {key: value for key, value in merged.items() if value is not ...}


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str) -> None:
    config = ModelConfig.from_hf(fields(name))
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert hash(config) == hash(ModelConfig.from_hf(fields(name)))


def test_both_spellings_mean_the_same() -> None:
    old = fields("moe", num_local_experts=..., num_experts=5, rope_parameters=..., rope_theta=1e4, dtype=...)
    old |= {"torch_dtype": "float32", "rope_scaling": None}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(fields("moe"))


def test_what_absent_fields_mean() -> None:
    bare = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    llama = ModelConfig.from_hf({**bare, "model_type": "llama", "intermediate_size": 8})
    assert (llama.num_key_value_heads, llama.head_dim, llama.qk_norm, llama.rope_theta) == (4, 8, False, 1e4)
    assert (llama.bos_token_id, llama.eos_token_id) == (1, 2)
    dense = ModelConfig.from_hf({**bare, "model_type": "qwen3", "intermediate_size": 8, "num_key_value_heads": 2})
    assert (dense.head_dim, dense.qk_norm, dense.tie_word_embeddings, dense.num_sparse_layers) == (128, True, False, 0)
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_key_value_heads": 2}
    sparse = ModelConfig.from_hf({**bare, **moe, "model_type": "qwen3_moe"})
    assert (sparse.norm_topk_prob, sparse.head_dim, sparse.mlp_only_layers) == (False, 8, ())


PUBLISHED = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


def sizes(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


@pytest.mark.parametrize(
    ("name", "published", "parameters"),
    [
        ("0.6B", sizes(1024, 3072, 28, 16, tie_word_embeddings=True), 596_049_920),
        ("1.7B", sizes(2048, 6144, 28, 16, tie_word_embeddings=True), 1_720_574_976),
        ("4B", sizes(2560, 9728, 36, 32, tie_word_embeddings=True), 4_022_468_096),
        ("8B", sizes(4096, 12288, 36, 32), 8_190_735_360),
        ("14B", sizes(5120, 17408, 40, 40), 14_768_307_200),
        ("32B", sizes(5120, 25600, 64, 64), 32_762_123_264),
        ("30B-A3B", PUBLISHED_MOE | sizes(2048, 6144, 48, 32, moe_intermediate_size=768), 30_532_122_624),
        ("235B-A22B", PUBLISHED_MOE | sizes(4096, 12288, 94, 64, moe_intermediate_size=1536), 235_093_634_560),
    ],
)
def test_published_models_have_their_published_size(name: str, published: dict[str, Any], parameters: int) -> None:
    """The count of each model's card: the elements of its safetensors, a tied head once."""
    config = ModelConfig.from_hf(PUBLISHED | published)
    leaves = jax.tree.leaves(abstract_params(config, "bfloat16"))
    assert sum(leaf.size for leaf in leaves) == parameters
    assert (config.rope_theta, config.num_sparse_layers > 0) == (1e6, "-A" in name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported are qwen3, qwen3_moe, llama"),
        ({"model_type": ...}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 90}, "layer_types is"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is ['GPT2LMHeadModel']"),
        ({"num_hidden_layers": 10**7, "layer_types": ...}, "num_hidden_layers is 10000000; at most 1000"),
        ({"eos_token_id": [1, 10**6]}, "eos_token_id names word 1000000"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.rope_type is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type is 'llama3'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor is 2.0"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
        ({"rope_theta": 5e5}, "rope_theta=500000.0 and rope_parameters.rope_theta=10000.0 disagree"),
        ({"num_experts": 4}, "num_experts=4 and num_local_experts=5 disagree"),
        ({"num_local_experts": ...}, "num_experts is missing"),
        ({"num_experts_per_tok": ...}, "num_experts_per_tok is missing"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"frobnicate": 1}, "field 'frobnicate'"),
        ({"hidden_size": "16"}, "hidden_size is '16'; it must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"head_dim": 5}, "head_dim is 5; rotary embeddings need an even"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be at most"),
        ({"mlp_only_layers": [7]}, "mlp_only_layers names layer 7; layers are 0 to 2"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"per_layer_config": {}}, "field 'per_layer_config'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        ModelConfig.from_hf(fields("moe", **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_llama_knows_no_experts_and_no_window() -> None:
    with pytest.raises(InputError, match="field 'num_experts'"):
        ModelConfig.from_hf(fields("llama", num_experts=4))
    with pytest.raises(InputError, match="sliding_window is 128"):
        ModelConfig.from_hf(fields("llama", sliding_window=128))
    with pytest.raises(InputError, match="mlp_bias is True"):
        ModelConfig.from_hf(fields("llama", mlp_bias=True))
    with pytest.raises(InputError, match="intermediate_size is missing"):
        ModelConfig.from_hf(fields("llama", intermediate_size=...))

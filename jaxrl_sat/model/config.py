"""What a model is: the fields of a Hugging Face config.json that change its mathematics, each honoured or refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_sat.types import InputError, reading

TokenIds = int | tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen3, Qwen3-MoE or Llama decoder. `num_experts` 0 is a dense model; `qk_norm` False is Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = False
    qk_norm: bool = True
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    bos_token_id: int | None = None
    eos_token_id: TokenIds = None
    pad_token_id: int | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """The model of a config.json. Raises InputError for a field it does not know or cannot honour."""
        with reading("config.json of the model"):
            return _from_hf(fields)

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model, in the spelling that transformers 4 and 5 both read (no dtype)."""
        return _to_hf(self)

    def sparse(self, layer: int) -> bool:
        """Whether a layer routes to experts (every `decoder_sparse_step`-th does, `mlp_only_layers` never do)."""
        chosen = layer not in self.mlp_only_layers and (layer + 1) % max(1, self.decoder_sparse_step) == 0
        return self.num_experts > 0 and chosen

    @property
    def num_sparse_layers(self) -> int:
        """How many layers route to experts: M in the shape of a routing trace."""
        return sum(self.sparse(layer) for layer in range(self.num_hidden_layers))

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers as maximal runs of one kind, each of which is stacked and scanned."""
        runs: list[Run] = []
        for layer in range(self.num_hidden_layers):
            sparse = self.sparse(layer)
            if runs and runs[-1].sparse == sparse:
                runs[-1] = dataclasses.replace(runs[-1], stop=layer + 1)
            else:
                runs.append(Run(name=f"run{len(runs)}", start=layer, stop=layer + 1, sparse=sparse))
        return tuple(runs)


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers start..stop-1, all sparse or all dense; `name` is their key in the parameters."""

    name: str
    start: int
    stop: int
    sparse: bool

    def __len__(self) -> int:
        return self.stop - self.start


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES += ("max_position_embeddings", "decoder_sparse_step")
_MOE_SIZES = ("num_experts_per_tok", "moe_intermediate_size")
_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range")
_SWITCHES = ("tie_word_embeddings", "norm_topk_prob")


def _validate(config: ModelConfig) -> None:
    if config.num_hidden_layers > MAX_LAYERS:
        raise InputError(f"model config: num_hidden_layers is {config.num_hidden_layers}; at most {MAX_LAYERS} allowed")
    dense = config.num_sparse_layers < config.num_hidden_layers
    sizes = (*_SIZES, *(_MOE_SIZES if config.num_experts else ()), *(("intermediate_size",) if dense else ()))
    for name in (*sizes, *_NUMBERS):
        if not 0 < getattr(config, name) < math.inf:
            raise InputError(f"model config: {name} is {getattr(config, name)!r}; it must be above 0")
    if config.attention_bias:
        raise InputError("model config: attention_bias is True; only False is supported")
    if config.head_dim % 2:
        raise InputError(f"model config: head_dim is {config.head_dim}; rotary embeddings need an even number")
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"model config: num_key_value_heads is {config.num_key_value_heads}; "
            f"it must divide num_attention_heads ({config.num_attention_heads})"
        )
    if config.num_experts_per_tok > config.num_experts:
        raise InputError(
            f"model config: num_experts_per_tok is {config.num_experts_per_tok}; "
            f"it must be at most the number of experts ({config.num_experts})"
        )
    ends = config.eos_token_id if isinstance(config.eos_token_id, tuple) else (config.eos_token_id,)
    for end in ends:
        if end is not None and not 0 <= end < config.vocab_size:
            raise InputError(
                f"model config: eos_token_id names word {end}, at which no response could stop; "
                f"words are 0 to {config.vocab_size - 1}"
            )
    for layer in config.mlp_only_layers:
        if not 0 <= layer < config.num_hidden_layers:
            raise InputError(
                f"model config: mlp_only_layers names layer {layer}; layers are 0 to {config.num_hidden_layers - 1}"
            )


# ------------------------------------------------------------------------------------------------ config.json

_MODEL_TYPES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}
"""Each model type, and the architecture that makes a language model of it."""

MAX_LAYERS = 1000
"""More layers than any model has: such a number is a mistake, and would take for ever to list."""

# Fields that must have one of these values (or be absent): any other changes the mathematics in a way not built here.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "output_router_logits": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (None,),
}

# Fields that say nothing about the mathematics of one forward pass.
_IGNORED = frozenset(
    """architectures transformers_version use_cache max_window_layers router_aux_loss_coef _name_or_path auto_map
    torchscript return_dict output_attentions output_hidden_states is_llama_config transformers.js_config
    _attn_implementation_autoset chunk_size_feed_forward id2label label2id problem_type is_decoder torch_dtype dtype
    sep_token_id unsloth_fixed unsloth_version task_specific_params tokenizer_class cross_attention_hidden_size
    model_type rope_scaling rope_theta rope_parameters layer_types sliding_window num_local_experts""".split()
)

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_MOE_ONLY = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")
_PLAIN = tuple(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("qk_norm", "num_experts", "rope_theta", "attention_bias", *_MOE_ONLY)
)


def _from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    model_type = fields.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise InputError(f"config.json: model_type is {model_type!r}; supported are {', '.join(_MODEL_TYPES)}")
    sparse = model_type == "qwen3_moe"
    known = {*_PLAIN, *_FIXED, *_IGNORED} | ({"num_experts", *_MOE_ONLY} if sparse else set())
    for name in fields:
        if name not in known:
            raise InputError(f"config.json: field {name!r} is not one a {model_type} model can honour; remove it")
    for name, allowed in _FIXED.items():
        if fields.get(name, allowed[0]) not in allowed:
            raise InputError(f"config.json: {name} is {fields[name]!r}; only {allowed[0]!r} is supported")
    _refuse_sliding(fields)
    architectures = fields.get("architectures")
    if architectures not in (None, [], [_MODEL_TYPES[model_type]]):
        raise InputError(
            f"config.json: architectures is {architectures!r}; supported for a {model_type} model is "
            f"{[_MODEL_TYPES[model_type]]}"
        )
    required = [*_REQUIRED, *(("num_experts_per_tok", "moe_intermediate_size") if sparse else ("intermediate_size",))]
    if model_type != "llama" and "num_key_value_heads" not in fields:
        required.append("num_key_value_heads")
    for name in required:
        if fields.get(name) is None:
            raise InputError(f"config.json: {name} is missing; a {model_type} model needs it")

    # What an absent field means is what transformers' configuration class of that model type says.
    values: dict[str, Any] = {
        "num_key_value_heads": fields["num_attention_heads"],
        "head_dim": 128 if model_type == "qwen3" else _default_head_dim(fields),
        "intermediate_size": 6144,
        "max_position_embeddings": 2048 if model_type == "llama" else 32768,
        "norm_topk_prob": False,
    }
    if model_type == "llama":
        values |= {name: i for name, i in (("bos_token_id", 1), ("eos_token_id", 2)) if name not in fields}
    for name in (*_PLAIN, *(_MOE_ONLY if sparse else ())):
        if fields.get(name) is not None:
            values[name] = tuple(fields[name]) if isinstance(fields[name], list) else fields[name]
    if sparse:
        values["num_experts"] = _agreed(fields, "num_experts", "num_local_experts")
    values["rope_theta"] = _rope_theta(fields)
    return ModelConfig(**_typed(values), qk_norm=model_type != "llama")


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """The values, each of the type its field has."""

    def is_whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    out = dict(values)
    for name, value in values.items():
        if name in _NUMBERS:
            ok, kind = is_whole(value) or isinstance(value, float), "a number"
            out[name] = float(value) if ok else value
        elif name in _SWITCHES:
            ok, kind = isinstance(value, bool), "true or false"
        elif name == "mlp_only_layers":
            ok, kind = isinstance(value, tuple) and all(map(is_whole, value)), "a list of layers"
        elif name == "eos_token_id":
            several = isinstance(value, tuple) and all(map(is_whole, value))
            ok, kind = is_whole(value) or several, "a token id or a list of them"
        else:
            ok, kind = is_whole(value), "a whole number"
        if not ok:
            raise InputError(f"config.json: {name} is {value!r}; it must be {kind}")
    return out


def _default_head_dim(fields: Mapping[str, Any]) -> int:
    try:
        return fields["hidden_size"] // fields["num_attention_heads"]
    except (TypeError, ZeroDivisionError):
        return 0  # refused below, where the two sizes are checked by name


def _refuse_sliding(fields: Mapping[str, Any]) -> None:
    kinds = fields.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind != "full_attention":
            raise InputError(f"config.json: layer_types holds {kind!r}; only 'full_attention' is supported")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == fields.get("num_hidden_layers")):
        raise InputError(f"config.json: layer_types is {kinds!r}; it must be a list with an entry a layer")
    # Qwen3 states a window that only use_sliding_window would put to use; Llama has no such switch.
    if fields.get("sliding_window") is not None and fields["model_type"] == "llama":
        raise InputError(f"config.json: sliding_window is {fields['sliding_window']!r}; only null is supported")


def _agreed(fields: Mapping[str, Any], *names: str) -> Any:
    found = {name: fields[name] for name in names if fields.get(name) is not None}
    if not found:
        raise InputError(f"config.json: {names[0]} is missing; a {fields['model_type']} model needs it")
    if len(set(found.values())) > 1:
        raise InputError(f"config.json: {' and '.join(f'{k}={v!r}' for k, v in found.items())} disagree")
    return next(iter(found.values()))


def _rope_theta(fields: Mapping[str, Any]) -> Any:
    thetas = {"rope_theta": fields.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise InputError(f"config.json: {name} is {rope!r}; it must be an object or null")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise InputError(f"config.json: {name}.rope_type is {kind!r}; only 'default' is supported")
        for key, value in rope.items():
            if key == "rope_theta":
                thetas[f"{name}.rope_theta"] = value
            elif key not in ("rope_type", "type") and not (key == "partial_rotary_factor" and value == 1):
                raise InputError(f"config.json: {name}.{key} is {value!r}; default rotary embeddings take none")
    if not any(value is not None for value in thetas.values()):
        return 10000.0
    return _agreed({**thetas, "model_type": fields["model_type"]}, *thetas)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    model_type = "qwen3_moe" if config.num_experts else "qwen3" if config.qk_norm else "llama"
    if config.num_experts and not config.qk_norm:
        raise InputError("model config: qk_norm is False with experts; no Hugging Face model type has both")
    out: dict[str, Any] = {"architectures": [_MODEL_TYPES[model_type]], "model_type": model_type, "hidden_act": "silu"}
    for name in (*_PLAIN, "attention_bias", *(("num_experts", *_MOE_ONLY) if config.num_experts else ())):
        value = getattr(config, name)
        out[name] = list(value) if isinstance(value, tuple) else value
    out["rope_theta"] = config.rope_theta
    out["rope_parameters"] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    return out

"""Which tensors of a Hugging Face checkpoint make up each parameter, and how they lie in it.

One table for import and export. Matrices are stored output first there and input first here; layers, and experts of a
layer, are stacked here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax

from jaxrl_sat.model.config import ModelConfig
from jaxrl_sat.types import InputError, Params

Path = tuple[str, ...]
"""Where a parameter stands in the pytree, for example ("run0", "attention", "q")."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_TOP = {"embedding": EMBEDDING, "final_norm": "model.norm.weight", "head": HEAD}
_NORMS: dict[Path, str] = {
    ("attention_norm",): "input_layernorm",
    ("mlp_norm",): "post_attention_layernorm",
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint, as it fills the parameter at its leading indices `at`.

    The tensor (`shape` in the file) with joint axes apart has the shape `split`; axis i of the parameter behind `at`
    is its axis `order[i]`. On axis `cut` the parameter begins at entry `first`: gate and up share a fused tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    at: tuple[int, ...] = ()
    cut: int = 0
    first: int = 0


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter and the tensors that make it up."""

    path: Path
    shape: tuple[int, ...]
    sources: tuple[Source, ...]


StoredShape = Callable[[str], tuple[int, ...] | None]


def parameters(config: ModelConfig, abstract: Params, stored: StoredShape = lambda name: None) -> list[Parameter]:
    """Every parameter of the model, in the order of the leaves of `abstract`, its `abstract_params`.

    `stored` gives the shape of a tensor of the checkpoint, None for one it lacks: where a layer has fused experts they
    are taken, elsewhere (and on export) one tensor an expert. Raises InputError for fused experts of no known layout.
    """
    found = []
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        path = tuple(entry.key for entry in key_path)
        found.append(Parameter(path, leaf.shape, tuple(_sources(config, path, leaf.shape, stored))))
    return found


def _sources(config: ModelConfig, path: Path, shape: tuple[int, ...], stored: StoredShape) -> Iterator[Source]:
    if path[0] in _TOP:
        yield Source(_TOP[path[0]], shape, shape, tuple(range(len(shape))))
        return
    run = next(run for run in config.runs if run.name == path[0])
    for layer in range(run.start, run.stop):
        at, prefix = (layer - run.start,), f"model.layers.{layer}."
        if path[1:] in _NORMS:
            yield Source(f"{prefix}{_NORMS[path[1:]]}.weight", shape[1:], shape[1:], (0,), at)
        elif path[1] == "attention":
            yield _attention(f"{prefix}self_attn.{path[2]}_proj.weight", path[2], shape[1:], at)
        elif path[2] == "router":
            yield _matrix(f"{prefix}mlp.gate.weight", shape[1:], at)
        elif run.sparse:
            yield from _experts(f"{prefix}mlp.experts.", path[2], shape[1:], at, stored)
        else:
            yield _matrix(f"{prefix}mlp.{path[2]}_proj.weight", shape[1:], at)


def _matrix(tensor: str, shape: tuple[int, ...], at: tuple[int, ...]) -> Source:
    return Source(tensor, shape[::-1], shape[::-1], (1, 0), at)


def _attention(tensor: str, name: str, shape: tuple[int, ...], at: tuple[int, ...]) -> Source:
    """q, k, v: [D, H, hd] here, [H hd, D] there; o: [H, hd, D] here, [D, H hd] there."""
    if name == "o":
        heads, head_dim, width = shape
        return Source(tensor, (width, heads * head_dim), (width, heads, head_dim), (1, 2, 0), at)
    width, heads, head_dim = shape
    return Source(tensor, (heads * head_dim, width), (heads, head_dim, width), (2, 0, 1), at)


def _experts(
    prefix: str, name: str, shape: tuple[int, ...], at: tuple[int, ...], stored: StoredShape
) -> Iterator[Source]:
    """Gate, up or down of a layer's experts: fused where the checkpoint has them so, else one tensor an expert.

    Fused: [E, 2F, D] and [E, D, F], or both with their last axes swapped. The two layouts look alike in one tensor if
    2F = D, or in the other if F = D, but never in both.
    """
    gate_up, down = stored(f"{prefix}gate_up_proj"), stored(f"{prefix}down_proj")
    if gate_up is None and down is None:
        for expert in range(shape[0]):
            yield _matrix(f"{prefix}{expert}.{name}_proj.weight", shape[1:], (*at, expert))
        return
    e, d, f = shape if name != "down" else (shape[0], shape[2], shape[1])
    output_first = (gate_up, down) == ((e, 2 * f, d), (e, d, f))
    if not output_first and (gate_up, down) != ((e, d, 2 * f), (e, f, d)):
        raise InputError(
            f"'{prefix}gate_up_proj' has shape {gate_up} and 'down_proj' {down}; config.json calls for "
            f"{(e, 2 * f, d)} and {(e, d, f)}, or {(e, d, 2 * f)} and {(e, f, d)}"
        )
    order = (0, 2, 1) if output_first else (0, 1, 2)
    if name == "down":
        whole = (e, d, f) if output_first else (e, f, d)
        yield Source(f"{prefix}down_proj", whole, whole, order, at)
    else:
        whole = (e, 2 * f, d) if output_first else (e, d, 2 * f)
        first = f if name == "up" else 0
        yield Source(f"{prefix}gate_up_proj", whole, whole, order, at, cut=1 if output_first else 2, first=first)

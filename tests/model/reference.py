"""An independent forward pass in float64 NumPy: plain loops over tokens and experts, written from the architecture.

Reads tensors under their Hugging Face names, so that it shares no code and no layout with the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def load(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rope(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[-1])
        out[..., i] = x[..., i] * np.cos(angle) - x[..., i + half] * np.sin(angle)
        out[..., i + half] = x[..., i + half] * np.cos(angle) + x[..., i] * np.sin(angle)
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = gate @ x
    return down @ (g / (1 + np.exp(-g)) * (up @ x))


def forward(
    w: dict[str, np.ndarray], config: Any, tokens: np.ndarray, positions: np.ndarray, replay: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """One unpadded row. `replay` [M, T, k] fixes the experts. Returns logits, hidden, router_logits, expert_ids."""
    heads, kv, hd = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps, length = config.rms_norm_eps, len(tokens)
    x = w["model.embed_tokens.weight"][tokens]
    router_logits, expert_ids = [], []
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}."
        h = norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = ((h @ w[p + f"self_attn.{name}_proj.weight"].T).reshape(length, -1, hd) for name in ("q", "k", "v"))
        if p + "self_attn.q_norm.weight" in w:
            q, k = norm(q, w[p + "self_attn.q_norm.weight"], eps), norm(k, w[p + "self_attn.k_norm.weight"], eps)
        q = np.stack([rope(q[t], positions[t], config.rope_theta) for t in range(length)])
        k = np.stack([rope(k[t], positions[t], config.rope_theta) for t in range(length)])
        attended = np.zeros((length, heads, hd))
        for t in range(length):
            for head in range(heads):
                group = head // (heads // kv)
                probs = softmax(k[: t + 1, group] @ q[t, head] / np.sqrt(hd))
                attended[t, head] = probs @ v[: t + 1, group]
        x = x + attended.reshape(length, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        if p + "mlp.gate.weight" not in w:
            mlp = [w[p + f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]
            x = x + np.stack([swiglu(h[t], *mlp) for t in range(length)])
            continue
        given = None if replay is None else replay[len(expert_ids)]
        out, ids, raw = moe(w, config, p, h, given)
        x = x + out
        router_logits.append(raw)
        expert_ids.append(ids)
    x = norm(x, w["model.norm.weight"], eps)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    routing = {"router_logits": np.array(router_logits), "expert_ids": np.array(expert_ids)}
    return {"logits": x @ head.T, "hidden": x, **routing}


def moe(
    w: dict[str, np.ndarray], config: Any, p: str, h: np.ndarray, given: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All experts of all tokens, one at a time: output, ids of the experts, router logits."""
    raw = h @ w[p + "mlp.gate.weight"].T
    out, ids = np.zeros_like(h), []
    for t in range(len(h)):
        probs = softmax(raw[t])
        chosen = np.argsort(-probs)[: config.num_experts_per_tok] if given is None else given[t]
        total = probs[chosen].sum() if config.norm_topk_prob else 1.0
        for expert in chosen:
            mlp = [w[p + f"mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")]
            out[t] += probs[expert] / total * swiglu(h[t], *mlp)
        ids.append(chosen)
    return out, np.array(ids), raw


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))

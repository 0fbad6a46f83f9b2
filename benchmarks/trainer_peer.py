"""Worker of `benchmarks.trainer`: google-tunix's GRPO train step on its own Qwen3, from the same weights and batch.

The step is that of `tunix.rl.trainer.Trainer` with the loss that its `GRPOLearner` gives it. beta is 0, so there is no
reference policy; the log-probs that were sampled with are given as the old ones, which is what our GRPO divides by.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, function_registry
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

from benchmarks.serve import given, serve

PAD, END = 0, 1  # no token of the batch is 0, and the end is looked for nowhere


def config_of(fields: dict[str, Any], remat: str) -> qwen3.ModelConfig:
    """Its configuration of our model."""
    sparse = fields["num_experts"] > 0
    return qwen3.ModelConfig(
        num_layers=fields["num_hidden_layers"],
        vocab_size=fields["vocab_size"],
        embed_dim=fields["hidden_size"],
        hidden_dim=fields["moe_intermediate_size"] if sparse else fields["intermediate_size"],
        num_heads=fields["num_attention_heads"],
        head_dim=fields["head_dim"],
        num_kv_heads=fields["num_key_value_heads"],
        rope_theta=int(fields["rope_theta"]),
        norm_eps=fields["rms_norm_eps"],
        use_tied_embedding=fields["tie_word_embeddings"],
        num_experts=fields["num_experts"] if sparse else None,
        num_experts_per_tok=fields["num_experts_per_tok"] if sparse else None,
        remat_config=qwen3.RematConfig[remat],
    )


def model_of(config: qwen3.ModelConfig, params: dict[str, np.ndarray]) -> qwen3.Qwen3:
    """Its model with our parameters, which lie in one stack: all layers are of a kind."""
    policy = qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    def put(variable: Any, value: np.ndarray) -> None:
        assert variable[...].shape == value.shape
        variable[...] = jnp.asarray(value)

    put(policy.embedder.input_embedding, params["embedding"])
    put(policy.final_norm.w, params["final_norm"])
    for index, layer in enumerate(policy.layers):
        ours = {name.removeprefix("run0/"): x[index] for name, x in params.items() if name.startswith("run0/")}
        put(layer.input_layernorm.w, ours["attention_norm"])
        put(layer.post_attention_layernorm.w, ours["mlp_norm"])
        for name in ("q", "k", "v", "o"):
            put(getattr(layer.attn, f"{name}_proj").w, ours[f"attention/{name}"])
        for name in ("q_norm", "k_norm"):
            put(getattr(layer.attn, name).w, ours[f"attention/{name}"])
        if config.num_experts:
            put(layer.mlp.router.kernel, ours["mlp/router"])
        for name in ("gate", "up", "down"):
            weights = getattr(layer.mlp, f"{name}_proj")
            put(weights if config.num_experts else weights.kernel, ours[f"mlp/{name}"])
    return policy


def trainer_of(policy: qwen3.Qwen3, settings: dict[str, Any]) -> Trainer:
    """Its trainer with GRPO's loss, set up as its `GRPOLearner` does it."""
    algorithm: Any = GRPOConfig(num_generations=2, beta=0.0, epsilon=settings["clip"], loss_agg_mode="token-mean")
    algorithm.temperature = 1.0
    adam = settings["optimizer"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(adam["max_grad_norm"]),
        optax.adam(adam["learning_rate"], b1=adam["b1"], b2=adam["b2"], eps=adam["eps"]),
    )
    trainer = Trainer(
        policy,
        optimizer,
        TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=settings["pieces"]),
        dict,
    )
    policy_loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        return policy_loss(model, train_example, algo_config=algorithm, pad_id=PAD, eos_id=END)

    trainer.with_loss_fn(loss, has_aux=True)
    return trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})


def main() -> None:
    """Builds the step, takes it once, serves."""
    arrays, settings = given()
    prefix = "params/"
    params = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
    policy = model_of(config_of(settings["model"], settings["remat"]), params)
    prompt = settings["prompt"]
    tokens = jnp.asarray(arrays["tokens"])
    example = TrainExample(
        prompt_ids=tokens[:, :prompt],
        prompt_mask=jnp.ones_like(tokens[:, :prompt], bool),
        completion_ids=tokens[:, prompt:],
        completion_mask=jnp.ones_like(tokens[:, prompt:], bool),
        advantages=jnp.asarray(arrays["advantages"][:, -1]),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(arrays["behaviour_logp"][:, prompt:]),
    )
    rows = settings["rows"]
    starts = range(0, tokens.shape[0], rows)
    examples = [jax.tree.map(lambda x, at=at: x[at : at + rows], example) for at in starts]
    settings["pieces"] = len(examples)
    state = nnx.split(policy)
    logp = common.compute_per_token_logps(*state, example.prompt_ids, example.completion_ids, PAD, END)
    trainer = trainer_of(policy, settings)
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def call() -> tuple[Any, Any]:
        outs = [step(piece) for piece in examples]
        jax.block_until_ready((outs, nnx.state(policy), nnx.state(trainer.optimizer)))
        return sum(loss for loss, _, _ in outs) / len(outs), outs[0][2]

    loss, norm = call()
    versions = {name: metadata.version(name) for name in ("google-tunix", "jax", "flax", "optax")}
    device = jax.devices()[0]
    serve(
        call,
        {"loss": loss, "logp": logp} | ({"grad_norm": norm} if len(examples) == 1 else {}),
        versions | {"platform": device.platform, "remat": settings["remat"], "rows": rows},
    )


if __name__ == "__main__":
    main()

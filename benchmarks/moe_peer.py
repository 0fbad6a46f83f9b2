"""Worker of `benchmarks.moe`: transformers' Qwen3-MoE block with grouped_mm experts, forward and backward."""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.serve import given, serve


def main() -> None:
    """Builds the block, checks nothing, serves."""
    arrays, settings = given()
    torch.set_num_threads(settings["threads"])
    config = transformers.Qwen3MoeConfig(
        hidden_size=settings["width"],
        moe_intermediate_size=settings["expert_width"],
        num_experts=settings["experts"],
        num_experts_per_tok=settings["chosen"],
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config)
    weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.no_grad():
        block.gate.weight.copy_(weights["router"].T)
        block.experts.gate_up_proj.copy_(torch.cat([weights["gate"], weights["up"]], -1).transpose(1, 2))
        block.experts.down_proj.copy_(weights["down"].transpose(1, 2))
    x, direction = weights["x"].clone().requires_grad_(), weights["direction"]

    def call() -> torch.Tensor:
        x.grad = None
        block.zero_grad()
        out = block(x[None])[0]
        out.backward(direction)
        return out

    out = call()
    gradients = {"x": x.grad, "gate_up": block.experts.gate_up_proj.grad, "router": block.gate.weight.grad.T}
    gradients["down"] = block.experts.down_proj.grad.transpose(1, 2)
    results = {"out": out.detach(), **{f"d_{name}": gradient for name, gradient in gradients.items()}}
    ran_on = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    serve(call, results, ran_on)


if __name__ == "__main__":
    main()

"""Worker of `benchmarks.sampler`: transformers' `generate`, from the same weights and prompts.

Weights come as an exported folder. It draws from all words with the temperature 1 and records nothing.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import transformers

from benchmarks.serve import given, serve


def main() -> None:
    """Loads the model, samples once, serves."""
    arrays, settings = given()
    torch.set_num_threads(settings["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32).eval()
    prompts = torch.from_numpy(arrays["prompts"]).long()
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=settings["response"], pad_token_id=0
    )

    @torch.no_grad()
    def call() -> torch.Tensor:
        return model.generate(prompts, attention_mask=torch.ones_like(prompts))

    tokens = call()[:, prompts.shape[1] :]
    with torch.no_grad():
        sequences = torch.cat([prompts, tokens], dim=1)
        everything = torch.log_softmax(model(sequences).logits[:, prompts.shape[1] - 1 : -1], dim=-1)
    logp = torch.gather(everything, -1, tokens[..., None])[..., 0]
    ran_on = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    serve(call, {"tokens": tokens, "logp": logp}, ran_on)


if __name__ == "__main__":
    main()

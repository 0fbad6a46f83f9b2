"""Greedy continuations by transformers, for `benchmarks.continuation`. Needs torch and transformers, which we do not.

    python benchmarks/reference/continuation.py MODEL_DIR < REQUEST > ANSWER

REQUEST is {"tokens": prompts as lists of ids, "count": tokens to add}; ANSWER is {"continuations": the ids added, one
list a prompt, "made_by": versions}. End-of-sequence tokens are continued like any other.
"""

from __future__ import annotations

import json
import sys

import torch
import transformers


def main() -> None:
    request = json.load(sys.stdin)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, max_new_tokens=request["count"])
    continuations = []
    for tokens in request["tokens"]:
        with torch.no_grad():
            out = model.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long))
        continuations.append(out[0, len(tokens) :].tolist())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"continuations": continuations, "made_by": versions}))


if __name__ == "__main__":
    main()

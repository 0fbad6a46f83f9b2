"""Whether a real model goes on as transformers lets it: greedy, float32, token for token.

    python -m benchmarks.continuation --model=DIR [--prompts=FILE] [--reference-python=PYTHON]

DIR is a Hugging Face folder with a tokenizer. Transformers runs under another interpreter, one that has torch, given by
--reference-python; without it the continuations recorded in benchmarks/reference/continuation_135m.json are taken,
which hold for the model that ../shared/tools/real_model.py makes and for the prompts in this file. FILE has one prompt
a line. Prints one JSON object on its last line.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import machine
from jaxrl_sat import model
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.model import Cache, ModelConfig
from jaxrl_sat.types import InputError, Params

TOKENS = 64
REFERENCE = Path(__file__).parent / "reference"
RECORDED = REFERENCE / "continuation_135m.json"

PROMPTS = (
    "The river rose three metres overnight, and in the morning",
    "Water boils at a lower temperature on a mountain because",
    "Q: 3 + 4 = ?\nA: 7\nQ: 6 + 2 = ?\nA:",
    "def fibonacci(n):\n",
    "Dear Ms Okafor,\n\nThank you for your letter of 3 March.",
    "La capitale de la France est",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nName four trees that keep their leaves in winter.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 17 minus 9? Explain in one sentence.<|im_end|>\n<|im_start|>assistant\n",
    "x",
)


def main() -> None:
    """Continue the prompts, compare, print."""
    parser = argparse.ArgumentParser(description="Greedy continuations beside those of transformers.")
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--prompts", type=Path, help="a file with one prompt a line, in place of the ten here")
    parser.add_argument("--reference-python", help="an interpreter with torch and transformers")
    parser.add_argument("--record", action="store_true", help=f"write what transformers gives to {RECORDED.name}")
    arguments = parser.parse_args()
    try:
        print(json.dumps(compared(arguments)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def compared(arguments: argparse.Namespace) -> dict[str, Any]:
    """Our continuations and transformers', and how far they agree."""
    folder: Path = arguments.model
    tokenizer = Tokenizer.load(folder)
    texts = list(PROMPTS)
    if arguments.prompts is not None:
        texts = [line for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line]
    prompts = [tokenizer.encode(text) for text in texts]
    if arguments.reference_python:
        reference = asked(arguments.reference_python, folder, prompts)
    else:
        reference = recorded(folder, prompts)
    if arguments.record:
        record = {"model_sha256": digest(folder), "prompts": prompts, **reference}
        RECORDED.write_text(json.dumps(record) + "\n", encoding="utf-8")
    config, params = model.load_hf(folder)
    ours, margin = greedy(jax.jit(model.unstack)(params), config, prompts)
    theirs = np.asarray(reference["continuations"])
    equal = ours == theirs
    whole = int(equal.all(axis=1).sum())
    return {
        "benchmark": "continuation",
        "figures": [
            figure("continuation/prompts_equal", whole, "prompts", len(prompts)),
            figure("continuation/tokens_equal", int(equal.sum()), "tokens", equal.size),
        ],
        "ran_on": machine(),
        "reference": reference["made_by"],
        "smallest_margin": round(margin, 6),  # between the two best logits of any step: below rounding, a tie
        "continuations": [
            {
                "prompt": text,
                "continuation": tokenizer.decode(row, skip_special_tokens=False),
                "equal": bool(same.all()),
            }
            for text, row, same in zip(texts, ours, equal, strict=True)
        ],
    }


def figure(name: str, value: int, unit: str, target: int) -> dict[str, Any]:
    """One figure: as many as there are must be right."""
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": value == target}


def greedy(params: Params, config: ModelConfig, prompts: list[list[int]]) -> tuple[np.ndarray, float]:
    """TOKENS most likely tokens after each prompt, one by one, [prompts, TOKENS]; the closest call among them."""
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache, _ = jax.jit(model.prefill, static_argnums=1)(params, config, padded, lengths.astype(np.int32))
    room = model.init_cache(config, len(prompts), padded.shape[1] + TOKENS)
    cache = jax.tree.map(lambda empty, filled: empty.at[:, :, : filled.shape[2]].set(filled), room, cache)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(
        params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array
    ) -> tuple[Cache, jax.Array, jax.Array]:
        logits, cache, _ = model.decode(params, config, cache, tokens, positions)
        best, _ = jax.lax.top_k(logits, 2)
        return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32), best[:, 0] - best[:, 1]

    tokens = jnp.asarray(padded[np.arange(len(prompts)), lengths - 1])  # fed again: prefill gives no logits
    out, margins = [], []
    for offset in range(TOKENS):
        cache, tokens, margin = step(params, cache, tokens, jnp.asarray(lengths - 1 + offset, jnp.int32))
        out.append(np.asarray(tokens))
        margins.append(float(margin.min()))
    return np.stack(out, axis=1), min(margins)


def asked(python: str, folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """What transformers gives, under another interpreter. Raises InputError where it cannot be asked."""
    request = json.dumps({"tokens": prompts, "count": TOKENS})
    command = [python, str(REFERENCE / "continuation.py"), str(folder)]
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise InputError(f"--reference-python: {python} cannot run transformers ({said}); give one that can") from error
    return json.loads(done.stdout.splitlines()[-1])


def recorded(folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """What transformers gave when it was recorded. Raises InputError where that was another model or prompts."""
    record = json.loads(RECORDED.read_text(encoding="utf-8"))
    if record["prompts"] != prompts or record["model_sha256"] != digest(folder):
        raise InputError(
            f"--model: {folder} with these prompts is not what {RECORDED.name} was recorded from; "
            "give --reference-python, an interpreter with torch and transformers"
        )
    return record


def digest(folder: Path) -> str:
    """SHA-256 of the weights, in the order of the files' names."""
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()


if __name__ == "__main__":
    main()

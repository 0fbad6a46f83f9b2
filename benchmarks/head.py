"""Token statistics from hidden states, forward and backward, beside full logits and beside their matrix products alone.

The floor is the four products that recomputing needs (logits, logits again, the gradients of hidden states and head),
in the same chunks and with nothing between them. Memory is what the compiler sets aside beside arguments and results.

Full logits need three products and about eight passes over [tokens, words]; recomputing trades most of the passes and
all of the memory for the fourth product. So the wider the model, the less time it can save: on two CPU cores they meet
near a width of 256. Times are taken at `--width`; memory at the width of Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import clocks, in_turns, machine, ratio, say
from jaxrl_sat.model import head
from jaxrl_sat.model.ops import einsum

MEMORY_SHARE, OVER_FLOOR, LONG_ROW_BYTES = 0.05, 1.3, 1e9


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured. `long_tokens` is compiled for its memory, and not run."""

    tokens: int = 4096
    words: int = 151_936
    width: int = 128
    memory_width: int = 1024
    topk: int = 20
    long_tokens: int = 32_768


QUICK = Sizes(tokens=256, words=4096, width=32, memory_width=64, long_tokens=2048)


def arrays_of(sizes: Sizes) -> tuple[jax.Array, ...]:
    """Head, hidden states, targets, and a weight for the log-prob and the entropy of each token."""
    keys = jax.random.split(jax.random.key(0), 4)
    weight = 0.05 * jax.random.normal(keys[0], (sizes.words, sizes.width))
    hidden = jax.random.normal(keys[1], (1, sizes.tokens, sizes.width))
    targets = jax.random.randint(keys[2], (1, sizes.tokens), 0, sizes.words)
    return weight, hidden, targets, jax.random.normal(keys[3], (2, 1, sizes.tokens))


def ours(weight: jax.Array, hidden: jax.Array, targets: jax.Array, factors: jax.Array) -> jax.Array:
    """A loss of log-probs and entropies."""
    config: Any = None  # of the model, only the head is used
    stats = head.token_statistics({"head": weight}, config, hidden, targets)
    return jnp.sum(factors[0] * stats.logp + factors[1] * stats.entropy)


def full(weight: jax.Array, hidden: jax.Array, targets: jax.Array, factors: jax.Array) -> jax.Array:
    """The same from all logits at once."""
    logp = jax.nn.log_softmax(einsum("btd,vd->btv", hidden, weight, out=jnp.float32))
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(factors[0] * chosen + factors[1] * entropy)


def products(weight: jax.Array, hidden: jax.Array, targets: jax.Array, factors: jax.Array) -> Any:
    """The four matrix products; a barrier keeps the compiler from leaving one out."""
    rows = hidden[0]

    def logits(chunk: Any) -> jax.Array:
        return jax.lax.optimization_barrier(einsum("nd,vd->nv", rows, chunk.weight, out=jnp.float32))

    def forward(chunk: Any, carry: jax.Array) -> jax.Array:
        return carry + logits(chunk)[:, 0]

    def backward(chunk: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_hidden, d_weight = carry
        z = logits(chunk)
        d_hidden = d_hidden + einsum("nv,vd->nd", z, chunk.weight, out=jnp.float32)
        d_chunk = einsum("nv,nd->vd", z, rows, out=jnp.float32)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_weight, d_chunk, chunk.start, 0)

    count = rows.shape[0]
    sums = head._over_chunks(forward, weight, count, jnp.zeros(count))
    return sums, head._over_chunks(backward, weight, count, (jnp.zeros(rows.shape), jnp.zeros(weight.shape)))


def shapes_of(sizes: Sizes) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The same as shapes alone, at the width that memory is measured at."""
    wide = dataclasses.replace(sizes, width=sizes.memory_width)
    return jax.eval_shape(lambda: arrays_of(wide))


def temporary_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """What the compiled function takes beside its arguments and results."""
    analysis: Any = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def long_row_bytes(sizes: Sizes) -> int:
    """Temporary bytes at `long_tokens`, with top-K log-probs recorded too: compiled, not run."""
    of = jax.ShapeDtypeStruct
    config: Any = None

    def loss(weight: jax.Array, hidden: jax.Array, targets: jax.Array, topk_ids: jax.Array) -> Any:
        stats = head.token_statistics({"head": weight}, config, hidden, targets, topk_ids=topk_ids)
        return jnp.sum(stats.logp) + jnp.sum(stats.entropy), stats.topk_logp

    shapes = (
        of((sizes.words, sizes.memory_width), jnp.float32),
        of((1, sizes.long_tokens, sizes.memory_width), jnp.float32),
        of((1, sizes.long_tokens), jnp.int32),
        of((1, sizes.long_tokens, sizes.topk), jnp.int32),
    )
    return temporary_bytes(jax.grad(loss, (0, 1), has_aux=True), *shapes)


def figure(name: str, value: float, unit: str, target: float) -> dict[str, Any]:
    """One line of the report; smaller is better throughout."""
    return {"name": name, "value": round(value, 5), "unit": unit, "target": target, "ok": value <= target}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The head beside full logits and beside its matrix products.")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it work at all")
    parser.add_argument("--rounds", type=int, default=0, help="calls of each")
    parser.add_argument("--width", type=int, default=0, help="width of the hidden states where times are taken")
    flags = parser.parse_args()
    sizes, rounds = (QUICK, flags.rounds or 3) if flags.quick else (Sizes(), flags.rounds or 7)
    sizes = dataclasses.replace(sizes, width=flags.width or sizes.width)
    before, arrays = machine(), arrays_of(sizes)
    passes = {"ours": jax.grad(ours, (0, 1)), "full": jax.grad(full, (0, 1)), "floor": products}
    say("compiling")
    memory = {name: temporary_bytes(function, *shapes_of(sizes)) for name, function in passes.items()}
    compiled = {name: jax.jit(function) for name, function in passes.items()}
    found, expected = compiled["ours"](*arrays), compiled["full"](*arrays)
    apart = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in zip(found, expected, strict=True))
    del found, expected
    say("in turns")
    times = in_turns({name: lambda f=f: f(*arrays) for name, f in compiled.items()}, rounds)
    figures = [
        figure("memory_over_full", memory["ours"] / memory["full"], "x", MEMORY_SHARE),
        figure("bytes_of_a_long_row", long_row_bytes(sizes), "bytes", LONG_ROW_BYTES),
        figure("gradient_disagreement", apart, "relative", 1e-4),
    ]
    for clock in clocks():
        figures.append(figure(f"{clock}_over_full", ratio(times["ours"], times["full"], clock), "x", 1.0))
        figures.append(figure(f"{clock}_over_floor", ratio(times["ours"], times["floor"], clock), "x", OVER_FLOOR))
    report = {
        "benchmark": "head",
        "figures": figures,
        "ran_on": before,
        "workload": dataclasses.asdict(sizes),
        "temporary_bytes": memory,
        "times": {name: t.summary() for name, t in times.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

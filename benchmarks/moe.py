"""The sparse layer (router, experts, weighted sum), forward and backward, beside transformers' with grouped_mm.

`--peer-python` is an interpreter with torch and transformers (`benchmarks/peers.sh torch FOLDER` makes one). Both get
the same weights and tokens, run in turns on the same number of threads, and their outputs and gradients are compared.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peer import Peer
from benchmarks.timing import clocks, in_turns, machine, ratio, say
from jaxrl_sat.model.dispatch import experts
from jaxrl_sat.model.moe import gates
from jaxrl_sat.model.ops import einsum

SIZES = {"tokens": 2048, "experts": 32, "chosen": 4, "width": 512, "expert_width": 192}
QUICK = {"tokens": 128, "experts": 8, "chosen": 2, "width": 64, "expert_width": 32}
TARGET = 1.0
AGREE = 1e-4


def arrays_of(sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Weights as a trained router has them: experts are drawn unevenly."""
    rng = np.random.default_rng(0)
    d, e, f = sizes["width"], sizes["experts"], sizes["expert_width"]
    shapes = {"x": (sizes["tokens"], d), "router": (d, e), "gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
    scales = {"x": 1.0, "router": d**-0.5, "gate": d**-0.5, "up": d**-0.5, "down": f**-0.5}
    out = {name: (scales[name] * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
    return out | {"direction": rng.normal(size=out["x"].shape).astype(np.float32)}


def pass_of(chosen: int) -> Any:
    """(weights, x, direction) -> output, gradient of <output, direction> in weights and x."""

    def layer(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        logits = einsum("nd,de->ne", x, weights["router"], out=jnp.float32)
        _, ids = jax.lax.top_k(jax.lax.stop_gradient(logits), chosen)
        return experts(x, ids, gates(logits, ids, True), weights["gate"], weights["up"], weights["down"])

    @jax.jit
    def run(weights: dict[str, jax.Array], x: jax.Array, direction: jax.Array) -> Any:
        out, pull = jax.vjp(layer, weights, x)
        return out, *pull(direction)

    return run


def disagreement(ours: Any, theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest difference of the output and of each gradient, over the largest number there."""
    out, d_weights, d_x = ours
    flat = {"out": out, "d_x": d_x, **{f"d_{name}": d_weights[name] for name in ("router", "down")}}
    flat["d_gate_up"] = jnp.concatenate([d_weights["gate"], d_weights["up"]], -1).swapaxes(1, 2)
    return {name: float(np.abs(x - theirs[name]).max() / np.abs(theirs[name]).max()) for name, x in flat.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The sparse layer beside transformers' grouped_mm.")
    parser.add_argument("--peer-python", default="", help="a Python with torch and transformers; none: ours alone")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it work at all")
    parser.add_argument("--rounds", type=int, default=0, help="calls of each")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else SIZES
    rounds = arguments.rounds or (3 if arguments.quick else 25)

    before = machine()
    arrays = {name: jnp.asarray(x) for name, x in arrays_of(sizes).items()}
    x, direction = arrays["x"], arrays["direction"]
    weights = {name: arrays[name] for name in ("router", "gate", "up", "down")}
    run = pass_of(sizes["chosen"])
    functions = {"ours": lambda: run(weights, x, direction)}
    report: dict[str, Any] = {"benchmark": "moe", "figures": [], "ran_on": before, "workload": sizes}
    if arguments.peer_python:
        say("the peer starts")
        settings = sizes | {"threads": before["cores"]}
        with Peer(arguments.peer_python, "benchmarks.moe_peer", arrays, settings) as peer:
            say("in turns")
            times = in_turns(functions, rounds, {"transformers": peer.timed})
            report |= {"peer": peer.ran_on, "disagreement": disagreement(functions["ours"](), peer.results)}
        for clock in clocks():
            value = round(ratio(times["ours"], times["transformers"], clock), 4)
            name = f"{clock}_over_transformers"
            report["figures"].append(
                {"name": name, "value": value, "unit": "x", "target": TARGET, "ok": value <= TARGET}
            )
        worst = max(report["disagreement"].values())
        agreement = {"name": "disagreement", "value": worst, "unit": "relative", "target": AGREE, "ok": worst <= AGREE}
        report["figures"].append(agreement)
    else:
        times = in_turns(functions, rounds)
    report["times"] = {name: t.summary() for name, t in times.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()

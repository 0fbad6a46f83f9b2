"""Generated tokens a second, beside Tunix's vanilla sampler, transformers' `generate` and a step's matrix products.

python -m benchmarks.sampler [--peer-python=PYTHON] [--torch-python=PYTHON] [--only=dense|moe|draw] [--quick]

One call of each is taken in turns, in float32 on one device: 16 prompts of 64 tokens, 128 new tokens each, none of them
an end. The policies are those of `benchmarks.trainer`, of 26 million parameters each.

    ours          `sampler.generate`: prefill, steps, rollouts; log-probs, top-20 and routing recorded; 8 steps a
                  dispatch
    steps         the 128 decode steps alone, with their records on the host
    unrecorded    the same steps with neither log-probs nor top-20 nor routing
    weights       the products with weights of 128 steps and nothing else, every expert taking an equal share of the
                  tokens: what streaming the weights costs
    products      all matrix products of 128 steps: with weights, and attention's with the cache
    tunix         google-tunix (`benchmarks/peers.sh tunix FOLDER` makes its interpreter, --peer-python), which records
                  log-probs, drawing from all words as we do
    transformers  `generate` (`benchmarks/peers.sh torch FOLDER`, --torch-python), which records nothing

Log-probs of all are compared with our own forward pass over the same tokens. Then `draw` alone at 151,936 words; and a
mix of response lengths with a long tail, of whose slot-steps the share that made a token, one step a dispatch. After
every program has run once, what the compiler compiles is counted. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peer import Peer
from benchmarks.sampler_workload import (
    FULL,
    QUICK,
    Compilations,
    Ours,
    Workload,
    busy,
    disagreement,
    products,
    steps_of,
)
from benchmarks.timing import Times, clocks, in_turns, machine, quartiles, ratio, say
from jaxrl_sat import model
from jaxrl_sat.sampler.sampling import draw

OVER_TUNIX = {"dense": 1.2, "moe": 1.5}
OF_PRODUCTS, RECORDING, DRAW_MS, BUSY, AGREE = 0.6, 1.1, 2.0, 0.95, 1e-4
DRAW_WORDS, TOPK, STEPS = 151_936, 20, 8


def figure(name: str, value: float, unit: str, target: float, ok: bool) -> dict[str, Any]:
    """One line of the report."""
    return {"name": name, "value": round(value, 6), "unit": unit, "target": target, "ok": ok}


@contextlib.contextmanager
def peers(work: Workload, ours: Ours, arguments: argparse.Namespace) -> Any:
    """The other samplers asked for, by name, with our weights and prompts."""
    prompts = {"prompts": np.stack([request.prompt.tokens for request in ours.requests])}
    with contextlib.ExitStack() as stack:
        found: dict[str, Peer] = {}
        if arguments.peer_python:
            say("tunix starts")
            leaves = jax.tree_util.tree_leaves_with_path(ours.params)
            name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
            arrays = {f"params/{name(path)}": np.asarray(leaf) for path, leaf in leaves} | prompts
            settings = {"model": dataclasses.asdict(work.config), "response": work.response}
            peer = Peer(arguments.peer_python, "benchmarks.sampler_peer_tunix", arrays, settings)
            found["tunix"] = stack.enter_context(peer)
        if arguments.torch_python:
            say("transformers starts")
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model.save_hf(folder, work.config, ours.params)
            settings = {"folder": folder, "response": work.response, "threads": machine()["cores"]}
            peer = Peer(arguments.torch_python, "benchmarks.sampler_peer_torch", prompts, settings)
            found["transformers"] = stack.enter_context(peer)
        yield found


def measured(name: str, work: Workload, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The figures of one policy, and the record behind them."""
    say(f"{name}: our programs are compiled")
    ours, unrecorded, stepwise = Ours(work, TOPK, STEPS), Ours(work, None, STEPS), Ours(work, TOPK, 1)
    functions: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "steps": steps_of(ours),
        "unrecorded": steps_of(unrecorded),
        "weights": products(work, ours, cached=False),
        "products": products(work, ours, cached=True),
    }
    for warm_up in (*functions.values(), functools.partial(busy, work, stepwise)):
        warm_up()
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    with peers(work, ours, arguments) as others, Compilations() as compilations:
        say(f"{name}: in turns")
        times = in_turns(functions, rounds, {key: peer.timed for key, peer in others.items()})
        share = busy(work, stepwise)
    apart = disagreement(work, ours, {key: peer.results for key, peer in others.items()})
    record = {
        "model": {key: value for key, value in work.config.to_hf().items() if isinstance(value, int)},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(ours.params)),
        "batch": {"slots": work.slots, "prompt": work.prompt, "response": work.response},
        "peers": {key: peer.ran_on for key, peer in others.items()},
        "disagreement": apart,
        "times": {key: value.summary() for key, value in times.items()},
        "tokens_per_s": rates(work, times),
        "compilations": compilations.count,
    }
    figures = compared(name, times, record)
    worst = max(apart.values())
    figures += [
        figure(f"{name}/logp_disagreement", worst, "nats", AGREE, worst <= AGREE),
        figure(f"{name}/slots_busy", share, "of slot-steps", BUSY, share >= BUSY),
        figure(f"{name}/compilations_after_warm_up", compilations.count, "programs", 0, compilations.count == 0),
    ]
    return figures, record


def rates(work: Workload, times: dict[str, Times]) -> dict[str, dict[str, list[float]]]:
    """Generated tokens a second of each by each clock: quartiles."""
    tokens = work.slots * work.response
    by = {clock: {key: value.of(clock) for key, value in times.items()} for clock in clocks()}
    return {
        clock: {key: [round(tokens / x, 1) for x in reversed(quartiles(seconds))] for key, seconds in each.items()}
        for clock, each in by.items()
    }


def compared(name: str, times: dict[str, Times], record: dict[str, Any]) -> list[dict[str, Any]]:
    """The ratios that have a target, by each clock; how they spread goes into `record`."""
    figures, spread = [], {}
    bounds = {"of_products": ("products", "steps"), "of_weights": ("weights", "steps")}
    pairs = {**bounds, "recording": ("steps", "unrecorded")}
    pairs |= {f"over_{peer}": (peer, "ours") for peer in ("tunix", "transformers") if peer in times}
    for clock in clocks():
        values = {key: ratio(times[one], times[other], clock) for key, (one, other) in pairs.items()}
        for key, (one, other) in pairs.items():
            each = [a / b for a, b in zip(times[one].of(clock), times[other].of(clock), strict=True)]
            spread[f"{clock}_{key}"] = [round(x, 4) for x in quartiles(each)]
        for key in bounds:
            value = values[key]
            figures.append(figure(f"{name}/{clock}_{key}", value, "of its rate", OF_PRODUCTS, value >= OF_PRODUCTS))
        value = values["recording"]
        figures.append(figure(f"{name}/{clock}_recording", value, "x unrecorded", RECORDING, value <= RECORDING))
        if "tunix" in times:
            value, target = values["over_tunix"], OVER_TUNIX[name]
            figures.append(figure(f"{name}/{clock}_over_tunix", value, "x", target, value >= target))
    record["spread"] = spread
    return figures


def drawing(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The time of sampling, log-prob and top-20 from given logits."""
    words, slots = (2048 if arguments.quick else DRAW_WORDS), 16
    logits = 3 * jax.random.normal(jax.random.key(0), (slots, words))
    seeds, positions = jnp.arange(slots, dtype=jnp.uint32), jnp.arange(slots, dtype=jnp.int32)
    sample = jax.jit(lambda *given: draw(*given, topk=TOPK))
    given = (logits, seeds, positions, jnp.ones(slots))
    calls = 10

    def several() -> None:
        for _ in range(calls):
            jax.block_until_ready(sample(*given))

    times = in_turns({"draw": several}, arguments.rounds or (3 if arguments.quick else 25))["draw"]
    figures = []
    for clock in clocks():
        value = times.median(clock) / calls * 1e3
        figures.append(figure(f"draw/{clock}", value, "ms/step", DRAW_MS, value <= DRAW_MS))
    return figures, {"words": words, "slots": slots, "topk": TOPK, "times_of_10": times.summary()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Generated tokens a second beside Tunix and transformers.")
    parser.add_argument("--peer-python", default="", help="a Python with google-tunix")
    parser.add_argument("--torch-python", default="", help="a Python with torch and transformers")
    parser.add_argument("--only", choices=[*FULL, "draw"], help="one of the policies, or drawing from given logits")
    parser.add_argument("--quick", action="store_true", help="small policies and few rounds: does it work at all")
    parser.add_argument("--rounds", type=int, default=0, help="calls of each")
    arguments = parser.parse_args()
    works = QUICK if arguments.quick else FULL
    report: dict[str, Any] = {"benchmark": "sampler", "figures": [], "ran_on": machine()}
    for name in [arguments.only] if arguments.only else [*works, "draw"]:
        figures, report[name] = drawing(arguments) if name == "draw" else measured(name, works[name], arguments)
        report["figures"] += figures
        say(json.dumps(figures))
    print(json.dumps(report))


if __name__ == "__main__":
    main()

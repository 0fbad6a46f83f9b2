"""What each objective costs beside the model, and how that grows.

python -m benchmarks.objectives [--quick] [--full] [--rounds=N]

The figure of a recipe is the time of one forward and backward pass with it over that with plain policy gradient (r A,
no gate), on [8, 2048] tokens of a 26M-parameter policy, K = 20. A pass takes half a minute on two cores and the
objective's part of it milliseconds, which no difference of two passes would show. So three things are timed apart:

    pass     the train step's gradient with plain policy gradient: `step.microbatch_loss`
    part     an objective's own forward and backward pass from given log-probs, metrics included
    gathers  token statistics with and without the K recorded words, forward and backward, from given hidden states

    ratio = 1 + (part - plain part + gathers where the recipe reads the records) / pass

taken by the clock and by processor time; the larger of both stands. --full also times whole passes of three recipes.
A recipe that needs mu~, and SAT with scope "update", ask for one more forward pass of the model an update. That is not
part of the ratio; `with_extra_forward` counts it. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import Times, clocks, difference, exponent, in_turns, machine, quartiles, say
from benchmarks.workload import FULL, QUICK, Workload, evidence_of, hidden_of, policy_of, step_of
from jaxrl_sat import model
from jaxrl_sat.objectives import RECIPES, Evidence, PolicyLoss, Reduce, needs_recomputed, needs_topk, policy_loss
from jaxrl_sat.objectives.radii import ConstantRadii
from jaxrl_sat.objectives.ratio import TokenRatio
from jaxrl_sat.objectives.unclipped import Linear

PLAIN = "plain policy gradient"
TARGET = 1.03
GROWTH_TARGET = 1.2  # linear, or n log n (1.1 between these sizes), and the noise of a fit
TOKEN_FACTORS = (2, 4, 8)
K_FACTORS = (0.25, 4)
WHOLE = ("sat_grpo", "predictive_kl_agg", "predictive_tv_uni")

OBJECTIVES: dict[str, PolicyLoss] = {
    PLAIN: PolicyLoss(TokenRatio(), ConstantRadii(), Linear(), Reduce("token-mean")),
    **{name: make() for name, make in RECIPES.items()},
}


@functools.partial(jax.jit, static_argnums=0)
def part(objective: PolicyLoss, evidence: Evidence) -> Any:
    """The gradient in `logp` of one objective's summed loss, and what the step keeps of its outcome."""

    def loss(logp: jax.Array) -> Any:
        out = policy_loss(objective, dataclasses.replace(evidence, logp=logp))
        return out.loss_sum, (out.loss_sum, out.count, out.n_active, out.n_nonfinite, out.metrics)

    return jax.grad(loss, has_aux=True)(evidence.logp)


def parts(names: Iterable[str], work: Workload, rounds: int) -> dict[str, Times]:
    """The objectives' own passes, in turns; records reach only those that read them, as in the learner."""
    with_records, without = evidence_of(work), evidence_of(dataclasses.replace(work, topk=0))
    calls: dict[str, Callable[[], Any]] = {}
    for name in names:
        objective = OBJECTIVES[name]
        calls[name] = functools.partial(part, objective, with_records if needs_topk(objective) else without)
    return in_turns(calls, rounds)


def gathers(work: Workload, topks: Iterable[int], rounds: int) -> dict[int, Times]:
    """Token statistics with K recorded words, forward and backward from hidden states; K = 0: without."""
    config, params = policy_of(work)

    @jax.jit
    def run(params: Any, hidden: jax.Array, targets: jax.Array, topk_ids: jax.Array) -> Any:
        def loss(params: Any, hidden: jax.Array) -> Any:
            stats = model.token_statistics(params, config, hidden, targets, 1.0, None, topk_ids)
            return jnp.sum(stats.logp), (stats.topk_logp, stats.entropy)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)({"embedding": params["embedding"]}, hidden)

    hidden = hidden_of(work)
    calls = {}
    for topk in topks:
        evidence = evidence_of(dataclasses.replace(work, topk=topk))
        calls[str(topk)] = functools.partial(run, params, hidden, evidence.tokens, evidence.topk_ids)
    return {int(topk): times for topk, times in in_turns(calls, rounds).items()}


def passes(names: Iterable[str], work: Workload, rounds: int) -> dict[str, Times]:
    """Whole passes of the model with these objectives, and one forward pass alone, in turns."""
    _, params = policy_of(work)
    calls: dict[str, Callable[[], Any]] = {}
    for name in names:
        gradient, forward, arguments = step_of(OBJECTIVES[name], work)
        calls[name] = functools.partial(gradient, params, *arguments)
        calls.setdefault("forward", functools.partial(forward, params, *arguments))
    return in_turns(calls, rounds)


def overheads(own: dict[str, Times], gathered: dict[int, Times], whole: dict[str, Times], topk: int) -> dict[str, Any]:
    """The ratio of each recipe by each clock, with what it is made of in milliseconds."""
    out: dict[str, Any] = {}
    for name in RECIPES:
        record: dict[str, Any] = {"part": own[name].summary()}
        for clock in clocks():
            step, ahead = whole[PLAIN].median(clock), whole["forward"].median(clock)
            added = difference(own[name], own[PLAIN], clock)
            if needs_topk(OBJECTIVES[name]):
                added += difference(gathered[topk], gathered[0], clock)
            record |= {f"added_{clock}_ms": round(added * 1e3, 3), f"ratio_{clock}": round(1 + added / step, 5)}
            if needs_recomputed(OBJECTIVES[name]):
                record[f"with_extra_forward_{clock}"] = round(1 + (added + ahead) / step, 4)
            elif "sat" in name:
                record[f"scope_update_with_extra_forward_{clock}"] = round(1 + (added + ahead) / step, 4)
        out[name] = record
    return out


def whole_ratio(one: Times, plain: Times) -> dict[str, float]:
    """The ratio as a difference of whole passes, beside the spread of the plain one."""
    out: dict[str, float] = {}
    for clock in clocks():
        low, middle, high = quartiles(plain.of(clock))
        out[f"ratio_{clock}"] = round(1 + difference(one, plain, clock) / middle, 4)
        out[f"spread_{clock}"] = round((high - low) / middle, 4)
    return out


def growth(work: Workload, at_once: dict[str, Times], rounds: int, quick: bool) -> dict[str, dict[str, Any]]:
    """How each part's time grows with the number of tokens and with K: see `grown`. Quick: two sizes of each."""
    by_tokens, by_k = {1.0: at_once}, {1.0: at_once}
    for factor in (4,) if quick else TOKEN_FACTORS:
        say(f"parts at {factor} times the tokens")
        by_tokens[factor] = parts(OBJECTIVES, dataclasses.replace(work, rows=work.rows * factor), rounds)
    readers = [name for name in OBJECTIVES if needs_topk(OBJECTIVES[name])]
    for factor in (4,) if quick else K_FACTORS:
        say(f"parts at {factor} times K")
        by_k[factor] = parts(readers, dataclasses.replace(work, topk=int(work.topk * factor)), rounds)
    return {
        **{f"growth/{name}/tokens": grown(by_tokens, name) for name in RECIPES},
        **{f"growth/{name}/topk": grown(by_k, name) for name in readers},
    }


def grown(by_factor: Mapping[float, dict[str, Times]], name: str) -> dict[str, Any]:
    """Milliseconds at each factor, the exponent fitted to all, and the exponent over the last factor of 4.

    The latter is the figure: at the smaller sizes constant costs and what fits a cache hide how the time grows.
    """
    clock = clocks()[-1]
    seconds = {factor: by_factor[factor][name].median(clock) for factor in sorted(by_factor)}
    largest = max(seconds)
    last = [factor for factor in seconds if factor >= largest / 4]
    return {
        f"{clock}_ms": {str(factor): round(value * 1e3, 3) for factor, value in seconds.items()},
        "exponent": round(exponent(list(seconds), list(seconds.values())), 3),
        "last": round(exponent(last, [seconds[factor] for factor in last]), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What each objective costs beside the model.")
    parser.add_argument("--quick", action="store_true", help="a small policy and few rounds: does it work at all")
    parser.add_argument("--full", action="store_true", help=f"also time whole passes with {', '.join(WHOLE)}")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of the parts (passes take fewer)")
    arguments = parser.parse_args()
    work = QUICK if arguments.quick else FULL
    rounds = arguments.rounds or (3 if arguments.quick else 15)
    few = max(2, rounds // 5)

    before = machine()
    say("whole passes")
    whole = passes([PLAIN, *(WHOLE if arguments.full else ())], work, few)
    say("gathers")
    gathered = gathers(work, (0, work.topk), few + 2)
    say("parts")
    own = parts(OBJECTIVES, work, rounds)
    details = overheads(own, gathered, whole, work.topk)
    figures = []
    for name, record in details.items():
        value = max(record[f"ratio_{clock}"] for clock in clocks())
        figures.append(
            {"name": f"overhead/{name}", "value": value, "unit": "x", "target": TARGET, "ok": value <= TARGET}
        )
    grows = growth(work, own, max(3, rounds // 2), arguments.quick)
    for name, record in grows.items():
        ok, value = record["last"] <= GROWTH_TARGET, record["last"]
        figures.append({"name": name, "value": value, "unit": "exponent", "target": GROWTH_TARGET, "ok": ok})
    report = {
        "benchmark": "objectives",
        "figures": figures,
        "ran_on": before,
        "workload": work.described(),
        "plain_pass": whole[PLAIN].summary(),
        "forward_pass": whole["forward"].summary(),
        "gathers": {str(topk): times.summary() for topk, times in gathered.items()},
        "plain_part": own[PLAIN].summary(),
        "recipes": details,
        "growth": grows,
    }
    if arguments.full:
        report["whole_passes"] = {name: whole_ratio(whole[name], whole[PLAIN]) for name in WHOLE}
    print(json.dumps(report))


if __name__ == "__main__":
    main()

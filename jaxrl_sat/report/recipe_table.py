"""The table of the recipes in docs/objectives.md, made from the recipes: slots, equation, source, files, defaults.

`regions --page` writes it between the two marks of that page; a test holds the page to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_sat.objectives import RECIPES, PolicyLoss
from jaxrl_sat.objectives.corrections import IcePop, KPop, MismatchTis, PolicyTis, RawMismatch, SeqClip
from jaxrl_sat.objectives.direction import PredictiveKl, PredictiveTv, RatioDirection
from jaxrl_sat.objectives.gates import Gate
from jaxrl_sat.objectives.masks import DivergenceMask, support_kl, support_tv
from jaxrl_sat.objectives.radii import ConstantRadii, SatRadii
from jaxrl_sat.objectives.ratio import SequenceRatio, TokenRatio
from jaxrl_sat.objectives.surrogate import Clip
from jaxrl_sat.objectives.unclipped import Cispo, Drpo, Linear, Reinforce, Spo, Up
from jaxrl_sat.types import InputError

BEGIN, END = "<!-- recipes: made by jaxrl_sat.report.regions -->", "<!-- end of recipes -->"

PPO = "min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)"

# Of each function that can stand in a slot, what a reader of the paper would recognise.
SURROGATES: dict[type, str] = {
    Clip: PPO,
    Linear: "r A",
    Reinforce: "A log π",
    Cispo: "sg[clip(r, 1 − ε_low, 1 + ε_high)] A log π",
    Up: f"(π / sg[π]) A if A > 0, else {PPO}",
    Spo: "(r A − |A| (r − 1)² / (2 ε))",
    Drpo: "(r A − |A| μ (r − 1)² / (2 δ))",
}
RATIOS: dict[type, str] = {TokenRatio: "r = π / {base}", SequenceRatio: "r = ρ = exp(mean over y of log π / {base})"}
BASES = {"behaviour": "μ", "recomputed": "μ̃"}
RADII: dict[type, str] = {
    ConstantRadii: "",
    SatRadii: "if |d| > q, ε of d's side becomes ε / (1 + (|d| / q)^p); d = log r; q = quantile of |d|",
}
GATES: dict[type, tuple[str, str]] = {
    PolicyTis: ("min(r, C)", ""),
    MismatchTis: ("clip(k, c_low, C)", "k = μ̃ / μ"),
    RawMismatch: ("k", "k = μ̃ / μ"),
    IcePop: ("k 1[α ≤ k ≤ β]", "k = μ̃ / μ"),
    KPop: ("M", "M = 1 iff D(μ̃ ‖ μ) ≤ φ and D(μ ‖ μ̃) ≤ φ; D of Bernoullis"),
    SeqClip: ("1[α ≤ ρ ≤ β]", ""),
}
DIVERGENCES: dict[Any, tuple[str, str]] = {
    support_tv: ("|π − μ|", "TV over top-K ∪ {y} ∪ tail"),
    support_kl: ("KL(Bern μ ‖ Bern π)", "KL over top-K ∪ {y} ∪ tail"),
}
DIRECTIONS: dict[type, str] = {
    RatioDirection: "A (r − 1) > 0",
    PredictiveKl: "A · dKL/dη > 0, tail {tail}",
    PredictiveTv: "A · dTV/dη > 0, tail {tail}",
}

HEAD = "| method | equation | what it is, and where from | files | default parameters |\n|---|---|---|---|---|\n"


def equation(objective: PolicyLoss) -> str:
    """S of an objective and what its symbols mean, put together from its slots. sg: without gradient."""
    gates = [_gate(gate) for gate in objective.gates]
    surrogate = " · ".join([*(f"sg[{factor}]" for factor, _ in gates), SURROGATES[type(objective.surrogate)]])
    base = BASES[getattr(objective.ratio, "denominator", "behaviour")]
    ratio = RATIOS[type(objective.ratio)].format(base=base)
    return "; ".join(
        filter(None, [f"S = {surrogate}", ratio, RADII[type(objective.radii)], *(why for _, why in gates)])
    )


def _gate(gate: Gate) -> tuple[str, str]:
    """A gate's factor, and what its symbols mean."""
    if not isinstance(gate, DivergenceMask):
        return GATES[type(gate)]
    direction = DIRECTIONS[type(gate.direction)].format(tail=getattr(gate.direction, "tail", ""))
    return "M", f"M = 0 iff {direction} and D > δ, else 1; D = {DIVERGENCES[gate.divergence][gate.top_k]}"


def defaults(recipe: Callable[..., PolicyLoss]) -> str:
    """A recipe's parameters as its signature states them."""
    return ", ".join(f"{name}={p.default!r}" for name, p in inspect.signature(recipe).parameters.items())


def files(recipe: Callable[..., PolicyLoss]) -> list[str]:
    """Where a recipe and the slots that make it differ are written: names of modules of `jaxrl_sat.objectives`."""
    made = recipe()
    modules = [recipe.__module__, *(type(slot).__module__ for slot in (made.radii, made.surrogate, *made.gates))]
    return list(dict.fromkeys(module.rpartition(".")[2] for module in modules))


def row(name: str) -> str:
    """A recipe's line of the table."""
    recipe = RECIPES[name]
    summary = inspect.cleandoc(recipe.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    links = " ".join(f"[{file}](../jaxrl_sat/objectives/{file}.py)" for file in files(recipe))
    parts = [f"`{part}`" for part in equation(recipe()).split("; ")]
    cells = [f"**{name}**", "<br>".join(parts), summary, links, f"`{defaults(recipe)}`"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def table() -> str:
    """The table in Markdown, a line a recipe."""
    return HEAD + "".join(row(name) for name in RECIPES)


def renew(page: str) -> str:
    """The page with its table made anew. Raises `InputError` where it has not the two marks around one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InputError(f"--page: it has no table to renew; allowed: a page with the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"

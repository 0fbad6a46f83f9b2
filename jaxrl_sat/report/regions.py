"""What each objective keeps and drops in the plane of ratio and advantage, drawn from the objectives themselves.

python -m jaxrl_sat.report.regions --out=docs/objectives.png --page=docs/objectives.md

A point of the plane is a token with that ratio and that advantage. The objective is asked for its keep set and its
gradient there, so the picture shows what the code does. `--page` also renews the tables of that page (`recipe_table`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from jaxrl_sat.objectives import RECIPES, Evidence, PolicyLoss, make_evidence, policy_loss
from jaxrl_sat.report.recipe_table import renew

RATIOS, ADVANTAGES = 301, 8
COLUMNS = 6
WEIGHT_MAX = 2.0
VOCABULARY = 1000

DROPPED: dict[str, Any] = {"facecolor": "0.68", "edgecolor": "0.55", "hatch": "///", "linewidth": 0}
KEY = "across: r = pi / mu, logarithmic\n(of sequences: rho)\nup: the advantage A"

POPULATION = 99
POPULATION_SCALE = 0.05 / math.log(10)  # the 0.90 quantile of |d|, exponential with this mean, is 0.05


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a point of the plane stands for: the sampled word y with mu(y), among others, at pi(y) = r mu(y).

    `lag_share` of log r is policy lag, log pi - log mu~, and the rest implementation mismatch, log mu~ - log mu.
    Under mu the two other recorded words have `others`, of which pi gives `moved` to each once y has its own; the
    rest is the tail. Beside the point stand 99 tokens, responses of their own, whose |d| is exponential with 0.90
    quantile 0.05.
    """

    note: str = ""
    low: float = 0.5
    high: float = 2.0
    mu: float = 0.2
    lag_share: float = 1.0
    others: tuple[float, float] = (0.4, 0.2)
    moved: tuple[float, float] = (0.3, 0.15)


DEFAULT = Scene()
CROWDED = Scene("the others crowd on one word", others=(0.5, 0.1), moved=(0.8, 0.05))
LIKELY = Scene("mu(y) = 0.3", mu=0.3)
RARE = Scene("mu(y) = 0.01", mu=0.01)
SPLIT = Scene("half of log r is mismatch", low=1 / 40, high=40.0, mu=0.01, lag_share=0.5)

SCENES = {
    "dppo": RARE,
    "dppo_tv": RARE,
    "drpo": LIKELY,
    "dppo_binary_kl": LIKELY,
    "tis": Scene(low=1 / 5, high=5.0, mu=0.1),
    "grpo_tis": SPLIT,
    "gspo_tis": SPLIT,
    "decoupled_ppo": SPLIT,
    "icepop": SPLIT,
    "kpop": Scene("mu(y) = 0.9, all mismatch", low=1 / 30, high=1.1, mu=0.9, lag_share=0.0),
    "seqclip": Scene(low=1 / 1.02, high=1.02),
    "dppo_topk_tv": CROWDED,
    "predictive_tv_agg": CROWDED,
    "predictive_tv_uni": CROWDED,
}
"""Where the plane is not that of `DEFAULT`, so that the region can be seen."""


def evidence_at(scene: Scene, log_r: Float[Array, ""], advantage: Float[Array, ""]) -> Evidence:
    """The point as row 0 of one-token responses, so that sequence ratio and token ratio are one; then the others."""
    sizes = -POPULATION_SCALE * np.log1p(-(np.arange(POPULATION) + 0.5) / POPULATION)
    d = np.where(np.arange(POPULATION) % 2, sizes, -sizes)
    log_mu = jnp.full((POPULATION + 1, 1), math.log(scene.mu))
    lag = jnp.concatenate([scene.lag_share * log_r[None], jnp.asarray(d)])[:, None]
    mismatch = jnp.zeros_like(log_mu).at[0, 0].set((1 - scene.lag_share) * log_r)
    left = (1 - jnp.exp(log_r) * scene.mu) * jnp.asarray(scene.moved)
    words = (POPULATION + 1, 1, 2)
    return make_evidence(
        log_mu + mismatch + lag,
        log_mu,
        jnp.ones_like(log_mu).at[0, 0].set(advantage),
        jnp.ones(log_mu.shape, bool),
        logp_old=log_mu + mismatch,
        topk_ids=jnp.broadcast_to(jnp.asarray([1, 2], jnp.int32), words),
        topk_logp=jnp.broadcast_to(jnp.log(left), words),
        topk_logp_mu=jnp.broadcast_to(jnp.log(jnp.asarray(scene.others)), words),
        vocab_size=VOCABULARY,
    )


def weight_of(objective: PolicyLoss, evidence: Evidence) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """(dS / dlog pi) / A of the token in row 0, whose A is not 0, and whether gradient flows there at all."""

    def surrogate(logp: Float[Array, "N T"]) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        out = policy_loss(objective, dataclasses.replace(evidence, logp=logp))
        return -out.per_token[0, 0], out.keep[0, 0]

    gradient, keep = jax.grad(surrogate, has_aux=True)(evidence.logp)
    return gradient[0, 0] / evidence.advantages[0, 0], keep


def plane(
    objective: PolicyLoss, scene: Scene, log_r: Float[Array, " R"], advantages: Float[Array, " A"]
) -> tuple[Float[Array, "A R"], Bool[Array, "A R"]]:
    """`weight_of` at each point of a grid of the scene."""
    grid = jnp.meshgrid(log_r, advantages)
    points = jax.vmap(jax.vmap(functools.partial(evidence_at, scene)))(*grid)
    return jax.jit(jax.vmap(jax.vmap(functools.partial(weight_of, objective))))(points)


def _ticks(scene: Scene) -> list[float]:
    """Round ratios inside the scene, 1 among them, few enough to be read."""
    spans = (
        [0.98, 0.99, 1.01, 1.02],
        [0.5, 0.8, 1.2, 1.5, 2.0],
        [0.2, 0.5, 2.0, 5.0],
        [0.03, 0.1, 0.3, 3.0, 10.0, 30.0],
    )
    reach = max(scene.high, 1 / scene.low)
    chosen = next(span for span in spans if reach <= 1.35 * span[-1])
    return [x for x in sorted([1.0, *chosen]) if 0.99 * scene.low <= x <= 1.01 * scene.high]


def _panel(axes: Axes, name: str) -> QuadMesh:
    """One recipe's plane; what is dropped stays as the background."""
    scene = SCENES.get(name, DEFAULT)
    log_r = np.linspace(math.log(scene.low), math.log(scene.high), RATIOS)
    advantages = (np.arange(ADVANTAGES) - ADVANTAGES / 2 + 0.5) * 2 / ADVANTAGES
    weight, keep = plane(RECIPES[name](), scene, jnp.asarray(log_r, float), jnp.asarray(advantages, float))
    shown = np.ma.masked_where(~np.asarray(keep), np.asarray(weight))
    axes.patch.set(**DROPPED)
    mesh = axes.pcolormesh(
        np.exp(log_r), advantages, shown, cmap="RdBu", vmin=-WEIGHT_MAX, vmax=WEIGHT_MAX, shading="nearest"
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks := _ticks(scene)))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{x:g}" for x in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(scene.low, scene.high)
    axes.set_ylim(-1, 1)
    axes.set_yticks([-1, 0, 1])
    axes.axhline(0, color="black", lw=0.8)
    axes.axvline(1, color="black", lw=0.8, ls=":")
    axes.tick_params(labelsize=7)
    axes.set_title(name, fontsize=10, fontweight="bold", pad=14 if scene.note else 4)
    axes.text(0.5, 1.02, scene.note, transform=axes.transAxes, ha="center", va="bottom", fontsize=7)
    return mesh


def draw(names: Sequence[str], out: Path) -> None:
    """Draw the planes of the recipes `names` into the PNG `out`, as small multiples."""
    rows = -(-(len(names) + 2) // COLUMNS)  # two places for the key
    figure = Figure(figsize=(2.2 * COLUMNS, 1.75 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    mesh = [_panel(axes, name) for axes, name in zip(panels, names, strict=False)][-1]
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    place = panels[-2].inset_axes((0.0, 0.55, 1.0, 0.15))
    bar = figure.colorbar(mesh, cax=place, orientation="horizontal", extend="both")
    bar.set_label("gradient's weight (dS / dlog pi) / A", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    dropped = Patch(**DROPPED, label="dropped: no gradient")
    panels[-1].legend(handles=[dropped], loc="upper left", fontsize=8, frameon=False)
    panels[-1].text(0.05, 0.62, KEY, va="top", fontsize=8, transform=panels[-1].transAxes)
    figure.savefig(out, dpi=90)


def main() -> None:
    """Draw from the command line."""
    parser = argparse.ArgumentParser(description="Draw what each objective keeps and drops.")
    parser.add_argument("--out", type=Path, default=Path("objectives.png"))
    parser.add_argument("--page", type=Path, help="a page whose tables of the recipes are to be renewed")
    arguments = parser.parse_args()
    draw(list(RECIPES), arguments.out)
    if arguments.page:
        arguments.page.write_text(renew(arguments.page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

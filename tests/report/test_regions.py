"""The picture's regions against inequalities written here, and the page's table against the recipes of today."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from jaxrl_sat.objectives import RECIPES
from jaxrl_sat.report import recipe_table, regions
from jaxrl_sat.types import InputError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
LOG_R = np.linspace(-0.65, 0.65, 40)
A = np.array([-1.0, 0.5])


def region(name: str) -> tuple[np.ndarray, np.ndarray]:
    scene = regions.SCENES.get(name, regions.DEFAULT)
    weight, keep = regions.plane(RECIPES[name](), scene, jnp.asarray(LOG_R, float), jnp.asarray(A, float))
    return np.asarray(weight, float), np.asarray(keep)


def test_sat_cuts_where_its_contracted_radius_ends() -> None:
    d, r, sign = LOG_R[None], np.exp(LOG_R)[None], np.sign(A)[:, None]
    sizes = -regions.POPULATION_SCALE * np.log1p(-(np.arange(99) + 0.5) / 99)
    q = np.array([np.sort([*sizes, abs(x)])[89] for x in LOG_R])[None]
    radius = np.where(np.abs(d) > q, 0.2 / (1 + (d / q) ** 2), 0.2)
    weight, keep = region("sat_grpo")
    np.testing.assert_array_equal(keep, (sign * (r - 1) <= radius) | (sign * d <= 0))
    np.testing.assert_allclose(weight, keep * np.broadcast_to(r, keep.shape), rtol=1e-5)
    np.testing.assert_allclose(np.median(q), 0.05, rtol=0.1)


def test_the_predictive_mask_turns_where_the_kl_of_its_scene_does() -> None:
    scene, r = regions.DEFAULT, np.exp(LOG_R)
    pi_y = scene.mu * r
    pi = np.stack([pi_y, *((1 - pi_y) * share for share in scene.moved)])
    pi, mu = np.vstack([pi, 1 - pi.sum(0)]), np.array([scene.mu, *scene.others])
    mu = np.append(mu, 1 - mu.sum())[:, None]
    kl = np.sum(mu * np.log(mu / pi), axis=0)
    direction = (pi[0] - mu[0]) + np.sum(pi * (mu - pi), axis=0)  # the tail as one word
    drop = (np.sign(A)[:, None] * direction > 0) & (kl > 0.15)
    keep = region("predictive_kl_agg")[1]
    np.testing.assert_array_equal(keep, ~drop)
    assert (keep != region("dppo_topk_kl")[1]).any()


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    regions.draw(["seqclip"], tmp_path / "planes.png")
    pixels = imread(tmp_path / "planes.png")
    assert pixels.shape[0] > 100 and len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50
    assert all(math.isfinite(x) for scene in regions.SCENES.values() for x in regions._ticks(scene))


def test_the_page_has_the_recipes_of_today() -> None:
    assert recipe_table.renew(PAGE) == PAGE, "run python -m jaxrl_sat.report.regions (see docs/objectives.md)"
    assert all(f"**{name}**" in PAGE for name in RECIPES)
    with pytest.raises(InputError, match="--page"):
        recipe_table.renew("a page without a table")


def test_the_page_names_every_config_and_only_files_that_exist() -> None:
    for config in (ROOT / "configs").glob("*.py"):
        assert f"(../configs/{config.name})" in PAGE, config.name
    for line in PAGE.split("](")[1:]:
        target = line.partition(")")[0]
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target


def test_the_code_of_the_page_runs() -> None:
    blocks = [block.partition("```")[0] for block in PAGE.split("```python\n")[1:]]
    assert len(blocks) == 3
    for block in blocks:
        ast.parse(block)
        if "get_config" not in block:  # that one stands beside the user's own file
            exec(compile(block, "docs/objectives.md", "exec", dont_inherit=True), {"__name__": "page"})

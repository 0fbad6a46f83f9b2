"""GRPO with a higher upper clip: radii 0.2 below and 0.28 above; avg@16, as the paper evaluates.

Else      as sat_grpo.py
Paper     "Predictive Divergence Masks for LLM RL", its clip baseline.
Command   python -m jaxrl_sat.main --config=configs/clip_higher.py
"""

from __future__ import annotations

from typing import Any

import sat_grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The flagship's preset under the clip-higher recipe, evaluated as paper 001 does."""
    config: Any = sat_grpo.get_config(preset)
    config.recipe = "clip_higher"
    if preset != "cpu":
        config.eval.samples = 16
    return config

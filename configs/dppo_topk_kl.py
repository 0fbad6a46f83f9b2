"""DPPO-TopK-KL: a token is dropped where the top-20 KL exceeds 0.15 and its ratio points outward.

Else      as clip_higher.py
Paper     "Predictive Divergence Masks for LLM RL", Eq. 4-5; its tight setting is --config.objective.delta=0.05.
Command   python -m jaxrl_sat.main --config=configs/dppo_topk_kl.py
"""

from __future__ import annotations

from typing import Any

import clip_higher
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of clip_higher.py under the DPPO-TopK-KL recipe."""
    config: Any = clip_higher.get_config(preset)
    config.recipe = "dppo_topk_kl"
    return config

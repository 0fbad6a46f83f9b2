"""Predictive KL mask, tail as one word: dropped where the top-20 KL exceeds 0.15 and the update would raise it.

Else      as dppo_topk_kl.py
Paper     "Predictive Divergence Masks for LLM RL", Eq. 10, 13-14; its tight setting is --config.objective.delta=0.05.
Command   python -m jaxrl_sat.main --config=configs/predictive_kl_agg.py
"""

from __future__ import annotations

from typing import Any

import dppo_topk_kl
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of dppo_topk_kl.py under the predictive mask, the unrecorded words as one."""
    config: Any = dppo_topk_kl.get_config(preset)
    config.recipe = "predictive_kl_agg"
    return config

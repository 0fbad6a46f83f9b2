"""GSPO w/ R3: one ratio a response, the mean of its tokens' log-ratios, under one fixed clip interval.

Else      as sat_grpo.py
Paper     "Stale but Stable", section 3.3, row "GSPO w/ R3".
Command   python -m jaxrl_sat.main --config=configs/gspo.py
"""

from __future__ import annotations

from typing import Any

import sat_grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The flagship's preset under the GSPO recipe."""
    config: Any = sat_grpo.get_config(preset)
    config.recipe = "gspo"
    return config

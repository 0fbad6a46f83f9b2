"""GRPO w/ R3: token ratios under one fixed clip interval, the baseline that SAT-GRPO contracts.

Else      as sat_grpo.py
Paper     "Stale but Stable", section 3.3, row "GRPO w/ R3".
Command   python -m jaxrl_sat.main --config=configs/grpo.py
"""

from __future__ import annotations

from typing import Any

import sat_grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The flagship's preset under the GRPO recipe."""
    config: Any = sat_grpo.get_config(preset)
    config.recipe = "grpo"
    return config

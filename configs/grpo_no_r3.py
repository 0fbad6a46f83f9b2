"""GRPO: tokens are routed by the trainer's own router, not as the sampler chose.

Else      as grpo.py
Paper     "Stale but Stable", section 3.3, row "GRPO".
Command   python -m jaxrl_sat.main --config=configs/grpo_no_r3.py
"""

from __future__ import annotations

from typing import Any

import grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of grpo.py without routing replay."""
    config: Any = grpo.get_config(preset)
    config.learner.replay = False
    return config

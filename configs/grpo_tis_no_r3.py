"""GRPO w/ TIS: tokens are routed by the trainer's own router, not as the sampler chose.

Else      as grpo_tis.py
Paper     "Stale but Stable", section 3.3, row "GRPO w/ TIS".
Command   python -m jaxrl_sat.main --config=configs/grpo_tis_no_r3.py
"""

from __future__ import annotations

from typing import Any

import grpo_tis
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of grpo_tis.py without routing replay."""
    config: Any = grpo_tis.get_config(preset)
    config.learner.replay = False
    return config

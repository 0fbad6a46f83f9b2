"""SAT-GRPO: tokens are routed by the trainer's own router, not as the sampler chose.

Else      as sat_grpo.py
Paper     "Stale but Stable", section 3.3, row "SAT-GRPO".
Command   python -m jaxrl_sat.main --config=configs/sat_grpo_no_r3.py
"""

from __future__ import annotations

from typing import Any

import sat_grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The flagship's preset without routing replay."""
    config: Any = sat_grpo.get_config(preset)
    config.learner.replay = False
    return config

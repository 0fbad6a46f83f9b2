"""GSPO: tokens are routed by the trainer's own router, not as the sampler chose.

Else      as gspo.py
Paper     "Stale but Stable", section 3.3, row "GSPO".
Command   python -m jaxrl_sat.main --config=configs/gspo_no_r3.py
"""

from __future__ import annotations

from typing import Any

import gspo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of gspo.py without routing replay."""
    config: Any = gspo.get_config(preset)
    config.learner.replay = False
    return config

"""DPPO: tokens are routed by the trainer's own router, not as the sampler chose.

Else      as dppo.py
Paper     "Stale but Stable", section 3.3, row "DPPO".
Command   python -m jaxrl_sat.main --config=configs/dppo_no_r3.py
"""

from __future__ import annotations

from typing import Any

import dppo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of dppo.py without routing replay."""
    config: Any = dppo.get_config(preset)
    config.learner.replay = False
    return config

"""SAT-GSPO: tokens are routed by the trainer's own router, not as the sampler chose.

Else      as sat_gspo.py
Paper     "Stale but Stable", section 3.3, row "SAT-GSPO".
Command   python -m jaxrl_sat.main --config=configs/sat_gspo_no_r3.py
"""

from __future__ import annotations

from typing import Any

import sat_gspo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of sat_gspo.py without routing replay."""
    config: Any = sat_gspo.get_config(preset)
    config.learner.replay = False
    return config

"""GSPO w/ TIS: tokens are routed by the trainer's own router, not as the sampler chose.

Else      as gspo_tis.py
Paper     "Stale but Stable", section 3.3, row "GSPO w/ TIS".
Command   python -m jaxrl_sat.main --config=configs/gspo_tis_no_r3.py
"""

from __future__ import annotations

from typing import Any

import gspo_tis
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of gspo_tis.py without routing replay."""
    config: Any = gspo_tis.get_config(preset)
    config.learner.replay = False
    return config

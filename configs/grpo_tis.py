"""GRPO w/ R3 + TIS: each token's term times min(mu~ / mu, 2), against sampler and trainer disagreeing.

Else      as grpo.py
Paper     "Stale but Stable", section 3.3, row "GRPO w/ R3 + TIS"; SPEC 8.2.
Command   python -m jaxrl_sat.main --config=configs/grpo_tis.py
"""

from __future__ import annotations

from typing import Any

import grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of grpo.py with truncated importance weights."""
    config: Any = grpo.get_config(preset)
    config.recipe = "grpo_tis"
    return config

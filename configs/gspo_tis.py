"""GSPO w/ R3 + TIS: each token's term times min(mu~ / mu, 2), against sampler and trainer disagreeing.

Else      as gspo.py
Paper     "Stale but Stable", section 3.3, row "GSPO w/ R3 + TIS"; SPEC 8.2.
Command   python -m jaxrl_sat.main --config=configs/gspo_tis.py
"""

from __future__ import annotations

from typing import Any

import gspo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The preset of gspo.py with truncated importance weights."""
    config: Any = gspo.get_config(preset)
    config.recipe = "gspo_tis"
    return config

"""DPPO w/ R3: a token is also dropped where its probability has moved outward by more than 1e-3.

Else      as sat_grpo.py
Paper     "Stale but Stable", section 3.3: the sampled-TV mask times the clip (SPEC 11).
Command   python -m jaxrl_sat.main --config=configs/dppo.py
"""

from __future__ import annotations

from typing import Any

import sat_grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The flagship's preset under the DPPO recipe."""
    config: Any = sat_grpo.get_config(preset)
    config.recipe = "dppo"
    return config

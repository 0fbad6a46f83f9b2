"""SAT-GSPO w/ R3: the sequence ratio of GSPO under SAT's adaptive radii.

Else      as sat_grpo.py
Paper     "Stale but Stable", section 3.3: its best recipe at lag 1 and lag 8.
Command   python -m jaxrl_sat.main --config=configs/sat_gspo.py
"""

from __future__ import annotations

from typing import Any

import sat_grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The flagship's preset under the SAT-GSPO recipe."""
    config: Any = sat_grpo.get_config(preset)
    config.recipe = "sat_gspo"
    return config

"""GSPO: one ratio a response, the mean of its tokens' log-ratios. Else as sat_grpo.py.

Paper     Group Sequence Policy Optimization, with the settings of section 3.3 of the SAT post.
Command   python -m jaxrl_sat.main --config=configs/gspo.py
"""

from __future__ import annotations

import sat_grpo
from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """The flagship's preset under the GSPO recipe."""
    config = sat_grpo.get_config(preset)
    config.recipe = "gspo"
    return config

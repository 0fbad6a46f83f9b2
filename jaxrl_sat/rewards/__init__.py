"""Rewards by rule: is the final answer of a response the right one?"""

from jaxrl_sat.rewards.pool import Outcome
from jaxrl_sat.rewards.verify import outcomes, readable, score, shared_pool, verify

__all__ = ["Outcome", "outcomes", "readable", "score", "shared_pool", "verify"]

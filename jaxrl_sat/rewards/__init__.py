"""Rewards by rule: is the final answer of a response the right one?"""

from jaxrl_sat.rewards.example import Example
from jaxrl_sat.rewards.pool import Outcome
from jaxrl_sat.rewards.verify import outcome, outcomes, readable, score, shared_pool, verify

__all__ = ["Example", "Outcome", "outcome", "outcomes", "readable", "score", "shared_pool", "verify"]

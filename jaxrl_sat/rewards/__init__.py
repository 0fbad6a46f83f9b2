"""Rewards by rule: is the final answer of a response the right one?"""

from jaxrl_sat.rewards.verify import score, verify

__all__ = ["score", "verify"]

"""Rollouts: a JetStream engine over the policy, and what keeps it full."""

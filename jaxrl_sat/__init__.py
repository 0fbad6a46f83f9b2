"""Asynchronous reinforcement learning for language models, with staleness-adaptive trust regions, in JAX."""

__version__ = "0.1.0"

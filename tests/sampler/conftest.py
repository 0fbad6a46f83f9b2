"""Engines of the tiny model, compiled once a session."""

from __future__ import annotations

import pytest
import tiny_policy as tiny

from jaxrl_sat.sampler import RolloutEngine


@pytest.fixture(scope="session")
def engine() -> RolloutEngine:
    """Eight slots, six tokens a response, one device."""
    return tiny.engine()

"""Rollouts: a JetStream engine over the policy, the loop that keeps its slots full, and the thread it runs in.

`RolloutEngine` computes, several are a `Fleet`; `generate` schedules a list of requests and `SamplerService` a live
queue, `SamplerThread` works ahead of the trainer. Importing loads neither TensorFlow nor a device.
"""

from jaxrl_sat.sampler.engine import RolloutEngine
from jaxrl_sat.sampler.fleet import Fleet
from jaxrl_sat.sampler.service import SamplerService
from jaxrl_sat.sampler.thread import RolloutBatch, SamplerThread
from jaxrl_sat.sampler.tickets import Busy, RequestFailed, Ticket
from jaxrl_sat.sampler.weights import FleetWeights, WeightHolder, Weights
from jaxrl_sat.sampler.worker import Stopped, generate

__all__ = [
    "Busy",
    "Fleet",
    "FleetWeights",
    "RequestFailed",
    "RolloutBatch",
    "RolloutEngine",
    "SamplerService",
    "SamplerThread",
    "Stopped",
    "Ticket",
    "WeightHolder",
    "Weights",
    "generate",
]

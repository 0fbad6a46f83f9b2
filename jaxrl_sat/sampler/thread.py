"""The sampler at work beside the trainer: batches in order, each by the version it is to be sampled by.

One condition guards everything that both sides see. The thread never calls out while holding it (asking for weights
takes the publisher's lock), so it looks, calls, and waits only if nothing was signalled since it looked.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jaxrl_sat.sampler import worker
from jaxrl_sat.sampler.weights import FleetWeights, Weights
from jaxrl_sat.types import Request, Rollout

POLL_SECONDS = 0.2
"""How often a waiting consumer looks whether it was asked to stop."""


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """The rollouts update `update` trains on, sampled by weights `version` in `generate_s` seconds.

    `logp`: of their tokens in packed rows, [N, T], where the thread was given `score`, which took `score_s` seconds.
    """

    update: int
    version: int
    rollouts: list[Rollout]
    generate_s: float
    logp: np.ndarray | None = None
    score_s: float = 0.0


@dataclasses.dataclass(eq=False)
class _Job:
    """An evaluation asked for; `finished` once it has rollouts or an error."""

    weights: Weights | FleetWeights
    requests: Sequence[Request]
    temperature: float | None
    rollouts: list[Rollout] | None = None
    error: BaseException | None = None
    cancelled: bool = False

    @property
    def finished(self) -> bool:
        return self.rollouts is not None or self.error is not None


class SamplerThread(threading.Thread):
    """Samples the batches of updates start..stop-1 in order, ahead of the trainer by at most `capacity` batches.

    Batch j waits until `weights_for(version_of(j))` gives weights; call `notify` whenever that may have changed.
    Evaluations are served between batches. `device_lock` is held while a batch or an evaluation is on the device: do
    not hold it in `take`, `evaluate` or `close`. After the last batch the thread serves evaluations until `close`.
    `score` computes log-probs of a batch's rollouts while the sampler's devices are still at it.
    """

    def __init__(
        self,
        engine: Any,
        weights_for: Callable[[int], Weights | FleetWeights | None],
        version_of: Callable[[int], int],
        requests_for: Callable[[int], list[Request]],
        start: int,
        stop: int,
        capacity: int,
        device_lock: AbstractContextManager[Any] | None = None,
        generate: Callable[..., list[Rollout]] = worker.generate,
        score: Callable[[list[Rollout]], np.ndarray] | None = None,
    ):
        super().__init__(name="sampler", daemon=True)
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; the sampler needs room for at least 1 batch")
        self._engine = engine
        self._weights_for, self._version_of, self._requests_for = weights_for, version_of, requests_for
        self._generate, self._score = generate, score
        self._device_lock = contextlib.nullcontext() if device_lock is None else device_lock
        self._last, self._capacity = stop, capacity
        self._next = start  # only the thread moves it
        # Shared, under the condition:
        self._changed = threading.Condition()
        self._signals = 0
        self._ready: collections.deque[RolloutBatch] = collections.deque()
        self._jobs: collections.deque[_Job] = collections.deque()
        self._expected = start  # the update `take` gives next
        self._closed = False
        self._error: BaseException | None = None

    # --------------------------------------------------------------------------------------- the other side

    def notify(self) -> None:
        """Look again whether weights have arrived."""
        with self._changed:
            self._signal()

    def take(self, update: int, should_stop: Callable[[], bool] = lambda: False) -> RolloutBatch | None:
        """The batch of `update`, waited for; None if `should_stop()` turns true first.

        Updates are taken in order, each once (ValueError otherwise). Raises what ended the thread.
        """
        with self._changed:
            if update != self._expected or update >= self._last:
                raise ValueError(f"update {update} asked of the sampler; next is {self._expected} of {self._last}")
            while not self._ready:
                self._check_alive()
                if should_stop():
                    return None
                self._changed.wait(POLL_SECONDS)
            self._expected += 1
            batch = self._ready.popleft()
            self._signal()
            return batch

    def evaluate(
        self,
        weights: Weights | FleetWeights,
        requests: Sequence[Request],
        temperature: float | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Rollout] | None:
        """Rollouts of `requests` by `weights`, generated between two batches. `temperature` None is the engine's.

        None if `should_stop()` turns true first. Raises what the generation raised (the thread goes on), or what ended
        the thread.
        """
        job = _Job(weights, requests, temperature)
        with self._changed:
            self._check_alive()
            self._jobs.append(job)
            self._signal()
            while not job.finished:
                if should_stop():
                    job.cancelled = True
                    return None
                self._changed.wait(POLL_SECONDS)
        if job.error is not None:
            raise job.error
        assert job.rollouts is not None
        return job.rollouts

    def close(self) -> None:
        """Stop within one decode step and wait until it has. Whoever still waits is told. May be called twice."""
        with self._changed:
            self._closed = True
            self._fail_jobs(RuntimeError("the sampler was closed"))
            self._signal()
        if self.ident is not None and self is not threading.current_thread():
            self.join()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the sampler was closed")

    def _signal(self) -> None:
        self._signals += 1
        self._changed.notify_all()

    def _fail_jobs(self, error: BaseException) -> None:
        while self._jobs:
            self._jobs.popleft().error = error

    # ---------------------------------------------------------------------------------------- this thread

    def run(self) -> None:
        """Work until closed or until a batch fails; the error is raised where batches are taken."""
        try:
            while self._step():
                pass
        except worker.Stopped:
            pass
        except BaseException as error:  # noqa: B902 - handed over, whatever it is
            with self._changed:
                self._error = error
                self._fail_jobs(error)
                self._signal()

    def _step(self) -> bool:
        """Do one piece of work, or wait for some. False once closed."""
        with self._changed:
            seen = self._signals
            if self._closed:
                return False
            job = self._jobs.popleft() if self._jobs else None
            room = self._next < self._last and len(self._ready) < self._capacity
        if job is not None:
            self._serve(job)
            return True
        version = self._version_of(self._next) if room else -1
        weights = self._weights_for(version) if room else None
        if weights is not None:
            self._sample(weights)
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._signals != seen)
        return True

    def _sample(self, weights: Weights | FleetWeights) -> None:
        requests = self._requests_for(self._next)
        with self._device_lock:
            began = time.perf_counter()
            rollouts = self._generate(self._engine, weights, requests, self._should_stop)
            generated = time.perf_counter()
            logp = None if self._score is None else self._score(rollouts)
            scored = time.perf_counter()
        batch = RolloutBatch(
            self._next, weights.version, rollouts, generated - began, logp, scored - generated if self._score else 0.0
        )
        self._next += 1
        with self._changed:
            self._ready.append(batch)
            self._signal()

    def _serve(self, job: _Job) -> None:
        rollouts, error = None, None

        def should_stop() -> bool:
            return self._closed or job.cancelled

        try:
            with self._device_lock:
                rollouts = self._generate(
                    self._engine, job.weights, job.requests, should_stop, temperature=job.temperature
                )
        except worker.Stopped:
            error = RuntimeError("the sampler was closed")
        except BaseException as caught:  # noqa: B902 - whoever asked must not wait for ever
            error = caught
        with self._changed:
            job.rollouts, job.error = rollouts, error
            self._signal()

    def _should_stop(self) -> bool:
        return self._closed  # one flag, only ever set: read without the lock

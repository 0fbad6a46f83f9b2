"""Times of functions taken in turns, so that other work on the machine falls on all alike; and what it ran on."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of each call, by the clock and by the processor (all threads of this process)."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    def of(self, clock: str) -> list[float]:
        return self.cpu if clock == "cpu" else self.wall

    def median(self, clock: str) -> float:
        return statistics.median(self.of(clock))

    def summary(self) -> dict[str, float]:
        """Median and quartiles, in milliseconds."""
        out: dict[str, float] = {}
        for clock in ("wall", "cpu"):
            low, middle, high = quartiles(self.of(clock))
            out |= {f"{clock}_ms": middle * 1e3, f"{clock}_ms_low": low * 1e3, f"{clock}_ms_high": high * 1e3}
        return {name: round(value, 4) for name, value in out.items()}


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    elsewhere: Mapping[str, Callable[[Times], None]] = MappingProxyType({}),
) -> dict[str, Times]:
    """Call each function once to compile it, then all `rounds` times in turns, each round from another start.

    Those `elsewhere` run in a process of their own and add to the times themselves.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    calls = {name: functools.partial(_timed, function) for name, function in functions.items()} | dict(elsewhere)
    times = {name: Times() for name in calls}
    names = list(calls)
    for i in range(rounds):
        start = i * len(names) // rounds
        for name in names[start:] + names[:start]:
            calls[name](times[name])
    return times


def _timed(function: Callable[[], Any], times: Times) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(function())
    times.wall.append(time.perf_counter() - wall)
    times.cpu.append(time.process_time() - cpu)


def ratio(one: Times, other: Times, clock: str) -> float:
    """Median over the rounds of one / other."""
    return statistics.median(a / b for a, b in zip(one.of(clock), other.of(clock), strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of a single value, that value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def difference(one: Times, other: Times, clock: str) -> float:
    """Median over the rounds of one - other: what both rounds had in common falls out."""
    return statistics.median(a - b for a, b in zip(one.of(clock), other.of(clock), strict=True))


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """p of seconds = c sizes^p, by least squares on logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    return statistics.linear_regression(x, y).slope


def say(text: str) -> None:
    """Progress, away from the JSON object on standard output."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What this ran on. `load_1min` above the number of cores says that other work shared them."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def clocks() -> tuple[str, ...]:
    """Which clocks say what the device spent: on an accelerator the processor's time says nothing."""
    return ("wall", "cpu") if jax.default_backend() == "cpu" else ("wall",)

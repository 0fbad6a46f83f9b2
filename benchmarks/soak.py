"""Hours of a sampler's life in minutes: random requests, cancellations, time-outs, swaps, poison, failing dispatches.

Several threads hand in requests to a service of `--engines` engines, cancel some and read what is kept; others swap
weights, in flight and between batches, some of them not finite. What must hold: every request ends once, as it may; the
log-probs of those that are looked at are those of the weights each token is stamped with, in float64, and its experts
those that the router prefers there, but for ties; nothing compiles after the warm-up; memory at the end is what it was
after it, and no device buffer is left over.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.soak_policy import (
    CONFIG,
    POISON,
    PROMPT,
    RESPONSE,
    SLOTS,
    STOP,
    TABLES,
    FailingEngine,
    Letters,
    fault,
    make_engine,
    table,
    warm,
)
from benchmarks.soak_replay import Replay
from benchmarks.timing import machine, say
from jaxrl_sat.sampler import Busy, RequestFailed, SamplerService, Ticket, WeightHolder
from jaxrl_sat.types import InputError, Prompt, Request, Rollout, SamplingParams

AGREE = 1e-4
"""Log-probs of the sampler, float32, and of the replay, float64."""
MEMORY = 1.02


def fails(fields: object) -> None:
    """A callback that does."""
    raise KeyError("deaf")


@dataclasses.dataclass(eq=False)
class Handed:
    """A request that was accepted, and the errors it may end with."""

    ticket: Ticket
    may_fail: tuple[str, ...]
    cancelled: bool = False
    hurried: bool = False


class Soak:
    """The threads, and what they have seen."""

    def __init__(self, service: SamplerService, engines: Sequence[FailingEngine], seed: int):
        self.service, self.engines, self.seed = service, engines, seed
        self.tables = [table(i) for i in range(TABLES)]
        self.broken = jax.tree.map(np.copy, self.tables[0])
        self.broken["embedding"][3, 3] = np.nan
        self.replay = Replay(self.tables)
        self.version = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.worst = 0.0
        self.lock = threading.Lock()
        self.open: dict[int, Handed] = {}  # by seed, which no two requests share
        self.kept: set[int] = set()
        self.to_replay: queue.Queue[Rollout] = queue.Queue(maxsize=64)
        self.seeds = iter(range(1, 2**32))
        self.until = 0.0

    def count(self, name: str, by: int = 1) -> None:
        with self.lock:
            self.counts[name] += by

    def blame(self, what: str) -> None:
        with self.lock:
            self.faults[what] += 1

    # ------------------------------------------------------------------------------------------------- actors

    def request(self, rng: random.Random, tokens: np.ndarray, group: int) -> Request:
        """Of a prompt, sampled in any way that is allowed."""
        top_p, top_k = rng.choice([(1.0, 0), (1.0, 0), (0.8, 0), (1.0, 5), (0.9, 10)])
        strings = ("\u0110\u0111", "\u0120") if rng.random() < 0.2 else ()
        sampling = SamplingParams(
            rng.choice([0.0, 0.7, 1.0, 1.0, 1.3]),
            rng.choice([1, 4, RESPONSE // 2, RESPONSE]),
            (STOP,),
            top_p,
            top_k=top_k,
            stop_strings=strings,
        )
        with self.lock:
            seed = next(self.seeds)
        return Request(Prompt(seed, "", "", tokens), group, seed, sampling)

    def submitter(self, rng: random.Random) -> None:
        """Hands in groups of requests, some poisoned, as fast as the queue takes them."""
        kind = rng.choices(["good", "unreadable", "deaf", "refused"], [90, 3, 3, 4])[0]
        tokens = np.asarray([rng.randrange(3, POISON) for _ in range(rng.randint(1, PROMPT))], np.int32)
        if rng.random() < 0.5:  # some begin alike
            tokens[:17] = 7
        if kind == "refused":
            tokens = tokens[:0] if rng.random() < 0.5 else np.full(4, CONFIG.vocab_size, np.int32)
        if kind == "unreadable":
            tokens[0] = POISON
        group = rng.randrange(1 << 30)
        requests = [self.request(rng, tokens, group) for _ in range(rng.choice([1, 1, 2, 4]))]
        callbacks = [fails if kind == "deaf" else rng.choice([None, lambda fields: None]) for _ in requests]
        hurried, keep = rng.random() < 0.05, rng.random() < 0.5
        may_fail = {"unreadable": ("ArithmeticError: a poisoned prompt",), "deaf": ("KeyError: 'deaf'",)}.get(kind, ())
        with self.lock:  # nobody sees a ticket before it is noted
            try:
                tickets = self.service.submit_all(
                    requests, timeout_s=rng.uniform(1e-3, 0.3) if hurried else None, on_tokens=callbacks, keep=keep
                )
            except InputError:
                self.counts["refused"] += 1
                self.faults["a good request was refused"] += kind != "refused"
                return
            except Busy:
                self.counts["busy"] += 1
                tickets = []
            self.counts["submitted"] += len(tickets)
            self.kept.update(ticket.request.seed for ticket in tickets if keep)
            for ticket in tickets:
                self.open[ticket.request.seed] = Handed(ticket, may_fail, hurried=hurried)
        for ticket in tickets:
            ticket.future.add_done_callback(lambda future, seed=ticket.request.seed: self.ended(seed, future))
        time.sleep(0.05 if not tickets else rng.uniform(0.0, 0.02))

    def canceller(self, rng: random.Random) -> None:
        """Cancels a request that is open, now and then."""
        with self.lock:
            chosen = rng.choice(list(self.open.values())) if self.open else None
            if chosen is not None:
                chosen.cancelled = True
                self.counts["cancellations"] += 1
        if chosen is not None:
            chosen.ticket.cancel()
        time.sleep(rng.uniform(0.0, 0.2))

    def swapper(self, rng: random.Random) -> None:
        """Hands over new weights, a quarter of them between batches, a tenth of them not finite; fails a dispatch."""
        at = "batch" if rng.random() < 0.25 else "step"
        if rng.random() < 0.1:
            try:
                self.service.swap(self.broken, self.version + 1, at=at)
                self.blame("weights that are not finite were taken")
            except InputError:
                self.count("swaps refused")
        else:
            self.version += 1
            self.service.swap(self.tables[self.version % TABLES], self.version, at=at)
            self.count("swaps")
        if rng.random() < 0.02:
            rng.choice(self.engines).fail_next = True
            self.count("dispatches failed")
        time.sleep(rng.uniform(0.0, 0.5))

    def taker(self, rng: random.Random) -> None:
        """Reads what was kept, in bursts."""
        try:
            seed = self.service.take(0.1).request.seed
        except RequestFailed as error:
            seed = error.request.seed
        except TimeoutError:
            return
        with self.lock:
            self.faults["taken twice, or never kept"] += seed not in self.kept
            self.kept.discard(seed)
        if rng.random() < 0.01:
            time.sleep(0.2)

    def checker(self, rng: random.Random) -> None:
        """Replays rollouts, as many as it manages."""
        try:
            rollout = self.to_replay.get(timeout=0.1)
        except queue.Empty:
            return
        found = self.replay(rollout)
        with self.lock:
            self.worst = max(self.worst, found.worst)
            self.counts["tokens replayed"] += len(rollout.tokens)
            self.counts["replayed"] += 1
            self.counts["replayed over several versions"] += len(set(rollout.versions)) > 1
            self.counts["ties between experts"] += found.ties
            self.faults["other experts than the router's"] += found.misrouted
            self.faults["log-probs of other weights than stamped"] += not found.worst <= AGREE
        time.sleep(0.02)

    def ended(self, seed: int, future: Any) -> None:
        """Judge how a request ended; called once for each, in an engine's thread."""
        with self.lock:
            handed = self.open.pop(seed, None)
        if handed is None:
            return self.blame("ended twice")
        error = future.exception()
        if error is not None:
            allowed = (*handed.may_fail, "RuntimeError: a dispatch that was made to fail")
            self.count("failed")
            return None if str(error) in allowed else self.blame(f"failed: {error}")
        rollout: Rollout = future.result()
        self.count(f"ended: {rollout.finish_reason}")
        self.count("tokens", len(rollout.tokens))
        wrong = fault(rollout)
        if rollout.request is not handed.ticket.request:
            wrong = "another request's rollout"
        if (rollout.finish_reason, False) in (("cancelled", handed.cancelled), ("timeout", handed.hurried)):
            wrong = "ended early without being asked to"
        if wrong:
            self.blame(wrong)
        elif len(rollout.tokens):
            with contextlib.suppress(queue.Full):  # the checker replays what it manages
                self.to_replay.put_nowait(rollout)
        return None

    # --------------------------------------------------------------------------------------------------- phases

    def run(self, seconds: float) -> None:
        """Everything at once for a while, then until all requests have ended and all that was kept is taken."""
        self.until = time.monotonic() + seconds
        actors = [self.submitter] * 3 + [self.canceller, self.swapper, self.taker, self.checker]
        threads = [threading.Thread(target=self._act, args=(actor, i)) for i, actor in enumerate(actors)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._drain()

    def _act(self, actor: Callable[[random.Random], None], number: int) -> None:
        rng = random.Random(f"{self.seed} {number} {self.version}")
        while time.monotonic() < self.until:
            try:
                actor(rng)
            except Exception as error:  # counted; the others go on
                self.blame(f"{actor.__name__}: {type(error).__name__}: {error}")
                time.sleep(1.0)

    def _drain(self) -> None:
        rng = random.Random(0)
        limit = time.monotonic() + 120
        while (self.open or self.kept or not self.to_replay.empty()) and time.monotonic() < limit:
            self.taker(rng)
            self.checker(rng)
        for engine in self.engines:
            engine.fail_next = False
        plain = [self.request(rng, np.full(5, 7, np.int32), group) for group in range(4 * SLOTS)]
        wait([ticket.future for ticket in self.service.submit_all(plain)], timeout=60)
        with self.lock:
            self.faults["lost"] += len(self.open)
            self.faults["kept and never to be taken"] += len(self.kept)


# ----------------------------------------------------------------------------------------------------- measured


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of this process that are resident, and the arrays on devices by kind, with nothing under way."""

    resident: int
    arrays: collections.Counter[str]

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        kinds = (f"{array.dtype.name}{list(array.shape)}" for array in jax.live_arrays())
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), collections.Counter(kinds))


def figure(name: str, value: float, unit: str, target: float, ok: bool) -> dict[str, Any]:
    """One line of the report."""
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": bool(ok)}


def figures(soak: Soak, before: Memory, after: Memory, compiled: int) -> list[dict[str, Any]]:
    """What had to hold."""
    faults = +soak.faults
    lost = faults.pop("lost", 0) + faults.pop("kept and never to be taken", 0)
    doubled = faults.pop("ended twice", 0) + faults.pop("taken twice, or never kept", 0)
    stamps = faults.pop("log-probs of other weights than stamped", 0)
    grown = round(after.resident / before.resident, 4)
    gained = (after.arrays - before.arrays).total()  # fewer are left where the last dispatch failed with its prefixes
    mixed = soak.counts["replayed over several versions"]
    return [
        figure("lost", lost, "responses", 0, lost == 0),
        figure("doubled", doubled, "responses", 0, doubled == 0),
        figure("wrong_stamps", stamps, "responses", 0, stamps == 0 and mixed > 0),
        figure("worst_log_prob_difference", soak.worst, "nats", AGREE, soak.worst <= AGREE),
        figure("other_faults", faults.total(), "", 0, faults.total() == 0),
        figure("memory_growth", grown, "x", MEMORY, grown <= MEMORY),
        figure("buffers_gained", gained, "arrays", 0, gained == 0),
        figure("compilations", compiled, "programs", 0, compiled == 0),
    ]


def main() -> None:
    """Run, check and print."""
    parser = argparse.ArgumentParser(description="The sampler under everything at once.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long, after the warm-up")
    parser.add_argument(
        "--engines", type=int, default=2, help="each on a device of its own; every second one elaborate"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.engines)
    logging.getLogger("jaxrl_sat").setLevel(logging.CRITICAL)  # dispatches fail by the hundred, as they are made to
    ran_on = machine()
    engines = [make_engine(device, i % 2 == 1) for i, device in enumerate(jax.devices()[: arguments.engines])]
    holders = [WeightHolder(engine.load_params(table(0), 0)) for engine in engines]
    say("compiling")
    for engine, holder in zip(engines, holders, strict=True):
        warm(engine, holder.current)
    limits = {"waiting_limit": 64, "output_limit": 16, "order": "longest", "codec": Letters(), "dispatch_limit_s": 60.0}
    with SamplerService(engines, holders, **limits) as service:
        soak = Soak(service, engines, arguments.seed)
        soak.run(min(180.0, 20.0 + 6 * arguments.minutes))
        before, programs = Memory.now(), sum(engine.compilations.total() for engine in engines)
        say(f"warm: {before.resident} bytes")
        soak.run(60 * arguments.minutes)
        after, health = Memory.now(), service.health()
        say(f"done: {after.resident} bytes")
    compiled = sum(engine.compilations.total() for engine in engines) - programs
    report = {
        "benchmark": "soak",
        "figures": figures(soak, before, after, compiled),
        "ran_on": ran_on,
        "minutes": arguments.minutes,
        "engines": arguments.engines,
        "counts": dict(sorted(soak.counts.items())),
        "faults": dict(+soak.faults),
        "resident_bytes": {"after_warm_up": before.resident, "at_the_end": after.resident},
        "arrays_gained": dict(after.arrays - before.arrays),
        "arrays_lost": dict(before.arrays - after.arrays),
        "steps": health.steps,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

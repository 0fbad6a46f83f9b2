"""The training run: a flat loop over updates, and what is built before it.

    rollouts -> rewards -> advantages -> packed batch -> train step -> new weights to the sampler

The sampler runs in a thread of its own and works on batches to come; this loop takes finished ones in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sat import config as config_lib
from jaxrl_sat import evaluate, mesh, metrics, model, parts, rewards, sampler, sources
from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.config import RunConfig
from jaxrl_sat.data import catalogue
from jaxrl_sat.data.loader import PromptLoader
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.layout import put
from jaxrl_sat.learner import Learner
from jaxrl_sat.objectives import ADVANTAGES, overlong_shaping
from jaxrl_sat.pipeline import lag, requests
from jaxrl_sat.pipeline.handoff import WeightStore
from jaxrl_sat.pipeline.staleness import measured as measured_staleness
from jaxrl_sat.report import curves
from jaxrl_sat.schedule import due
from jaxrl_sat.types import InputError, Params, Prompt, Request, Rollout, TrainState
from jaxrl_sat.workdir import check_same_run, claimed, record_config


class StopSignal:
    """SIGTERM and Ctrl-C ask the run to stop at the next safe point; a second Ctrl-C stops it at once."""

    def __init__(self) -> None:
        self.requested = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Listen while the run is on. Outside the main thread Python allows no handlers, and none are set."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def restore_or_init(
    learner: Learner, checkpoints: Checkpointer, config: RunConfig, params: Params
) -> tuple[TrainState, dict[int, Params]]:
    """The state to go on from and the parameter versions in flight there."""
    if checkpoints.latest() is None:
        return learner.init(params), {0: params}
    return checkpoints.restore(
        learner.abstract(params), lambda step: lag.versions_needed(config.pipeline.mode, config.pipeline.lag, step)
    )


def score(rollouts: Sequence[Rollout], tokenizer: Tokenizer) -> np.ndarray:
    """Rewards, float32 [N], in the order of `rollouts`."""
    texts = [tokenizer.decode(rollout.tokens) for rollout in rollouts]
    return rewards.score(texts, [rollout.request.prompt.answer for rollout in rollouts])


@dataclasses.dataclass(frozen=True)
class Run:
    """What the loop works with; built once by `build`."""

    config: RunConfig
    folder: Path
    tokenizer: Tokenizer
    eval_prompts: dict[str, list[Prompt]]
    learner: Learner
    ref_params: Params
    store: WeightStore[sampler.FleetWeights]
    fleet: sampler.Fleet
    sampler: sampler.SamplerThread
    checkpoints: Checkpointer
    device_lock: contextlib.AbstractContextManager[Any]


def build(config: RunConfig, folder: Path, checkpoints: Checkpointer) -> tuple[Run, TrainState]:
    """Data, model, meshes, learner, state and sampler of a run, the sampler not yet started."""
    model_config = sources.read_model_config(config.model.path)
    mesh.check_fits(config, model_config)
    tokenizer = parts.load_tokenizer(config, model_config)
    loader = PromptLoader(
        config.data.path, "train", tokenizer, config.seed, config.data.prompts_per_update, config.data.max_prompt_tokens
    )
    held_out = {}
    paths, key = config_lib.eval_paths(config)
    for path, data_set in zip(paths, catalogue.read_data_sets(paths, key), strict=True) if config.eval.every else ():
        asked = PromptLoader(path, "test", tokenizer, config.seed, 1, config.data.max_prompt_tokens, key=key)
        held_out[data_set.name] = asked.eval_prompts(config.eval.problems)
    meshes = mesh.make_meshes(config, jax.devices())
    learner = parts.make_learner(config, model_config, meshes)
    _, params = model.load_hf(
        sources.model_address(config.model.path), config.model.dtype, learner.scorer.param_shardings
    )
    state, versions = restore_or_init(learner, checkpoints, config, params)
    fleet = parts.make_fleet(config, model_config, meshes, tokenizer.eos_ids)

    store = WeightStore(config.pipeline.mode, config.pipeline.lag, fleet.load_params)
    for version in sorted(versions):
        store.publish(versions[version], version)

    def requests_for(update: int) -> list[Request]:
        return requests.training_requests(loader.batch(update), config.sampler.group_size, config.seed, update)

    device_lock = threading.Lock() if meshes.colocated else contextlib.nullcontext()
    thread = sampler.SamplerThread(
        fleet,
        store.weights,
        lambda update: lag.behaviour_version(config.pipeline.mode, config.pipeline.lag, update),
        requests_for,
        start=int(state.step),
        stop=config.updates,
        capacity=lag.batches_ahead(config.pipeline.mode, config.pipeline.lag),
        device_lock=device_lock,
        generate=sampler.Fleet.generate,
        score=parts.make_score(config, learner, meshes, store) if config.sampler.score else None,
    )
    run = Run(config, folder, tokenizer, held_out, learner, params, store, fleet, thread, checkpoints, device_lock)
    return run, state


def hand_over(run: Run, params: Params, step: int) -> None:
    """Give the sampler the weights after `step` updates, wherever the schedule uses them, and wait until it has them.

    Raises `InputError`, and the sampler keeps what it had, where one of them is not finite.
    """
    try:
        weights = run.store.publish(params, step)
    except InputError as error:
        newest = run.checkpoints.latest() or 0
        raise InputError(f"update {step}: {error}; the same command goes on from update {newest}") from error
    jax.block_until_ready(weights.decode_params if weights else None)


def evaluation(run: Run, params: Params, step: int, stop: StopSignal) -> dict[str, float]:
    """avg@k of the weights after `step` updates on the held-out problems; nothing if asked to stop meanwhile."""
    samples = run.config.eval.samples
    weights = run.store.weights(step)
    if weights is None:
        with run.device_lock:
            weights = run.fleet.load_params(params, step)
    found = {}
    for name, prompts in run.eval_prompts.items():
        wanted = requests.evaluation_requests(prompts, samples, run.config.seed)
        rollouts = run.sampler.evaluate(weights, wanted, run.config.eval.temperature, lambda: stop.requested)
        if rollouts is None:
            return {}
        found[f"eval/{name}/avg_at_{samples}"] = evaluate.avg_at_k(score(rollouts, run.tokenizer), samples)
    return found


def learn(
    run: Run, state: TrainState, taken: sampler.RolloutBatch, scores: np.ndarray, measure_direction: bool
) -> tuple[TrainState, dict[str, float], np.ndarray]:
    """One update on what was taken: the new state, its metrics, and the advantages used."""
    config, objective, scorer = run.config, run.learner.settings.objective, run.learner.scorer
    advantage = advantages(config, taken.rollouts, scores)
    packed = parts.packed_rows(config, objective, taken.rollouts, advantage)
    staleness = int(state.step) - packed.versions[packed.mask]
    batch = scorer.place(packed)
    logp_old = batch.behaviour_logp
    if taken.logp is not None:
        logp_old = put(taken.logp, logp_old.sharding)
    elif run.learner.settings.recomputed:
        logp_old = scorer.logp(batch, parts.sampled_by(run.store, packed))
    new, report = run.learner.step(state, run.ref_params, batch, logp_old)
    if measure_direction:
        report = report | run.learner.direction(state.params, new.params, batch)
    values = {name: float(value) for name, value in jax.device_get(report).items()}
    values |= {"staleness/lag_mean": float(staleness.mean()), "staleness/lag_max": float(staleness.max())}
    values["train/extra_forwards"] = sum(config_lib.extra_forwards(config, objective, measure_direction).values())
    return new, values, advantage


def advantages(config: RunConfig, rollouts: Sequence[Rollout], scores: np.ndarray) -> np.ndarray:
    """A number a response: its reward, less what it lost by being overlong, against its group's. float32 [N]."""
    groups = np.asarray([rollout.request.group for rollout in rollouts], np.int32)
    lengths = np.asarray([len(rollout.tokens) for rollout in rollouts], np.int32)
    limits = (config.sampler.max_response_tokens, config.loss.overlong_buffer, config.loss.overlong_penalty)
    rewarded = jnp.asarray(scores) + overlong_shaping(jnp.asarray(lengths), *limits)
    form = ADVANTAGES[config.loss.advantage]
    return np.asarray(form(rewarded, jnp.asarray(groups), config.data.prompts_per_update))


def rollout_metrics(rollouts: list[Rollout], scores: np.ndarray, seconds: float) -> dict[str, float]:
    """Reward, length, truncation and sampling speed of a batch that took `seconds` to sample."""
    lengths = np.asarray([len(rollout.tokens) for rollout in rollouts])
    return {
        "reward/mean": float(scores.mean()),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/truncated": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        "rollout/tokens_per_s": float(lengths.sum() / seconds),
    }


def modelled_lag(config: RunConfig, rollouts: Sequence[Rollout], generate_s: float, train_s: float) -> float:
    """The mean lag that the papers' model gives a free-running pipeline of these rates and lengths: SPEC 17."""
    groups: dict[int, list[int]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.request.group, []).append(len(rollout.tokens))
    queue = lag.batches_ahead(config.pipeline.mode, config.pipeline.lag) * len(rollouts)
    slots = config.sampler.engines * config.sampler.slots
    return measured_staleness(list(groups.values()), generate_s, train_s, slots, len(rollouts), queue)


def readable(
    run: Run, step: int, rollouts: list[Rollout], scores: np.ndarray, advantage: np.ndarray
) -> list[dict[str, Any]]:
    """The first `log.rollouts` responses of a batch, in words, with what was made of them."""
    return [
        {
            "prompt": rollout.request.prompt.text,
            "response": run.tokenizer.decode(rollout.tokens, skip_special_tokens=False),
            "answer": rollout.request.prompt.answer,
            "reward": float(scores[i]),
            "advantage": float(advantage[i]),
            "behaviour_logp": round(float(rollout.logp.sum()), 4),
            "lag": [step - 1 - int(rollout.versions.max()), step - 1 - int(rollout.versions.min())],
            "finish_reason": rollout.finish_reason,
        }
        for i, rollout in enumerate(rollouts[: run.config.log.rollouts])
    ]


def unjudged(config: RunConfig, folder: Path, done: int) -> dict[str, float]:
    """The metrics of the last update done, if a stop came before its evaluation, which is owed then; else nothing."""
    values = metrics.written(folder / "metrics.jsonl", done) if done in due(config.eval.every, config.updates) else {}
    return {} if any(name.startswith("eval/") for name in values) else values


def loop(run: Run, state: TrainState, log: metrics.Log, stop: StopSignal, owed: dict[str, float]) -> TrainState:
    """Update until `updates` are done or a signal asks to stop. Returns the last state, saved. `owed`: `unjudged`."""
    config = run.config
    every = (config.log.rollouts_every, config.log.direction_every, config.eval.every, config.checkpoint.every)
    show, look, judge, save = (set(due(n, config.updates)) for n in every)
    start = int(state.step)
    if start == 0 and config.eval.every:
        log.write(0, evaluation(run, state.params, 0, stop))
    if owed:
        log.write(start, owed | evaluation(run, state.params, start, stop))
    for step in range(start + 1, config.updates + 1):
        began = time.perf_counter()
        taken = run.sampler.take(step - 1, lambda: stop.requested)
        if taken is None:
            break
        scores = score(taken.rollouts, run.tokenizer)
        with run.device_lock:  # on one device the sampler's turn ends here, and waiting for it is waiting for rollouts
            learning = time.perf_counter()
            state, learned, advantage = learn(run, state, taken, scores, step in look)
            publishing = time.perf_counter()
            hand_over(run, state.params, step)
        run.sampler.notify()
        ended = time.perf_counter()

        values = rollout_metrics(taken.rollouts, scores, taken.generate_s) | learned
        values["time/modelled_lag"] = modelled_lag(config, taken.rollouts, taken.generate_s, ended - learning)
        tokens = sum(len(r.request.prompt.tokens) + len(r.tokens) for r in taken.rollouts)
        values |= {
            "train/tokens_per_s": tokens / (publishing - learning),
            "time/step_s": ended - began,
            "time/rollout_wait_s": learning - began,
            "time/handoff_s": ended - publishing,
            "time/score_s": taken.score_s,
            "time/sampler_compilations": run.fleet.compilations,
        }
        if step in show:
            records = readable(run, step, taken.rollouts, scores, advantage)
            metrics.save_rollouts(run.folder / "rollouts", step, records)
        if step in judge and not stop.requested:
            values |= evaluation(run, state.params, step, stop)
        log.write(step, values)
        if step in save:
            log.flush()
            run.checkpoints.save(state, run.store.in_flight())
        if stop.requested:
            break
    run.checkpoints.save(state, run.store.in_flight())
    return state


def run(config: RunConfig, folder: Path) -> None:
    """Train from scratch or from the newest checkpoint in `folder`; see DESIGN 7 for what the folder holds.

    Raises `InputError` for a configuration, model or data set that cannot be used, before anything is overwritten.
    """
    stop = StopSignal()
    with claimed(folder), stop.watching(), contextlib.closing(_checkpointer(config, folder)) as checkpoints:
        resolved = config_lib.to_dict(config)
        check_same_run(folder, resolved, resumes=checkpoints.latest() is not None)
        built, state = build(config, folder, checkpoints)
        done = int(state.step)
        owed = unjudged(config, folder, done) if done else {}
        if done >= config.updates and not owed:
            print(f"{folder}: all {config.updates} updates are done; a larger updates goes on", file=sys.stderr)
            return
        record_config(folder, resolved)
        # Stopped before the first update is not begun; the line of an update whose evaluation is owed is written anew.
        resumed_at = done - bool(owed) if done else None
        sinks: list[metrics.Sink] = [metrics.JsonLines(folder / "metrics.jsonl", resumed_at)]
        if config.log.tensorboard:
            sinks.append(metrics.TensorBoard(folder / "tensorboard", resumed_at))
        with metrics.Log([*sinks, metrics.Progress(done, config.updates)]) as log, contextlib.closing(built.sampler):
            built.sampler.start()
            state = loop(built, state, log, stop, owed)
        curves.draw([folder], folder / "curves.png")
        if int(state.step) < config.updates:
            print(f"stopped after {int(state.step)} updates; the same command goes on from there", file=sys.stderr)


def _checkpointer(config: RunConfig, folder: Path) -> Checkpointer:
    return Checkpointer(folder / "checkpoints", config.checkpoint.keep)

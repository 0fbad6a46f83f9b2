"""The training run: a flat loop over updates, and what is built before it.

    rollouts -> rewards -> advantages -> packed batch -> train step -> new weights to the sampler

The sampler runs in a thread of its own and works on batches to come, and the judge of its responses in others; this
loop takes finished batches in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxrl_sat import config as config_lib
from jaxrl_sat import mesh, metrics, model, parts, rewards, rollouts, sampler, sources
from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.config import RunConfig
from jaxrl_sat.data import catalogue
from jaxrl_sat.data.loader import PromptLoader
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.evaluation import estimates
from jaxrl_sat.layout import put
from jaxrl_sat.learner import Learner
from jaxrl_sat.pipeline import lag, requests
from jaxrl_sat.pipeline.handoff import WeightStore
from jaxrl_sat.report import curves
from jaxrl_sat.rewards import functions
from jaxrl_sat.rewards.judge import Judge, Judged
from jaxrl_sat.rewards.selection import Selection
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


def score(asked: Sequence[Rollout], tokenizer: Tokenizer) -> np.ndarray:
    """What evaluations count: 1 for the right final answer, else 0. float32 [N], in the order of `asked`."""
    texts = [tokenizer.decode(rollout.tokens) for rollout in asked]
    return rewards.score(texts, [rollout.request.prompt.answer for rollout in asked])


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
    judge: Judge


def _training_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptLoader:
    """The prompts of each update."""
    return PromptLoader(
        config.data.path,
        "train",
        tokenizer,
        config.seed,
        config_lib.prompts_asked(config),
        config.data.max_prompt_tokens,
        template=config.data.template,
        workers=config.data.workers,
        balanced=config.data.balanced,
    )


def _held_out(config: RunConfig, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """The problems that evaluations ask, by the name of their set."""
    if not config.eval.every:
        return {}
    (paths, key), limit, template = config_lib.eval_paths(config), config.data.max_prompt_tokens, config.data.template
    names = [data_set.name for data_set in catalogue.read_data_sets(paths, key)]
    sets = [PromptLoader(path, "test", tokenizer, config.seed, 1, limit, key=key, template=template) for path in paths]
    return {name: asked.eval_prompts(config.eval.problems) for name, asked in zip(names, sets, strict=True)}


def make_judge(config: RunConfig, tokenizer: Tokenizer) -> Judge:
    """The reward functions of a run. Raises `InputError` for one that cannot be called."""
    data_set = catalogue.read_data_set(config.data.path).name
    limits = (config.rewards.workers, config.rewards.timeout)
    return Judge(functions.parse(config.rewards.functions), tokenizer.decode, data_set, *limits)


def build(
    config: RunConfig,
    folder: Path,
    checkpoints: Checkpointer,
    model_config: model.ModelConfig,
    tokenizer: Tokenizer,
    judge: Judge,
) -> tuple[Run, TrainState]:
    """Data, model, meshes, learner, state and sampler of a run, the sampler not yet started."""
    mesh.check_fits(config, model_config)
    loader, held_out = _training_prompts(config, tokenizer), _held_out(config, tokenizer)
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
        wanted = requests.training_requests(loader.batch(update), config.sampler.group_size, config.seed, update)
        return judge.expect(wanted)

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
        generate=functools.partial(sampler.Fleet.generate, codec=tokenizer, finished=judge.begin),
        score=parts.make_score(config, learner, meshes, store) if config.sampler.score else None,
    )
    shared = (store, fleet, thread, checkpoints, device_lock, judge)
    return Run(config, folder, tokenizer, held_out, learner, params, *shared), state


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
    """avg@k and pass@k after `step` updates on the held-out problems; nothing if asked to stop meanwhile."""
    samples = run.config.eval.samples
    weights = run.store.weights(step)
    if weights is None:
        with run.device_lock:
            weights = run.fleet.load_params(params, step)
    found: dict[str, float] = {}
    for name, prompts in run.eval_prompts.items():
        wanted = requests.evaluation_requests(prompts, samples, run.config.seed)
        answered = run.sampler.evaluate(weights, wanted, run.config.eval.temperature, lambda: stop.requested)
        if answered is None:
            return {}
        found |= estimates.metrics(name, score(answered, run.tokenizer).reshape(-1, samples) > 0)
    return found


def rewards_of(run: Run, step: int, taken: sampler.RolloutBatch, stop: StopSignal) -> Judged | None:
    """The rewards of what was taken, mostly worked out by now; None if asked to stop before they are.

    Says which of the user's functions failed. Raises `InputError` for that where rewards.on_failure is "stop".
    """
    judged = run.judge.finish(taken.rollouts, lambda: stop.requested)
    for name, (count, reason) in judged.failures.items() if judged else ():
        text = f"{name} gave no score for {count} of {len(taken.rollouts)} responses ({reason})"
        if run.config.rewards.on_failure == "stop":
            newest = run.checkpoints.latest() or 0
            allowed = "a score for each, or rewards.on_failure=zero"
            raise InputError(
                f"update {step}: rewards.functions: {text}; allowed: {allowed}; "
                f"the same command goes on from update {newest}"
            )
        tqdm.write(f"update {step}: {text}; 0 is taken", file=sys.stderr)
    return judged


def learn(
    run: Run,
    state: TrainState,
    taken: sampler.RolloutBatch,
    advantage: np.ndarray,
    selected: Selection | None,
    measure_direction: bool,
) -> tuple[TrainState, dict[str, float]]:
    """One update on what was taken, or on what is `selected` of it: the new state and its metrics.

    Where nothing is selected no token is active, and the step leaves the update out.
    """
    config, objective, scorer = run.config, run.learner.settings.objective, run.learner.scorer
    used = np.arange(len(taken.rollouts)) if selected is None else selected.used
    idle = not len(used)
    used = np.arange(config.sampler.group_size) if idle else used
    packed = parts.packed_rows(config, objective, [taken.rollouts[i] for i in used], advantage[used])
    sampled = parts.sampled_by(run.store, packed)
    staleness = int(state.step) - packed.versions[packed.mask]
    batch = scorer.place(dataclasses.replace(packed, mask=np.zeros_like(packed.mask)) if idle else packed)
    logp_old = batch.behaviour_logp
    if taken.logp is not None:
        rows = len(packed.mask)
        logp = taken.logp if selected is None else parts.relaid(config, taken.logp, taken.rollouts, used, rows)
        logp_old = put(logp, logp_old.sharding)
    elif run.learner.settings.recomputed:
        logp_old = scorer.logp(batch, sampled)
    new, report = run.learner.step(state, run.ref_params, batch, logp_old)
    if measure_direction and not idle:
        report = report | run.learner.direction(state.params, new.params, batch)
    values = {name: float(value) for name, value in jax.device_get(report).items()}
    values |= {"staleness/lag_mean": float(staleness.mean()), "staleness/lag_max": float(staleness.max())}
    values["train/extra_forwards"] = sum(config_lib.extra_forwards(config, objective, measure_direction).values())
    values["train/tokens"] = 0 if idle else int((packed.segment_ids > 0).sum())
    return new, values


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
        sampled = time.perf_counter()
        judged = rewards_of(run, step, taken, stop) if taken else None
        if taken is None or judged is None:
            break
        waited = time.perf_counter() - sampled
        advantage = rollouts.advantages(config, taken.rollouts, judged.rewards)
        selected = rollouts.selection(config, taken.rollouts, judged.rewards)
        with run.device_lock:  # on one device the sampler's turn ends here, and waiting for it is waiting for rollouts
            learning = time.perf_counter()
            state, learned = learn(run, state, taken, advantage, selected, step in look)
            publishing = time.perf_counter()
            hand_over(run, state.params, step)
        run.sampler.notify()
        ended = time.perf_counter()

        values = rollouts.batch_metrics(config, taken.rollouts, judged, selected, taken.generate_s) | learned
        lag_s = (taken.generate_s, ended - learning)
        values |= {
            "train/tokens_per_s": values["train/tokens"] / (publishing - learning),
            "time/modelled_lag": rollouts.modelled_lag(config, taken.rollouts, *lag_s),
            "time/step_s": ended - began,
            "time/rollout_wait_s": learning - began - waited,
            "time/reward_s": judged.seconds,
            "time/reward_wait_s": waited,
            "time/handoff_s": ended - publishing,
            "time/score_s": taken.score_s,
            "time/sampler_compilations": run.fleet.compilations,
        }
        if step in show:
            decode = functools.partial(run.tokenizer.decode, skip_special_tokens=False)
            shown = taken.rollouts[: config.log.rollouts]
            records = rollouts.readable(shown, decode, step, judged, advantage)
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
    with contextlib.ExitStack() as closing:
        closing.enter_context(claimed(folder))
        closing.enter_context(stop.watching())
        checkpoints = closing.enter_context(contextlib.closing(_checkpointer(config, folder)))
        resolved = config_lib.to_dict(config)
        check_same_run(folder, resolved, resumes=checkpoints.latest() is not None)
        model_config = sources.read_model_config(config.model.path)
        tokenizer = parts.load_tokenizer(config, model_config)
        judge = closing.enter_context(contextlib.closing(make_judge(config, tokenizer)))
        built, state = build(config, folder, checkpoints, model_config, tokenizer, judge)
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

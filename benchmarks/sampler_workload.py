"""What `benchmarks.sampler` runs: its policies and requests, our engine with and without records, a step's products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import trainer
from jaxrl_sat import mesh, model
from jaxrl_sat.layout import Layout
from jaxrl_sat.model import ModelConfig
from jaxrl_sat.model.output_first import OutputFirst, times_transposed
from jaxrl_sat.model.quantised import project
from jaxrl_sat.sampler import RolloutEngine, Weights, generate
from jaxrl_sat.sampler.record import RecordLayout
from jaxrl_sat.sampler.sampling import Draw
from jaxrl_sat.types import Prompt, Request, SamplingParams

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A policy, and as many requests as slots, all of one length."""

    config: ModelConfig
    slots: int
    prompt: int
    response: int


FULL = {name: Workload(work.config, 16, 64, 128) for name, work in trainer.FULL.items()}
QUICK = {name: Workload(work.config, 4, 16, 16) for name, work in trainer.QUICK.items()}


class _Nothing(RecordLayout):
    """A record of the token alone."""

    def compact(self, expert_ids: jax.Array) -> jax.Array:
        return jnp.zeros((*expert_ids.shape[1:-1], 0), self.expert_dtype)

    def pack(self, drawn: Draw, *others: Any) -> jax.Array:
        return super().pack(dataclasses.replace(drawn, logp=jnp.zeros_like(drawn.logp)), *others)


class _Counted(RolloutEngine):
    """An engine that counts its dispatches."""

    dispatches = 0

    def advance(self, params: Any, decode_state: Any) -> Any:
        self.dispatches += 1
        return super().advance(params, decode_state)


class Ours:
    """Our sampler with its weights and requests; called, it answers them all.

    `topk` None: nothing is recorded. `steps`: of a dispatch.
    """

    def __init__(self, work: Workload, topk: int | None, steps: int):
        layout = Layout.of(jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",)), mesh.SAMPLER_RULES)
        sampling = SamplingParams(1.0, work.response, ())
        self.work = work
        sizes = (work.slots, work.prompt, work.response)
        self.engine = _Counted(work.config, layout, *sizes, sampling, topk or 0, steps_per_dispatch=steps)
        if topk is None:
            self.engine.records = self.engine.programs.records = _Nothing(0, 0, 0, 0, "uint8")
        make = jax.jit(functools.partial(model.init_params, work.config))
        self.params = make(jax.random.key(0))
        self.weights: Weights = self.engine.load_params(self.params)
        rng = np.random.default_rng(0)
        tokens = rng.integers(1, work.config.vocab_size, (work.slots, work.prompt), np.int32)
        self.requests = [Request(Prompt(i, "", "", row), group=i, seed=i) for i, row in enumerate(tokens)]

    def __call__(self) -> list[Any]:
        return generate(self.engine, self.weights, self.requests)


def steps_of(ours: Ours) -> Callable[[], None]:
    """All decode steps of the requests, once their prompts have been read, each with its records on the host."""
    engine, work = ours.engine, ours.work
    rows = engine.prefill_rows(engine.bucket(work.prompt))
    starts = range(0, work.slots, rows)
    prompts = [[request.prompt.tokens for request in ours.requests[start : start + rows]] for start in starts]
    prefixes = [engine.prefill_prompts(ours.weights, some) for some in prompts]

    def run() -> None:
        state = engine.init_decode_state()
        for start, prefix in zip(starts, prefixes, strict=True):
            slots = range(start, min(start + rows, work.slots))
            count = len(slots)
            state = engine.insert_rows(prefix, state, range(count), slots, slots, [engine.sampling] * count)
        for _ in range(work.response // engine.steps_per_dispatch):
            state, records = engine.advance(ours.weights, state)
            np.asarray(records)

    return run


def products(work: Workload, ours: Ours, cached: bool) -> Callable[[], None]:
    """The matrix products of a step with every weight as it lies there, as often as a response has tokens.

    `cached`: and those of attention with all that a slot's cache holds when the last token is sampled.
    """
    experts, decode_params = work.config.num_experts, ours.weights.decode_params

    def layer(x: jax.Array, p: Any, cache: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        attention, mlp = p["attention"], p["mlp"]
        q, k, v = (project("nd,dhk->nhk", x, attention[name]) for name in "qkv")
        q = q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1)
        x = project("nhk,hkd->nd", q if cache is None else _attended(q, *cache), attention["o"])
        if "router" not in mlp:
            inner = project("nd,df->nf", x, mlp["gate"]) + project("nd,df->nf", x, mlp["up"])
            return project("nf,fd->nd", inner, mlp["down"])
        rows = jnp.tile(x, (work.config.num_experts_per_tok, 1)).reshape(experts, -1, x.shape[-1])
        rows = jax.lax.optimization_barrier(rows + jnp.sum(x @ mlp["router"]))  # written out once
        inner = _by_expert(rows, mlp["gate"]) + _by_expert(rows, mlp["up"])
        return jnp.sum(_by_expert(inner, mlp["down"]).reshape(-1, *x.shape), axis=0)

    @jax.jit
    def step(params: Any, x: jax.Array, caches: Any) -> jax.Array:
        for p, cache in zip(params["layers"], caches, strict=True):
            x = layer(x, p, cache)
        return times_transposed(x, params["embedding"])

    x = jax.random.normal(jax.random.key(1), (work.slots, work.config.hidden_size))
    keys, values = ours.engine.init_decode_state().cache
    caches = tuple(zip(keys, values, strict=True)) if cached else (None,) * len(keys)

    def run() -> None:
        for _ in range(work.response):
            step(decode_params, x, caches).block_until_ready()

    return run


def _attended(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attention's two products, laid out as a step has them on a CPU, and nothing between them."""
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[2])
    scores = jax.lax.optimization_barrier(jnp.einsum("skld,skgd->sklg", keys, grouped)).swapaxes(2, 3)
    return jnp.einsum("skgl,skld->skgd", scores, values).reshape(q.shape)


def _by_expert(rows: jax.Array, weight: Any) -> jax.Array:
    if isinstance(weight, OutputFirst):
        return jax.lax.optimization_barrier(jnp.einsum("eod,erd->eor", weight.value, rows)).swapaxes(1, 2)
    return jnp.einsum("erd,edo->ero", rows, weight)


def busy(work: Workload, ours: Ours) -> float:
    """Share of the slot-steps that made a token: requests for 16 times the slots, most of them short, some long."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(work.response / 8), 1.0, 16 * work.slots), 1, work.response).astype(int)
    mix = [
        dataclasses.replace(
            ours.requests[i % work.slots],
            group=i,
            seed=i,
            sampling=dataclasses.replace(ours.engine.sampling, max_response_tokens=int(length)),
        )
        for i, length in enumerate(lengths)
    ]
    before = ours.engine.dispatches
    rollouts = generate(ours.engine, ours.weights, mix, order="longest")
    steps = (ours.engine.dispatches - before) * ours.engine.steps_per_dispatch
    return sum(len(rollout.tokens) for rollout in rollouts) / (steps * work.slots)


def disagreement(work: Workload, ours: Ours, theirs: dict[str, dict[str, np.ndarray]]) -> dict[str, float]:
    """Largest difference of anyone's log-probs (but NaN) from our forward pass over the same tokens, in nats."""
    rollouts = ours()
    found = {"ours": {"tokens": [r.tokens for r in rollouts], "logp": [r.logp for r in rollouts]}, **theirs}
    prompts = np.stack([request.prompt.tokens for request in ours.requests])

    @jax.jit
    def score(params: Any, sequences: jax.Array) -> jax.Array:
        hidden = model.forward(params, work.config, sequences).hidden[:, work.prompt - 1 : -1]
        return model.token_statistics(params, work.config, hidden, sequences[:, work.prompt :]).logp

    def apart(answer: dict[str, Any]) -> float:
        tokens, logp = (np.asarray(answer[name]) for name in ("tokens", "logp"))
        sequences = np.concatenate([prompts, tokens], axis=1).astype(np.int32)
        return float(np.nanmax(np.abs(np.asarray(score(ours.params, sequences)) - logp)))

    return {name: apart(answer) for name, answer in found.items()}


class Compilations:
    """A context that counts what the compiler compiles inside it."""

    def __init__(self) -> None:
        self.count = 0
        self._on = False
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += self._on and event == COMPILED

    def __enter__(self) -> Compilations:
        self._on = True
        return self

    def __exit__(self, *unused: object) -> None:
        self._on = False

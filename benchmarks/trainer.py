"""The train step of a small dense Qwen3 and of its sparse twin, beside a matrix product and Tunix's GRPO train step.

python -m benchmarks.trainer [--peer-python=PYTHON] [--only=dense|moe] [--quick] [--rounds=N]
                             [--microbatch-rows=N] [--peer-rows=N]

One call of each is taken in turns, in float32 on one device:

    ours     `learner.Learner.step` on packed full rows: GRPO, no reference policy, clipped Adam
    product  matrix products of 2048 x 2048 x 2048, whose rate is what the step's operations are measured against
    tunix    the same update of the same weights by google-tunix (`benchmarks.trainer_peer`, a process of its own;
             `benchmarks/peers.sh tunix FOLDER` makes its interpreter)

    fraction      operations of the step / its time, over the rate of the products of the same round
    over tunix    its time / ours, of the same tokens

Operations of a step, a token of a sequence of T tokens: 6 N + 12 L H hd T / 2, N the elements of the matrices that a
token meets (of the experts, those it is sent to; the head, but not the embedding), and causal attention. What is
computed again for the backward pass does not count. All sequences are of one length, so that nothing is padding for
Tunix, which takes a sequence a row. Either side takes the batch in pieces of so many rows, by default what suits it
best here: ours two (less memory, so fewer pages to touch), Tunix's the whole. Both sides compute log-probs, entropy and
their metrics; losses, gradient norms (of Tunix's where the batch is one piece) and the log-probs of every token are
compared. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peer import Peer
from benchmarks.timing import Times, clocks, in_turns, machine, quartiles, ratio, say
from jaxrl_sat import mesh, model, optim
from jaxrl_sat.data.packing import segments_per_row
from jaxrl_sat.layout import Layout
from jaxrl_sat.learner import Learner
from jaxrl_sat.model import ModelConfig
from jaxrl_sat.model.execution import Remat
from jaxrl_sat.objectives.recipes import grpo
from jaxrl_sat.step import StepSettings
from jaxrl_sat.types import Batch, Params, RouterTrace, TrainState

TARGETS = {"dense": 0.45, "moe": 0.30}
TUNIX_TARGET = 1.2
AGREE = 1e-4
PRODUCT = 2048
PRODUCTS = 8  # a call: so that one takes about a second
OPTIMIZER: dict[str, Any] = {"learning_rate": 1e-6, "b1": 0.9, "b2": 0.98, "eps": 1e-8, "max_grad_norm": 1.0}
CLIP = 0.2


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sequences of one length, prompt and response, and the policy."""

    config: ModelConfig
    sequences: int
    prompt: int
    response: int

    @property
    def length(self) -> int:
        return self.prompt + self.response

    @property
    def shape(self) -> tuple[int, int]:
        return self.sequences, self.length


def _policy(layers: int, vocab: int, width: int, mlp: int, **experts: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        tie_word_embeddings=True,
        **experts,
    )


# The twin has as many parameters, half of them at work for a token; an expert is as narrow beside the model's width as
# in Qwen3-30B-A3B.
FULL = {
    "dense": Workload(_policy(8, 8192, 512, 1280), sequences=8, prompt=64, response=448),
    "moe": Workload(
        _policy(4, 8192, 512, 1280, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=192),
        sequences=8,
        prompt=64,
        response=448,
    ),
}
QUICK = {
    "dense": Workload(_policy(2, 512, 128, 256), sequences=4, prompt=16, response=112),
    "moe": Workload(
        _policy(2, 512, 128, 256, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
        sequences=4,
        prompt=16,
        response=112,
    ),
}


def active_elements(config: ModelConfig) -> int:
    """Elements of the matrices that one token is multiplied with, the head among them and the embedding not."""
    shapes, axes = model.abstract_params(config), model.param_axes(config)
    total = config.vocab_size * config.hidden_size
    for run in config.runs:
        names = jax.tree.leaves(axes[run.name], is_leaf=lambda node: isinstance(node, tuple))
        for array, axis in zip(jax.tree.leaves(shapes[run.name]), names, strict=True):
            if array.ndim > 2:
                unused = config.num_experts // config.num_experts_per_tok if "experts" in axis else 1
                total += array.size // unused
    return total


def operations(work: Workload) -> float:
    """Multiplications and additions of one step: see the module."""
    config = work.config
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * work.length / 2
    return math.prod(work.shape) * (6 * active_elements(config) + attention)


def batch_of(work: Workload, rows: int) -> Batch:
    """The sequences packed into so many full rows; behaviour log-probs are 0."""
    rng = np.random.default_rng(0)
    shape, count = work.shape, work.sequences // rows
    tokens = rng.integers(1, work.config.vocab_size, shape).astype(np.int32)
    mask = np.broadcast_to(np.arange(work.length) >= work.prompt, shape)
    advantages = np.broadcast_to(rng.normal(size=(work.sequences, 1)).astype(np.float32), shape)

    def packed(x: np.ndarray) -> np.ndarray:
        return x.reshape(rows, -1)

    packed_shape = (rows, count * work.length)
    none = np.zeros((*packed_shape, 0), np.int32)
    return Batch(
        tokens=packed(tokens),
        positions=packed(np.broadcast_to(np.arange(work.length, dtype=np.int32), shape)),
        segment_ids=packed(np.broadcast_to(1 + np.arange(work.sequences, dtype=np.int32)[:, None] % count, shape)),
        mask=packed(mask),
        behaviour_logp=np.zeros(packed_shape, np.float32),
        advantages=packed(advantages * mask),
        versions=np.zeros(packed_shape, np.int32),
        topk_ids=none,
        topk_logp=none.astype(np.float32),
        nucleus_ids=none,
        routing=RouterTrace(np.zeros((0, *packed_shape, 0), np.int32), np.zeros(packed_shape, bool)),
    )


def learner_of(work: Workload, rows: int, microbatch_rows: int, remat: Remat) -> Learner:
    """The learner of a run on one device."""
    sizes = (1,) * 5
    devices = np.asarray(jax.devices()[:1]).reshape(sizes)
    names = ("data", "fsdp", "expert", "context", "tensor")
    layout = Layout.of(jax.sharding.Mesh(devices, names), mesh.TRAINER_RULES)
    segments = segments_per_row(math.prod(work.shape) // rows)
    settings = StepSettings(
        model=work.config,
        objective=grpo(eps_low=CLIP, eps_high=CLIP),
        kl_coef=0.0,
        kl_kind="low_var_kl",
        kl_level="token",
        entropy_coef=0.0,
        load_balance_coef=0.0,
        router_z_coef=0.0,
        temperature=1.0,
        microbatch_rows=microbatch_rows,
        num_segments=segments,
        recomputed=False,
        replay=False,
        execution=model.Execution(layout, remat, max_segments=segments + 1),
    )
    return Learner(settings, optim.make_optimizer(**OPTIMIZER))


class Ours:
    """Our train step, called again and again on one batch."""

    def __init__(self, work: Workload, rows: int, microbatch_rows: int, remat: Remat):
        self._learner = learner_of(work, rows, microbatch_rows, remat)
        self.params = self._learner.scorer.place_params(model.init_params(work.config, jax.random.key(0)))
        batch = self._learner.scorer.place(batch_of(work, rows))
        self.logp = self._learner.scorer.logp(batch, {0: self.params})
        noise = 0.1 * jax.random.normal(jax.random.key(1), self.logp.shape)
        self.batch = dataclasses.replace(batch, behaviour_logp=jnp.where(batch.mask, self.logp + noise, 0.0))
        self._state: TrainState = self._learner.init(self.params)

    def __call__(self) -> dict[str, jax.Array]:
        self._state, report = self._learner.step(self._state, self.params, self.batch, self.batch.behaviour_logp)
        return jax.block_until_ready((self._state, report))[1]

    def given(self, work: Workload) -> dict[str, np.ndarray]:
        """What Tunix's step is given: every parameter by its path, and a sequence a row."""
        batch = {"tokens": self.batch.tokens, "behaviour_logp": self.batch.behaviour_logp}
        batch |= {"advantages": self.batch.advantages}
        arrays = {name: np.asarray(x).reshape(work.shape) for name, x in batch.items()}
        return arrays | {f"params/{path}": np.asarray(x) for path, x in _by_path(self.params).items()}


def _by_path(params: Params) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@functools.cache
def product() -> Callable[[], jax.Array]:
    """`PRODUCTS` products of square matrices, one after the other."""
    left, right = (jax.random.normal(jax.random.key(i), (PRODUCT, PRODUCT)) / PRODUCT**0.5 for i in range(2))
    multiply = jax.jit(lambda x, y: x @ y)

    def run() -> jax.Array:
        out = left
        for _ in range(PRODUCTS):
            out = multiply(out, right).block_until_ready()
        return out

    return run


def disagreement(work: Workload, ours: Ours, report: dict[str, Any], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Of the first step: loss and gradient norm over the larger, log-probs of the responses in nats."""
    logp = np.asarray(ours.logp).reshape(work.shape)[:, work.prompt :]
    scalars = [name for name in ("loss", "grad_norm") if name in theirs]
    out = {name: abs(float(report[f"train/{name}"]) / float(theirs[name]) - 1) for name in scalars}
    return out | {"logp": float(np.abs(logp - theirs["logp"]).max())}


def measured(name: str, work: Workload, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The figures of one policy, and the record behind them."""
    say(f"{name}: our step is compiled")
    rows = arguments.rows or work.sequences
    ours = Ours(work, rows, min(rows, arguments.microbatch_rows), arguments.remat)
    report = ours()
    functions: dict[str, Callable[[], Any]] = {"ours": ours, "product": product()}
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    leaves = jax.tree.leaves(ours.params)
    record: dict[str, Any] = {
        "model": {key: value for key, value in work.config.to_hf().items() if isinstance(value, int)},
        "batch": {"sequences": work.sequences, "prompt": work.prompt, "response": work.response},
        "rows": list(ours.batch.tokens.shape),
        "microbatch_rows": min(rows, arguments.microbatch_rows),
        "remat": arguments.remat,
        "parameters": sum(leaf.size for leaf in leaves),
        "active_elements": active_elements(work.config),
        "operations": operations(work),
    }
    if not arguments.peer_python:
        times = in_turns(functions, rounds)
        return fractions(name, work, times, record), record
    say(f"{name}: the peer starts")
    settings = {
        "model": dataclasses.asdict(work.config),
        "prompt": work.prompt,
        "optimizer": OPTIMIZER,
        "clip": CLIP,
        "remat": arguments.peer_remat,
        "rows": arguments.peer_rows or work.sequences,
    }
    with Peer(arguments.peer_python, "benchmarks.trainer_peer", ours.given(work), settings) as peer:
        say(f"{name}: in turns")
        times = in_turns(functions, rounds, {"tunix": peer.timed})
        record |= {"peer": peer.ran_on, "disagreement": disagreement(work, ours, report, peer.results)}
    figures = fractions(name, work, times, record)
    for clock in clocks():
        value = round(ratio(times["tunix"], times["ours"], clock), 4)
        figures.append(_figure(f"{name}/{clock}_over_tunix", value, "x", TUNIX_TARGET, value >= TUNIX_TARGET))
    worst = max(record["disagreement"].values())
    figures.append(_figure(f"{name}/disagreement", worst, "relative, nats", AGREE, worst <= AGREE))
    return figures, record


def fractions(name: str, work: Workload, times: dict[str, Times], record: dict[str, Any]) -> list[dict[str, Any]]:
    """Which fraction of the products' rate the step reaches, by each clock; the spread goes into `record`."""
    figures = []
    of_products = PRODUCTS * 2 * PRODUCT**3
    record["times"] = {key: value.summary() for key, value in times.items()}
    for clock in clocks():
        steps, products = times["ours"].of(clock), times["product"].of(clock)
        values = [operations(work) / step / (of_products / each) for step, each in zip(steps, products, strict=True)]
        value = round(statistics.median(values), 4)
        figures.append(
            _figure(f"{name}/{clock}_fraction", value, "of the product's rate", TARGETS[name], value >= TARGETS[name])
        )
        record[f"{clock}_rates"] = {
            "product_gflops_best": round(of_products / min(products) / 1e9, 1),
            "product_gflops_median": round(of_products / statistics.median(products) / 1e9, 1),
            "step_gflops_best": round(operations(work) / min(steps) / 1e9, 1),
            "step_gflops_median": round(operations(work) / statistics.median(steps) / 1e9, 1),
            "fraction_quartiles": [round(x, 4) for x in quartiles(values)],
        }
        if "tunix" in times:
            by_round = [a / b for a, b in zip(times["tunix"].of(clock), steps, strict=True)]
            record[f"{clock}_rates"]["over_tunix_quartiles"] = [round(x, 4) for x in quartiles(by_round)]
    return figures


def _figure(name: str, value: float, unit: str, target: float, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": ok}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The train step beside a matrix product and Tunix's train step.")
    parser.add_argument("--peer-python", default="", help="a Python with google-tunix; none: ours alone")
    parser.add_argument("--only", choices=list(FULL), help="one of the two policies")
    parser.add_argument("--quick", action="store_true", help="small policies and few rounds: does it work at all")
    parser.add_argument("--rounds", type=int, default=0, help="calls of each")
    parser.add_argument("--rows", type=int, default=0, help="rows of the packed batch (default: one a sequence)")
    parser.add_argument("--microbatch-rows", type=int, default=2, help="rows of a microbatch of ours")
    parser.add_argument("--peer-rows", type=int, default=0, help="sequences of a micro batch of Tunix's (default: all)")
    parser.add_argument("--remat", choices=["products", "layer"], default="products", help="of our step")
    parser.add_argument("--peer-remat", choices=["NONE", "BLOCK", "DECODER"], default="NONE", help="of Tunix's step")
    arguments = parser.parse_args()
    works = QUICK if arguments.quick else FULL
    report: dict[str, Any] = {"benchmark": "trainer", "figures": [], "ran_on": machine()}
    for name in [arguments.only] if arguments.only else list(works):
        figures, report[name] = measured(name, works[name], arguments)
        report["figures"] += figures
        say(json.dumps(figures))
    print(json.dumps(report))


if __name__ == "__main__":
    main()

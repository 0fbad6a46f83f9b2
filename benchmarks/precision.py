"""What low precision costs: how far the trainer's log-probs are from the sampler's on the tokens it drew, at lag 0.

    python -m benchmarks.precision [--model=embedded|DIR] [--problems=64] [--only=NAME ...]

Both sides have the same weights. Each sampler draws its own tokens from the same seeds, and each trainer judges what
its sampler drew, once routed as the sampler was and once freely. "fp8 rollout" and "fp8 end to end" are the papers'
settings on bfloat16; on float32 the same shows what FP8 does alone. d = log pi - log mu; a row names the sampler.

Two shapes: what the trainer's own forward pass in bfloat16 differs by from itself, routed freely, on rows twice as long
and half as many. Beside it the sampler's d says whether the two programs differ by more than their shapes make them.
"excess precision" is bfloat16 where the compiler may leave out roundings (`model.excess_precision`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import machine
from jaxrl_sat import cli, mesh, model, objectives, parts, sampler, sources
from jaxrl_sat.config import RunConfig, from_config_dict, make_objective, records_read
from jaxrl_sat.data import packing
from jaxrl_sat.data.loader import PromptLoader
from jaxrl_sat.pipeline import requests
from jaxrl_sat.types import Batch, Request, Rollout

FLAGSHIP = Path(__file__).resolve().parent.parent / "configs" / "sat_grpo.py"
EXACT = 1e-5
"""Mean |d| of two float32 programs that compute the same."""
SHAPES = 1.5
"""Mean |d| of bfloat16 over what the trainer's two shapes differ by, where that is more than `EXACT`."""


@dataclasses.dataclass(frozen=True)
class Side:
    """Of the trainer or the sampler: the dtype of its weights, and what it multiplies in."""

    dtype: str
    quantise: str = "none"
    excess_precision: bool = False


FLOAT32, BFLOAT16 = Side("float32"), Side("bfloat16")
LOOSE = "bfloat16, excess precision"
PAIRS = {
    "float32": (FLOAT32, FLOAT32),
    "bfloat16 rollout": (FLOAT32, BFLOAT16),
    "bfloat16": (BFLOAT16, BFLOAT16),
    LOOSE: (Side("bfloat16", excess_precision=True), Side("bfloat16", excess_precision=True)),
    "fp8 rollout": (BFLOAT16, Side("bfloat16", "fp8")),
    "fp8 end to end": (Side("bfloat16", "fp8"), Side("bfloat16", "fp8")),
    "fp8 rollout, float32": (FLOAT32, Side("float32", "fp8")),
    "fp8 end to end, float32": (Side("float32", "fp8"), Side("float32", "fp8")),
}
"""Trainer and sampler of each row."""


def configured(arguments: argparse.Namespace, trainer: Side, drawing: Side, replay: bool) -> RunConfig:
    """The flagship's run on this model with these two sides."""
    source = cli.parse([f"--config={FLAGSHIP}:cpu"])
    config = cli.load(source, "cpu")
    longest = arguments.prompt_tokens + arguments.response_tokens
    changes = {
        "model.path": arguments.model,
        "model.dtype": trainer.dtype,
        "model.excess_precision": trainer.excess_precision,
        "data.path": arguments.data,
        "data.prompts_per_update": arguments.problems,
        "data.max_prompt_tokens": arguments.prompt_tokens,
        "sampler.group_size": arguments.group,
        "sampler.max_response_tokens": arguments.response_tokens,
        "sampler.slots": arguments.slots,
        "sampler.dtype": drawing.dtype,
        "sampler.cache_dtype": drawing.dtype,
        "sampler.quantise": drawing.quantise,
        "learner.quantise": trainer.quantise,
        "learner.replay": replay,
        "learner.row_tokens": max(64, longest),
        "learner.microbatch_rows": 8,
    }
    config.update_from_flattened_dict(changes)
    return from_config_dict(config)


class Bench:
    """What all rows share: the model, the prompts, and what each sampler has drawn."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments
        self._drawn: dict[Side, list[Rollout]] = {}
        config = configured(arguments, FLOAT32, FLOAT32, True)
        self.model_config = sources.read_model_config(config.model.path)
        mesh.check_fits(config, self.model_config)
        self._tokenizer = parts.load_tokenizer(config, self.model_config)
        self._meshes = mesh.make_meshes(config, jax.devices())
        loader = PromptLoader(
            config.data.path, "train", self._tokenizer, 0, arguments.problems, config.data.max_prompt_tokens
        )
        self._requests: list[Request] = requests.training_requests(loader.batch(0), arguments.group, 0, 0)
        _, self._params = model.load_hf(sources.model_address(config.model.path), "float32")

    def rollouts(self, config: RunConfig, drawing: Side) -> list[Rollout]:
        """What the sampler of a row drew."""
        if drawing not in self._drawn:
            say(f"sampling: {drawing}")
            engine = parts.make_engine(config, self.model_config, self._meshes, self._tokenizer.eos_ids)
            weights = engine.load_params(self._as_trained(config), 0)
            self._drawn[drawing] = sampler.generate(engine, weights, self._requests)
        return self._drawn[drawing]

    def _as_trained(self, config: RunConfig) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(config.model.dtype), self._params)

    def judged(self, config: RunConfig, rollouts: list[Rollout]) -> tuple[Batch, jax.Array]:
        """The rollouts in rows, and their log-probs by the trainer."""
        learner = parts.make_learner(config, self.model_config, self._meshes)
        records = records_read(config, make_objective(config))
        rows = (config.learner.row_tokens, config.learner.microbatch_rows)
        packed = packing.pack(rollouts, np.zeros(len(rollouts), np.float32), *rows, records)
        batch = learner.scorer.place(packed)
        return batch, learner.scorer.logp(batch, {0: learner.scorer.place_params(self._as_trained(config))})

    def two_shapes(self, side: Side) -> float:
        """Mean |difference| of the trainer's log-probs between two shapes of its batch."""
        config = configured(self._arguments, side, side, False)
        rollouts = self.rollouts(config, side)
        lengths = [len(rollout.request.prompt.tokens) + len(rollout.tokens) for rollout in rollouts]
        found = []
        for factor in (1, 2):
            row_tokens, rows = factor * config.learner.row_tokens, config.learner.microbatch_rows // factor
            learner = dataclasses.replace(config.learner, row_tokens=row_tokens, microbatch_rows=rows)
            batch, logp = self.judged(dataclasses.replace(config, learner=learner), rollouts)
            placed = packing.place(lengths, row_tokens, packing.segments_per_row(row_tokens))
            found.append(_by_response(placed, np.asarray(batch.segment_ids * batch.mask), np.asarray(logp)))
        return float(np.mean(np.abs(found[0] - found[1])))

    def mismatch(self, trainer: Side, drawing: Side, replay: bool) -> dict[str, float]:
        """Statistics of d over all response tokens."""
        config = configured(self._arguments, trainer, drawing, replay)
        batch, logp = self.judged(config, self.rollouts(config, drawing))
        evidence = objectives.make_evidence(logp, batch.behaviour_logp, batch.advantages, jnp.asarray(batch.mask))
        found = objectives.finalise(objectives.staleness(evidence))
        names = ("abs_d_mean", "abs_d_max", "k3", "d_mean", "var_d", "is_deviation")
        return {name: float(found[f"staleness/{name}"]) for name in names} | {"tokens": int(batch.mask.sum())}


def _by_response(placed: list[list[int]], segment_ids: np.ndarray, logp: np.ndarray) -> np.ndarray:
    """Log-probs of the responses' tokens, response by response."""
    found = {
        index: logp[row][segment_ids[row] == segment]
        for row, members in enumerate(placed)
        for segment, index in enumerate(members, 1)
    }
    return np.concatenate([found[index] for index in range(len(found))])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training-inference mismatch of low precision, at lag 0.")
    parser.add_argument("--model", default="embedded", help="embedded, or a Hugging Face checkpoint folder")
    parser.add_argument("--data", default="arithmetic", help="arithmetic, or the folder of a prepared data set")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="responses a problem")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="the longest prompt")
    parser.add_argument("--response-tokens", type=int, default=8, help="the longest response")
    parser.add_argument("--slots", type=int, default=64, help="responses decoded at once")
    parser.add_argument("--only", nargs="*", choices=PAIRS, default=list(PAIRS), help="rows to measure")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parsed()
    before, bench = machine(), Bench(arguments)
    routings = {"replayed": True, "free": False} if bench.model_config.num_sparse_layers else {"dense": False}
    rows: dict[str, dict[str, float]] = {}
    for name in arguments.only:
        for routing, replay in routings.items():
            row = rows[f"{name}/{routing}"] = bench.mismatch(*PAIRS[name], replay)
            say(f"{name}/{routing}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    figures = []
    for name, row in rows.items():
        target = EXACT if name.startswith("float32/") else None
        for key in ("abs_d_mean", "abs_d_max", "k3"):
            wanted = target if key == "abs_d_mean" else None
            ok = wanted is None or row[key] <= wanted
            figures.append({"name": f"{name}/{key}", "value": row[key], "unit": "nats", "target": wanted, "ok": ok})
    for pair in [name for name in ("bfloat16", LOOSE) if name in arguments.only]:
        floor = bench.two_shapes(PAIRS[pair][0])
        figures.append({"name": f"{pair}/two_shapes", "value": floor, "unit": "nats", "target": None, "ok": True})
        most = max(SHAPES * floor, EXACT)
        for routing in routings if pair != LOOSE else ():
            value = rows[f"{pair}/{routing}"]["abs_d_mean"]
            name = f"{pair}/{routing}/beside_two_shapes"
            figures.append({"name": name, "value": value, "unit": "nats", "target": most, "ok": value <= most})
    report = {
        "benchmark": "precision",
        "figures": figures,
        "ran_on": before,
        "model": arguments.model,
        "rows": rows,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

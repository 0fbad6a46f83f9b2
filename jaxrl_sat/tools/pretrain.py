"""Make the embedded model: a tiny Qwen3-MoE, from random weights, by supervised learning on generated arithmetic.

    python -m jaxrl_sat.tools.pretrain --out DIR

First it learns from right answers until it solves most problems. Then it sees a pupil's wrong answers among the right
ones, until it answers about three problems in ten when sampled at temperature 1, and most when it is greedy: that is
what reinforcement learning starts from. Only problems of the train split are seen. A run that was stopped goes on where
its last save was.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import serialization

from jaxrl_sat.data import arithmetic
from jaxrl_sat.data.characters import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_tokenizer
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.model import ModelConfig, init_params, param_axes, save_hf
from jaxrl_sat.tools.sampled_accuracy import Accuracy, measure
from jaxrl_sat.tools.supervised import Batches, train_step
from jaxrl_sat.types import InputError, Params

STATE_FILE = "pretrain_state.msgpack"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 0
    steps: int = 700
    careless_steps: int = 150
    batch: int = 256
    learning_rate: float = 3e-3
    careless_learning_rate: float = 3e-4
    careless_right: float = 0.29
    """Share of right answers in the careless phase; slips that happen to be right come on top."""
    hidden_size: int = 128

    def model(self) -> ModelConfig:
        """1.4 million parameters at width 128."""
        return ModelConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            rope_theta=10_000.0,
            tie_word_embeddings=False,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=3 * self.hidden_size // 4,
            norm_topk_prob=True,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )

    @property
    def total(self) -> int:
        """Steps of both phases."""
        return self.steps + self.careless_steps


@functools.cache
def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """Muon on the matrices, AdamW on the rest; the rate warms up, stays, and falls to nothing in the last third."""
    warm, fall = min(50, recipe.steps // 10), recipe.steps // 3
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, recipe.learning_rate, warm),
            optax.constant_schedule(recipe.learning_rate),
            optax.linear_schedule(recipe.learning_rate, 0.0, fall),
            optax.constant_schedule(recipe.careless_learning_rate),
        ],
        [warm, recipe.steps - fall, recipe.steps],
    )
    muon = optax.contrib.muon(
        rate,
        weight_decay=0.01,
        adam_b2=0.98,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: matrix_axes(recipe.model()),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def matrix_axes(config: ModelConfig) -> Params:
    """Which axes of a weight are its input and which its output, for Muon; None for what is not a plain matrix."""

    def split(axes: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | None:
        own = [i for i, name in enumerate(axes) if name not in ("layers", "experts", "choices")]
        if len(own) < 2 or "vocab" in axes:
            return None
        inputs = 1 if axes[own[0]] == "embed" else len(own) - 1
        return optax.contrib.MuonDimensionNumbers(tuple(own[:inputs]), tuple(own[inputs:]))

    return jax.tree.map(split, param_axes(config), is_leaf=lambda x: isinstance(x, tuple))


def train(recipe: Recipe, out: Path, save_every_s: float = 60.0, stop_at: int | None = None) -> Params:
    """Train, or go on training, the recipe's model; saves its state in `out` every so often and at `stop_at`.

    Raises InputError where `out` holds the state of another recipe.
    """
    config, optimizer = recipe.model(), optimizer_of(recipe)
    params = init_params(config, jax.random.key(recipe.seed), "float32")
    state: dict[str, Any] = {"params": params, "opt_state": optimizer.init(params), "step": 0}
    state = _restore(out / STATE_FILE, recipe, state)
    params, opt_state = jax.tree.map(jnp.asarray, (state["params"], state["opt_state"]))
    batches = Batches("train", recipe.batch, recipe.seed)
    begun = saved = time.monotonic()
    first, last = int(state["step"]), recipe.total if stop_at is None else stop_at
    for step in range(first, last):
        tokens, response = batches(step, 1.0 if step < recipe.steps else recipe.careless_right)
        params, opt_state, loss, load = train_step(params, opt_state, tokens, response, config, optimizer)
        if (step + 1) % 50 == 0 or step + 1 == last:
            _progress(recipe, step + 1, float(loss), np.asarray(load), (time.monotonic() - begun) / (step + 1 - first))
        if time.monotonic() - saved > save_every_s or step + 1 == last:
            _save(out / STATE_FILE, recipe, {"params": params, "opt_state": opt_state, "step": step + 1})
            saved = time.monotonic()
    return params


def _progress(recipe: Recipe, step: int, loss: float, load: np.ndarray, step_s: float) -> None:
    share = load / load.sum(axis=1, keepdims=True)
    phase = "learning" if step <= recipe.steps else "careless"
    print(
        f"{phase} {step}/{recipe.total}  loss {loss:.4f}  expert share {share.min():.3f} to {share.max():.3f}  "
        f"{step_s:.3f} s/step  {(recipe.total - step) * step_s / 60:.1f} min left",
        flush=True,
    )


def _save(file: Path, recipe: Recipe, state: dict[str, Any]) -> None:
    """Write beside and rename, so that a kill while saving leaves the state before it."""
    content = {"recipe": json.dumps(dataclasses.asdict(recipe)), **serialization.to_state_dict(state)}
    beside = file.with_suffix(".partial")
    beside.write_bytes(serialization.msgpack_serialize(jax.tree.map(_host, content)))
    os.replace(beside, file)


def _host(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _restore(file: Path, recipe: Recipe, state: dict[str, Any]) -> dict[str, Any]:
    if not file.is_file():
        return state
    content: Any = serialization.msgpack_restore(file.read_bytes())
    if json.loads(content.pop("recipe")) != dataclasses.asdict(recipe):
        raise InputError(f"{file} is the state of a run with other settings; give another --out or remove it")
    return serialization.from_state_dict(state, content)


def export(recipe: Recipe, params: Params, out: Path) -> None:
    """Write the model folder: config.json, model.safetensors, the tokenizer and the stop ids."""
    save_hf(out, recipe.model(), params)
    write_tokenizer(out)


def report(recipe: Recipe, params: Params, out: Path, problems: int) -> dict[str, Accuracy]:
    """Measure the exported model on the test split, sampled and greedy, and print both."""
    tokenizer = Tokenizer.load(out)
    held_out = list(arithmetic.problems("test", problems, 0))
    found = {}
    for name, temperature, samples in (("temperature 1", 1.0, 4), ("greedy", 0.0, 1)):
        key = jax.random.key(recipe.seed)
        found[name] = measure(params, recipe.model(), tokenizer, held_out, key, temperature, samples)
        levels = "  ".join(f"{level}: {value:.3f}" for level, value in found[name].by_level.items())
        print(
            f"{name}: {found[name].all:.3f}  by level {levels}  well formed {found[name].well_formed:.3f}", flush=True
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_sat.tools.pretrain", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the model; its state is kept there meanwhile"
    )
    parser.add_argument("--problems", type=int, default=1000, help="problems to measure it on, default %(default)s")
    for field in dataclasses.fields(Recipe):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help="default %(default)s")
    given = vars(parser.parse_args(arguments))
    out, problems = given.pop("out"), given.pop("problems")
    recipe = Recipe(**given)
    try:
        out.mkdir(parents=True, exist_ok=True)
        params = train(recipe, out)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    export(recipe, params, out)
    report(recipe, params, out, problems)
    (out / STATE_FILE).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

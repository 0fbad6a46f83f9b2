"""The evaluation of one model: problems read, asked, judged, and summed up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxrl_sat import devices
from jaxrl_sat.evaluation import answers, folder, questions
from jaxrl_sat.evaluation.options import AXES, Options
from jaxrl_sat.evaluation.questions import QuestionSet
from jaxrl_sat.evaluation.subject import Subject, make_service
from jaxrl_sat.metrics import replace_file
from jaxrl_sat.pipeline.requests import evaluation_requests
from jaxrl_sat.types import InputError, SamplingParams


def run(options: Options) -> None:
    """Evaluate, and print the figures. Raises `InputError`."""
    for name, level in (("jax", logging.WARNING), ("absl", logging.ERROR)):
        logging.getLogger(name).setLevel(level)
    subject = Subject.of(options.model)
    selection = questions.Selection(options.split, options.template, options.problems)
    room = subject.config.max_position_embeddings - options.max_tokens
    if room < 1:
        allowed = f"below {subject.config.max_position_embeddings}, the model's positions"
        raise InputError(f"--max-tokens: {options.max_tokens}; allowed: {allowed}")
    sets = questions.read_sets(options.data, selection, subject.tokenizer, room)
    devices.make_cpu_devices(math.prod((options.mesh or {}).values()))
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    options = dataclasses.replace(options, dtype=dtype)
    with _out(options.out) as out, folder.claimed(out, settings(options, subject, sets)):
        try:
            _ask(options, subject, sets, out)
        except KeyboardInterrupt:
            again = "; the same command goes on from there" if options.out else ", and nothing is kept without --out"
            print(f"stopped{again}", file=sys.stderr)
            raise
        summary = _summary(out, settings(options, subject, sets), sets)
    for line in _lines(summary["sets"]):
        print(line)
    if options.out is not None:
        print(f"tables and summary in {options.out}")


@contextlib.contextmanager
def _out(given: Path | None) -> Iterator[Path]:
    """The folder given, or one that goes away."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as short_lived:
        yield Path(short_lived)


def settings(options: Options, subject: Subject, sets: Sequence[QuestionSet]) -> dict[str, Any]:
    """What the answers hang on, by flag."""
    names = ("samples", "temperature", "top_p", "max_tokens", "seed", "template", "split", "responses", "dtype")
    return {
        "model": {"path": options.model, "files": subject.files},
        "data": {one.name: one.checksum for one in sets},
        "stop": list(options.stop),
        **{name: getattr(options, name) for name in names},
    }


def _ask(options: Options, subject: Subject, sets: Sequence[QuestionSet], out: Path) -> None:
    """Ask what is not in the tables yet."""
    done = {one.name: folder.resumed(folder.table(out, one.name)) for one in sets}
    total, begun = sum(len(one.questions) for one in sets), sum(map(len, done.values()))
    if begun == total:
        return
    mesh = options.mesh or dict.fromkeys(AXES, 1) | (
        {} if jax.default_backend() == "cpu" else {"data": len(jax.devices())}
    )
    slots = -(-min(options.slots, total * options.samples) // mesh["data"]) * mesh["data"]
    sampling = SamplingParams(
        options.temperature, options.max_tokens, subject.tokenizer.eos_ids, options.top_p, stop_strings=options.stop
    )
    longest = max(len(question.prompt.tokens) for one in sets for question in one.questions)
    assert options.dtype is not None
    service = make_service(subject, sampling, options.dtype, slots, longest, mesh)
    bar = tqdm(total=total, initial=begun, unit="problem", file=sys.stderr, dynamic_ncols=True)
    with bar, service:
        for one in sets:
            prompts = [question.prompt for question in one.questions]
            groups = answers.by_group(evaluation_requests(prompts, options.samples, options.seed))
            places = [i for i, question in enumerate(one.questions) if question.id not in done[one.name]]
            bar.set_description(one.name)
            for place, rollouts in answers.finished_groups(service, [groups[i] for i in places], 4 * slots):
                question = one.questions[places[place]]
                result = answers.judged(question, rollouts, subject.tokenizer, options.stop, options.responses)
                folder.add(folder.table(out, one.name), result)
                bar.update()


def _summary(out: Path, asked: dict[str, Any], sets: Sequence[QuestionSet]) -> dict[str, Any]:
    """Put the tables in order and write summary.json; returns what it holds."""
    found = {}
    for one in sets:
        path = folder.table(out, one.name)
        results = folder.finished(path)
        ordered = [results[question.id] for question in one.questions]
        folder.write(path, ordered)
        found[one.name] = folder.figures(ordered)
    summary = {"settings": asked, "versions": folder.versions(), "sets": found}
    replace_file(out / folder.SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def _lines(sets: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The figures for a person to read."""
    yield f"{'set':<20} {'problems':>8}  {'measure':<10} {'value':>7}  95% interval"
    for name, found in sets.items():
        for measure, one in found.items():
            if isinstance(one, dict):
                label = measure.replace("_at_", "@")
                interval = f"{one['low']:.4f} to {one['high']:.4f}"
                yield f"{name:<20} {found['problems']:>8}  {label:<10} {one['value']:>7.4f}  {interval}"
        unjudged = f", {found['unjudged']:.1%} not judged in time" if found["unjudged"] else ""
        yield f"{name:<20} {'':>8}  {found['tokens_mean']:.1f} tokens, {found['truncated']:.1%} cut off{unjudged}"

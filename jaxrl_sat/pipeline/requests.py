"""Prompts to sampling requests, with seeds that are functions of (run seed, purpose, update, place)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_sat.types import Prompt, Request

TRAINING, EVALUATION = 0, 1


def _requests(prompts: Sequence[Prompt], samples: int, entropy: tuple[int, ...]) -> list[Request]:
    seeds = np.random.SeedSequence(entropy).generate_state(len(prompts) * samples)
    return [
        Request(prompt, group, int(seeds[group * samples + sample]))
        for group, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def training_requests(prompts: Sequence[Prompt], group_size: int, seed: int, update: int) -> list[Request]:
    """`group_size` requests a prompt for the batch of `update`, groups numbered in order."""
    return _requests(prompts, group_size, (seed, TRAINING, update))


def evaluation_requests(prompts: Sequence[Prompt], samples: int, seed: int) -> list[Request]:
    """`samples` requests a problem. Every evaluation of a run has the same seeds, so differences are the model's."""
    return _requests(prompts, samples, (seed, EVALUATION))

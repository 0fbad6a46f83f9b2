"""Rollouts of any length to rows of one length: first fit, in order, a response never split.

The number of rows is rounded up to a few sizes so that the train step is compiled a few times in a run, not once a
batch; the rows that are only padding cost nothing, since the learner skips a microbatch without an active token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxrl_sat.types import Batch, InputError, Records, Rollout, RouterTrace

MAX_SEGMENTS = 256
"""Most responses that share a row; sequence-level sums are taken over this many slots a row."""


def segments_per_row(row_tokens: int) -> int:
    """The static number of segment slots of a row of `row_tokens` tokens (a response has two tokens or more)."""
    return max(1, min(MAX_SEGMENTS, row_tokens // 2))


def place(lengths: Sequence[int], row_tokens: int, max_segments: int) -> list[list[int]]:
    """First fit: the indices of the sequences that go into each row, in order.

    Raises `InputError` for a sequence that no row can hold.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    first_open = 0
    for index, length in enumerate(lengths):
        if length > row_tokens:
            raise InputError(f"learner.row_tokens: a sequence of {length} tokens; allowed: {row_tokens} or fewer")
        row = first_open
        while row < len(rows) and (free[row] < length or len(rows[row]) == max_segments):
            row += 1
        if row == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[row].append(index)
        free[row] -= length
        while first_open < len(rows) and (free[first_open] < 2 or len(rows[first_open]) == max_segments):
            first_open += 1
    return rows


def bucketed(microbatches: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most a third of the microbatches is padding."""
    size = 1
    while size < microbatches:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > 1 else (size // 3) * 4 if size > 1 else 2
    return size


def pack(
    rollouts: Sequence[Rollout],
    advantages: Float[np.ndarray, " R"],
    row_tokens: int,
    microbatch_rows: int,
    records: Records = Records(),  # noqa: B008 (frozen)
) -> Batch:
    """Pack `rollouts` and their advantages into rows; NumPy arrays, rows a bucketed multiple of `microbatch_rows`.

    Advantages are one a response, broadcast over its tokens. Routing is valid where the sampler fed the token, which
    is everywhere but at the last token of a response. Raises `InputError` for a sequence longer than a row.
    """
    lengths = [len(r.request.prompt.tokens) + len(r.tokens) for r in rollouts]
    rows = place(lengths, row_tokens, segments_per_row(row_tokens))
    count = microbatch_rows * bucketed(-(-len(rows) // microbatch_rows))
    shape = (count, row_tokens)
    layers, _, experts_per_token = rollouts[0].expert_ids.shape
    num_topk = rollouts[0].topk.ids.shape[1] if records.topk else 0
    widest = max(r.nucleus_ids.shape[1] for r in rollouts) if records.nucleus else 0
    num_nucleus = 1 << (widest - 1).bit_length() if widest else 0  # few sizes, few compilations
    batch = Batch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        mask=np.zeros(shape, bool),
        behaviour_logp=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        versions=np.zeros(shape, np.int32),
        topk_ids=np.full((*shape, num_topk), -1, np.int32),
        topk_logp=np.zeros((*shape, num_topk), np.float32),
        nucleus_ids=np.full((*shape, num_nucleus), -1, np.int32),
        routing=RouterTrace(
            expert_ids=np.zeros((layers, *shape, experts_per_token), rollouts[0].expert_ids.dtype),
            valid=np.zeros(shape, bool),
        ),
    )
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, 1):
            _write(batch, row, start, segment, rollouts[index], advantages[index])
            start += lengths[index]
    return batch


def _write(batch: Batch, row: int, start: int, segment: int, rollout: Rollout, advantage: np.floating) -> None:
    prompt = rollout.request.prompt.tokens
    middle, end = start + len(prompt), start + len(prompt) + len(rollout.tokens)
    batch.tokens[row, start:middle] = prompt
    batch.tokens[row, middle:end] = rollout.tokens
    batch.positions[row, start:end] = np.arange(end - start)
    batch.segment_ids[row, start:end] = segment
    batch.mask[row, middle:end] = True
    batch.behaviour_logp[row, middle:end] = rollout.logp
    batch.advantages[row, middle:end] = advantage
    batch.versions[row, middle:end] = rollout.versions
    if batch.topk_ids.shape[-1]:
        batch.topk_ids[row, middle:end] = rollout.topk.ids
        batch.topk_logp[row, middle:end] = rollout.topk.logp
    if batch.nucleus_ids.shape[-1]:
        batch.nucleus_ids[row, middle:end, : rollout.nucleus_ids.shape[1]] = rollout.nucleus_ids
    batch.routing.expert_ids[:, row, start : end - 1] = rollout.expert_ids
    batch.routing.valid[row, start : end - 1] = True

"""Everything that crosses a boundary between rooms, in one place.

The way of the data is one direction:

    Prompt -> Request -> sampler -> Rollout -> reward -> advantage -> Batch -> learner -> TrainState -> handoff

Host-side records hold NumPy arrays (lengths vary); device-side ones are pytrees of `jax.Array` with fixed shapes.
Letters in shapes: P prompt tokens, R response tokens, K recorded log-probs, M sparse (MoE) layers, E experts,
k experts a token, N rows, T positions of a row, V words.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int, Integer

AnyArray = Any
"""A `jax.Array`, a NumPy array on its way to the device, or a `jax.ShapeDtypeStruct` when only compiling."""

Numerics = Literal["none", "fp8"]
"""What products with a layer's weights are computed in: the dtype of their operands, or 8-bit floating point."""

Params = Any
"""A pytree of parameters: nested dicts with arrays at the leaves (see `jaxrl_sat.model`)."""


class InputError(ValueError):
    """What the user gave cannot be used. The text is one line: what, which value, what is allowed. Exit status 2."""


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn whatever goes wrong while the user's `what` is read into an `InputError` that names it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{what} cannot be used ({reason}); allowed: a file as its format has it") from error


# ------------------------------------------------------------------------------------------------ host side


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem, rendered and tokenised. `answer` is what the verifier compares with; `id` is stable over runs.

    `source` and `problem_id` are the data set's own names, where it has them; `record` is all that it has of the
    problem, by feature.
    """

    id: int
    text: str
    answer: str
    tokens: np.ndarray  # int32 [P]
    source: str = ""
    problem_id: str = ""
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Request:
    """One response wanted from the sampler. Requests of one prompt that stand together share one prefill."""

    prompt: Prompt
    group: int  # requests with one group number are samples of one prompt
    seed: int  # uint32; same seed and weights: same tokens, whatever else is in the batch
    sampling: SamplingParams | None = None  # None: the engine's own


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy (log-probs are then those of the untempered softmax).

    With `top_k` above 0 a token is drawn from the k most likely words; 0 and -1 leave all. With `top_p` below 1 it is
    drawn from its nucleus, the fewest most likely of these words whose probability after the temperature reaches
    `top_p` of theirs, or the first `nucleus` of them where those are fewer; the cap is the engine's, not a request's.
    A response ends after one of `stop_ids`, which it keeps, or once its text holds one of `stop_strings`.
    """

    temperature: float
    max_response_tokens: int
    stop_ids: tuple[int, ...]
    top_p: float = 1.0
    nucleus: int = 256
    top_k: int = 0
    stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TopK:
    """The K most likely words of the distribution a token was drawn from, most likely first; log-prob -inf for those
    that its nucleus leaves out."""

    ids: np.ndarray  # int32 [R, K]
    logp: np.ndarray  # float32 [R, K]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled response with everything off-policy training needs to know of how it was sampled.

    `expert_ids[:, t]` is the routing of position t of prompt + response, recorded when that token was fed: there are
    P + R - 1 of them, since the last sampled token is never fed. Ids are stored in the smallest integer that fits.
    `nucleus_ids[t]` are the words that token t was drawn from, most likely first, -1 behind the last and throughout
    where all words could be drawn or it was greedy; C is the length of the longest, at least 1, and 0 where the engine
    draws from all words alone.
    """

    request: Request
    tokens: np.ndarray  # int32 [R], the stop token included
    logp: np.ndarray  # float32 [R], behaviour log-prob under the distribution sampled from
    topk: TopK
    nucleus_ids: np.ndarray  # int32 [R, C]
    expert_ids: np.ndarray  # uint8 or uint16 [M, P + R - 1, k]
    versions: np.ndarray  # int32 [R], weight version that sampled each token
    prefill_version: int
    finish_reason: str  # "stop", "length", "cancelled" or "timeout"


@dataclasses.dataclass(frozen=True)
class Records:
    """Which of the sampler's records travel to the learner: top-K log-probs, nucleus. What nobody reads stays."""

    topk: bool = False
    nucleus: bool = False


# ---------------------------------------------------------------------------------------------- device side


@struct.dataclass
class RouterTrace:
    """Router choices of each sparse layer. Where `valid` is False the token routes freely."""

    expert_ids: Integer[AnyArray, "M N T k"]
    valid: Bool[AnyArray, "N T"]


@struct.dataclass
class RouterSums:
    """What the routers of the sparse layers did, float32, summed over tokens that are not padding.

    The sums of two groups of tokens add up to those of both.
    """

    counts: Float[AnyArray, "M E"]  # tokens sent to each expert; a token counts for each of its k experts
    probabilities: Float[AnyArray, "M E"]  # softmax over all experts
    z: Float[AnyArray, " M"]  # squared log-sum-exp of the logits
    tokens: Float[AnyArray, ""]  # tokens that each of the above is over


@struct.dataclass
class Batch:
    """Packed rows for one update. Every per-token array stands at the position of the token it is about.

    `segment_ids` numbers the responses inside a row from 1; 0 is padding. `mask` is True on response tokens that
    train. A response never crosses rows. K is 0 where the objective needs no top-K records, C where the nucleus is not
    replayed.
    """

    tokens: Int[AnyArray, "N T"]
    positions: Int[AnyArray, "N T"]
    segment_ids: Int[AnyArray, "N T"]
    mask: Bool[AnyArray, "N T"]
    behaviour_logp: Float[AnyArray, "N T"]
    advantages: Float[AnyArray, "N T"]
    versions: Int[AnyArray, "N T"]  # weight version that sampled the token; 0 where mask is False
    topk_ids: Int[AnyArray, "N T K"]  # -1 where mask is False
    topk_logp: Float[AnyArray, "N T K"]  # under the behaviour policy
    nucleus_ids: Int[AnyArray, "N T C"]  # -1 where unused
    routing: RouterTrace


@struct.dataclass
class TrainState:
    """What training carries from update to update. `step` counts updates done, `skipped` those left out."""

    params: Params
    opt_state: Any
    step: Int[AnyArray, ""]
    skipped: Int[AnyArray, ""]

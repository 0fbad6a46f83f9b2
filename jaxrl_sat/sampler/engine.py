"""The policy as a JetStream engine that records what off-policy training needs of every token.

`prefill` reads prompts, `insert` puts them into slots of the decode state, `generate` feeds one token a slot and
samples the next. Prefill samples nothing: the first `generate` feeds the last prompt token again and samples from it
like from any other. So sampling, log-probs and routing come from one program, and all samples of a prompt share one
prefill.

Shapes are fixed (slots; prompt buckets with a fixed number of rows each), so nothing compiles after each bucket has
been seen, and a row's arithmetic does not depend on what else is in the batch.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_sat import model
from jaxrl_sat.layout import Layout
from jaxrl_sat.model import ModelConfig
from jaxrl_sat.sampler import checks
from jaxrl_sat.sampler import jetstream_compat as jetstream
from jaxrl_sat.sampler.prefix_cache import PrefixCache
from jaxrl_sat.sampler.programs import Programs, Shapes
from jaxrl_sat.sampler.record import RecordLayout, RolloutTokens
from jaxrl_sat.sampler.state import DecodeState, Pool, Prefix, SlotSampling
from jaxrl_sat.sampler.weights import WeightHolder, Weights, current
from jaxrl_sat.types import InputError, Numerics, Params, Request, SamplingParams

PREFILL_TOKENS = 256
"""Tokens one prefill reads: a bucket of P tokens takes this / P prompts at once, at least one."""


class RolloutEngine(jetstream.Engine):
    """A JetStream engine over `jaxrl_sat.model`; see the module. `compilations` counts programs by kind.

    `layout` needs a mesh; its "rows" are slots. Wherever JetStream says params, `Weights` or a `WeightHolder` is meant.
    `sampling` is that of requests which bring none. Whether requests may have a top-p or top-k is static, since the
    records must have room for nuclei: where `sampling` has one, or where `restricted` says so.

    `cache_dtype`: a floating one, or int8. `prefill_chunk`: tokens of the pieces that longer prompts are read in, a
    power of two from 16; 0 reads all prompts whole. `prefix_cache_bytes`: of pieces kept on the devices for prompts
    that begin with the same text (a copy on each that slots are spread over), until other weights come, or with
    `keep_cache_at_swap` beyond that. `recompute_prompt_cache`: a step by other weights first reads the prompts and
    responses so far of its slots again. `steps_per_dispatch`: of `advance`. `excess_precision`: see `model.Execution`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        slots: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        sampling: SamplingParams,
        topk: int = 20,
        dtype: Any = "float32",
        cache_dtype: Any = "float32",
        numerics: Numerics = "none",
        tokenizer: Any = None,
        tokenizer_path: str = "",
        restricted: bool = False,
        steps_per_dispatch: int = 1,
        prefill_chunk: int = 0,
        prefix_cache_bytes: int = 0,
        keep_cache_at_swap: bool = False,
        recompute_prompt_cache: bool = False,
        excess_precision: bool = True,
    ):
        checks.check_engine(config, slots, max_prompt_tokens, sampling, steps_per_dispatch)
        checks.check_chunks(prefill_chunk, prefix_cache_bytes)
        restricted = restricted or sampling.top_p < 1 or sampling.top_k > 0
        nucleus = min(sampling.nucleus, config.vocab_size) if restricted else 0
        self.config = config
        self.sampling = sampling
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        checks.check_sampling(self._limits(nucleus), sampling)
        self.records = RecordLayout.of(config, min(topk, config.vocab_size), nucleus)
        self.keep_cache_at_swap = keep_cache_at_swap
        self.buckets = _buckets(max_prompt_tokens)
        self._layout = layout
        self._tokenizer = tokenizer
        self._tokenizer_path = tokenizer_path
        self._serial = itertools.count()  # seeds for requests that bring none
        self._param_shardings = layout.place(model.param_specs(config, layout))
        length = self.buckets[-1] + max_response_tokens
        sizes = (slots, length, prefill_chunk, steps_per_dispatch)
        shapes = Shapes(*sizes, dtype, cache_dtype, recompute_prompt_cache)
        self.programs = Programs(config, layout, numerics, excess_precision, self.records, shapes)
        self._pool: Pool | None = None  # made when first needed
        self._prefixes: PrefixCache | None = None
        if prefix_cache_bytes:
            pieces = checks.pieces_of_pool(prefix_cache_bytes, self.programs.pool_bytes())
            self._prefixes = PrefixCache(pieces, prefill_chunk, keep_cache_at_swap)

    @property
    def compilations(self) -> collections.Counter[str]:
        """Programs compiled so far, by kind."""
        return self.programs.compilations

    @property
    def steps_per_dispatch(self) -> int:
        """Steps that `advance` takes."""
        return self.programs.shapes.steps

    def check(self, request: Request) -> None:
        """`InputError`, which names the field, for a request that this engine cannot serve."""
        checks.check_prompt(request.prompt, self.max_prompt_tokens, self.config.vocab_size)
        checks.check_sampling(self._limits(self.records.nucleus), request.sampling or self.sampling)

    def _limits(self, nucleus: int) -> checks.Limits:
        return checks.Limits(self.config.vocab_size, self.max_response_tokens, nucleus)

    def load_params(self, params: Params, version: int = 0) -> Weights:
        """Copy stacked parameters to this engine's mesh, in its layout and dtype, sharing no memory with `params`."""
        placed = jax.device_put(params, self._param_shardings)
        return Weights(self.programs.load(placed), version)

    # -------------------------------------------------------------------------------------------- prefill

    def bucket(self, length: int) -> int:
        """The padded length a prompt of `length` tokens is read at."""
        return next(bucket for bucket in self.buckets if length <= bucket)

    def prefill_rows(self, bucket: int) -> int:
        """Prompts of a bucket that one prefill reads: at least one for each device that slots are spread over."""
        spread = self._layout.ways(self._layout.spec(("rows",), (self.max_concurrent_decodes,))[0])
        return spread * -(-max(1, PREFILL_TOKENS // bucket) // spread)

    def prefill(self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> Prefix:
        """Read one prompt: the first `true_length` of `padded_tokens`, after the text of `existing_prefix` if given.

        An existing prefix is read again with what follows it, in the bucket of the whole, but for what of it is kept
        for all prompts that begin so. `InputError` if the whole is longer than `max_prefill_length`.
        """
        tokens = np.asarray(padded_tokens, np.int32)[:true_length]
        if existing_prefix is not None:
            before = np.asarray(existing_prefix.tokens)[0, : int(existing_prefix.lengths[0])]
            tokens = np.concatenate([before, tokens])
        if len(tokens) > self.max_prefill_length:
            raise InputError(f"prompt with its prefix: {len(tokens)} tokens; at most {self.max_prefill_length} allowed")
        return self.prefill_prompts(params, [tokens])

    def prefill_prompts(self, params: Weights | WeightHolder, prompts: Sequence[np.ndarray]) -> Prefix:
        """Read up to `prefill_rows(bucket)` prompts of one bucket; row i of the result is prompt i.

        Takes one dispatch, or one a piece where the bucket is longer than `prefill_chunk`, kept pieces left out.
        """
        weights = current(params)
        bucket = self.bucket(max(map(len, prompts)))
        tokens = np.zeros((self.prefill_rows(bucket), bucket), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        if 0 < self.programs.shapes.chunk < bucket:
            return self._read_in_pieces(weights, tokens, lengths, len(prompts))
        versions = np.full(len(tokens), weights.version, np.int32)
        return self.programs.prefill(weights.decode_params, versions, tokens, lengths)

    def _read_in_pieces(self, weights: Weights, tokens: np.ndarray, lengths: np.ndarray, count: int) -> Prefix:
        """`count`: of the rows that are prompts; the others are padding."""
        size, prefixes = self.programs.shapes.chunk, self._prefixes
        starts = np.arange(0, int(lengths.max()), size)
        if prefixes is None:
            versions = np.full(len(tokens), weights.version, np.int32)
            return self._with_pieces(weights, self.programs.begin(None, None, versions, tokens, lengths), starts)
        if self._pool is None:
            self._pool = self.programs.init_pool(prefixes.size)
        try:
            found = prefixes.find(weights, tokens, lengths)
            # One piece is read of all rows together, so it is left out only where each row has it or has ended.
            there = found.blocks < prefixes.size
            ended = np.arange(there.shape[1]) * size >= lengths[:, None]
            left_out = (there | ended)[:count].all(axis=0)
            unread = starts[~left_out[: len(starts)]]
            versions = np.where(left_out & there, found.versions, weights.version).min(axis=1).astype(np.int32)
            prefix = self.programs.begin(self._pool, found.blocks, versions, tokens, lengths)
            prefix = self._with_pieces(weights, prefix, unread)
            new = prefixes.keep(tokens, lengths, weights.version)
            if (new < prefixes.size).any():
                self._pool = self.programs.keep(self._pool, prefix, new)
        except BaseException:
            self._pool = None
            prefixes.forget()
            raise
        return prefix

    def _with_pieces(self, weights: Weights, prefix: Prefix, starts: np.ndarray) -> Prefix:
        for start in starts:
            prefix = self.programs.chunk(weights.decode_params, prefix, np.int32(start))
        return prefix

    def get_prefix_destination_sharding(self) -> Any:
        """Where a prefix from another engine has to lie: whole on every device, whatever its bucket."""
        return self._layout.sharding((), ())

    # -------------------------------------------------------------------------------------- insert, release

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int, seed: int | None = None) -> DecodeState:
        """Start a response to the first prompt of `prefix` in `slot`. Without a seed, the engine counts its own up."""
        chosen = next(self._serial) if seed is None else seed
        return self.insert_rows(prefix, decode_state, [0], [slot], [chosen], [self.sampling])

    def insert_rows(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        rows: Sequence[int],
        slots: Sequence[int],
        seeds: Sequence[int],
        sampling: Sequence[SamplingParams],
    ) -> DecodeState:
        """Start responses to prompts `rows` of `prefix` in `slots`, in one dispatch. Consumes `decode_state`."""
        size = next(s for s in _insert_sizes(self.max_concurrent_decodes) if len(slots) <= s)
        pad = size - len(slots)
        # Padding points past the last slot, where writes are dropped.
        where = np.asarray([*slots, *[self.max_concurrent_decodes] * pad], np.int32)
        chosen = np.asarray([*rows, *[0] * pad], np.int32)
        keys = np.asarray([*seeds, *[0] * pad], np.uint32)
        return self.programs.insert(decode_state, prefix, chosen, where, keys, SlotSampling.of(sampling, size))

    def release(self, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """End the responses in `slots` at once, without a record. Consumes `decode_state`."""
        ended = np.zeros(self.max_concurrent_decodes, bool)
        ended[list(slots)] = True
        return self.programs.release(decode_state, ended)

    # ------------------------------------------------------------------------------------------- generate

    def init_decode_state(self) -> DecodeState:
        """A decode state with no slot in use."""
        return self.programs.init()

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, RolloutTokens]:
        """Feed one token a slot and sample the next. Consumes `decode_state`; the result is still on its way."""
        weights = current(params)
        state, data = self.programs.generate(weights.decode_params, np.int32(weights.version), decode_state)
        return state, RolloutTokens.of(data, self.records)

    def advance(self, params: Weights | WeightHolder, decode_state: DecodeState) -> tuple[DecodeState, jax.Array]:
        """`steps_per_dispatch` steps by one version in one dispatch: records int32 [steps, S, W], see `RecordLayout`.

        Steps after the last active slot has finished are not taken; their records say that no slot is valid. Consumes
        `decode_state`; the result is still on its way.
        """
        weights = current(params)
        return self.programs.advance(weights.decode_params, np.int32(weights.version), decode_state)

    # ------------------------------------------------------------------------------------------ properties

    def get_tokenizer(self) -> Any:
        """Where the tokenizer lies."""
        return jetstream.TokenizerParameters(path=self._tokenizer_path, extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> jetstream.Tokenizer:
        """The tokenizer the engine was given, as JetStream sees one; ids alone where it was given none."""
        eos = self.config.eos_token_id
        first = self.sampling.stop_ids[0] if self.sampling.stop_ids else 0
        return jetstream.IdTokenizer(
            bos_id=self.config.bos_token_id or 0,
            eos_id=eos if isinstance(eos, int) else first,
            pad_id=self.config.pad_token_id or 0,
            stop_ids=self.sampling.stop_ids,
            codec=self._tokenizer,
        )

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self.programs.shapes.slots

    @property
    def samples_per_slot(self) -> int:
        """One: each sample of a group has a slot of its own."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The largest prompt bucket, `max_prompt_tokens` rounded up to a power of two from 16."""
        return self.buckets[-1]

    @property
    def mesh(self) -> Mesh:
        """The devices this engine runs on."""
        assert isinstance(self._layout.mesh, Mesh)
        return self._layout.mesh

    @property
    def colocated_cpus(self) -> list[Any] | None:
        """The CPU devices of this host, or None where JAX was started without them."""
        try:
            return jax.local_devices(backend="cpu")
        except RuntimeError:
            return None


def _buckets(longest: int) -> tuple[int, ...]:
    """Powers of two from 16 to the first that holds `longest`: JetStream's own list, as its Driver pads to it."""
    buckets = [16]
    while buckets[-1] < longest:
        buckets.append(2 * buckets[-1])
    return tuple(buckets)


def _insert_sizes(slots: int) -> tuple[int, ...]:
    """How many slots one insert fills: powers of four, and all. Each size compiles once a bucket."""
    sizes = [1]
    while 4 * sizes[-1] < slots:
        sizes.append(4 * sizes[-1])
    return (*sizes, slots) if slots > 1 else (1,)

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
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_sat import model
from jaxrl_sat.layout import Layout
from jaxrl_sat.model import ModelConfig
from jaxrl_sat.sampler import checks
from jaxrl_sat.sampler import jetstream_compat as jetstream
from jaxrl_sat.sampler.record import GOING, LENGTH, STOP, RecordLayout, RolloutTokens
from jaxrl_sat.sampler.sampling import draw
from jaxrl_sat.sampler.state import DecodeState, Prefix, SlotSampling, empty_state, slot_shardings
from jaxrl_sat.sampler.weights import WeightHolder, Weights, current
from jaxrl_sat.types import InputError, Numerics, Params, Request, SamplingParams

PREFILL_TOKENS = 256
"""Tokens one prefill reads: a bucket of P tokens takes this / P prompts at once, at least one."""


class RolloutEngine(jetstream.Engine):
    """A JetStream engine over `jaxrl_sat.model`; see the module. `compilations` counts programs by kind.

    `layout` needs a mesh; its "rows" are slots. Wherever JetStream says params, `Weights` or a `WeightHolder` is meant.
    `sampling` is that of requests which bring none. Whether requests may have a top-p or top-k is static, since the
    records must have room for nuclei: where `sampling` has one, or where `restricted` says so.
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
    ):
        checks.check_engine(config, slots, max_prompt_tokens, sampling, steps_per_dispatch)
        restricted = restricted or sampling.top_p < 1 or sampling.top_k > 0
        nucleus = min(sampling.nucleus, config.vocab_size) if restricted else 0
        self.config = config
        self.sampling = sampling
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self.steps_per_dispatch = steps_per_dispatch
        checks.check_sampling(self._limits(nucleus), sampling)
        self.records = RecordLayout.of(config, min(topk, config.vocab_size), nucleus)
        self.compilations: collections.Counter[str] = collections.Counter()
        self.buckets = _buckets(max_prompt_tokens)
        self._execution = model.Execution(layout, numerics=numerics)
        self._dtype = dtype
        self._slots = slots
        self._tokenizer = tokenizer
        self._tokenizer_path = tokenizer_path
        self._serial = itertools.count()  # seeds for requests that bring none
        length = self.buckets[-1] + max_response_tokens
        make_state = functools.partial(empty_state, config, slots, length, cache_dtype, layout)
        self._state_shardings = slot_shardings(jax.eval_shape(make_state), config, layout)
        self._param_shardings = layout.place(model.param_specs(config, layout))
        self._init = jax.jit(make_state, out_shardings=self._state_shardings)
        loaded = layout.place(model.decode_param_specs(config, layout, numerics))
        self._load = jax.jit(self._load_program, out_shardings=loaded)
        self._prefill = jax.jit(self._prefill_program)
        self._insert = jax.jit(self._insert_program, donate_argnums=0, out_shardings=self._state_shardings)
        self._release = jax.jit(self._release_program, donate_argnums=0, out_shardings=self._state_shardings)
        stepped = {"donate_argnums": 2, "out_shardings": (self._state_shardings, self._replicated)}
        self._generate = jax.jit(self._generate_program, **stepped)
        self._advance = jax.jit(self._advance_program, **stepped)

    def check(self, request: Request) -> None:
        """`InputError`, which names the field, for a request that this engine cannot serve."""
        checks.check_prompt(request.prompt, self.max_prompt_tokens, self.config.vocab_size)
        checks.check_sampling(self._limits(self.records.nucleus), request.sampling or self.sampling)

    def _limits(self, nucleus: int) -> checks.Limits:
        return checks.Limits(self.config.vocab_size, self.max_response_tokens, nucleus)

    # -------------------------------------------------------------------------------------------- weights

    def load_params(self, params: Params, version: int = 0) -> Weights:
        """Copy stacked parameters to this engine's mesh, in its layout and dtype, sharing no memory with `params`."""
        placed = jax.device_put(params, self._param_shardings)
        return Weights(self._load(placed), version)

    def _load_program(self, params: Params) -> Any:
        self.compilations["load"] += 1
        return model.decode_params(params, self._dtype, self._execution.numerics)

    # -------------------------------------------------------------------------------------------- prefill

    def bucket(self, length: int) -> int:
        """The padded length a prompt of `length` tokens is read at."""
        return next(bucket for bucket in self.buckets if length <= bucket)

    def prefill_rows(self, bucket: int) -> int:
        """Prompts of a bucket that one prefill reads: at least one for each device that slots are spread over."""
        spread = self._execution.layout.ways(self._execution.layout.spec(("rows",), (self._slots,))[0])
        return spread * -(-max(1, PREFILL_TOKENS // bucket) // spread)

    def prefill(self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> Prefix:
        """Read one prompt: the first `true_length` of `padded_tokens`, after the text of `existing_prefix` if given.

        An existing prefix is read again with what follows it, in the bucket of the whole. `InputError` if that is
        longer than `max_prefill_length`.
        """
        tokens = np.asarray(padded_tokens, np.int32)[:true_length]
        if existing_prefix is not None:
            before = np.asarray(existing_prefix.tokens)[0, : int(existing_prefix.lengths[0])]
            tokens = np.concatenate([before, tokens])
        if len(tokens) > self.max_prefill_length:
            raise InputError(f"prompt with its prefix: {len(tokens)} tokens; at most {self.max_prefill_length} allowed")
        return self.prefill_prompts(params, [tokens])

    def prefill_prompts(self, params: Weights | WeightHolder, prompts: Sequence[np.ndarray]) -> Prefix:
        """Read up to `prefill_rows(bucket)` prompts of one bucket in one dispatch; row i of the result is prompt i."""
        weights = current(params)
        bucket = self.bucket(max(map(len, prompts)))
        tokens = np.zeros((self.prefill_rows(bucket), bucket), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        return self._prefill(weights.decode_params, np.int32(weights.version), tokens, lengths)

    def _prefill_program(self, decode_params: Any, version: Any, tokens: Any, lengths: Any) -> Prefix:
        self.compilations["prefill"] += 1
        shard = lambda tree: jax.lax.with_sharding_constraint(  # noqa: E731
            tree, slot_shardings(tree, self.config, self._execution.layout)
        )
        tokens, lengths = shard((tokens, lengths))
        cache, expert_ids = model.prefill(decode_params, self.config, tokens, lengths, self._execution)
        compact = self.records.compact(expert_ids)
        return Prefix(
            cache=shard((cache.k, cache.v)), tokens=tokens, lengths=lengths, expert_ids=compact, version=version
        )

    def get_prefix_destination_sharding(self) -> Any:
        """Where a prefix from another engine has to lie: whole on every device, whatever its bucket."""
        return self._replicated

    # --------------------------------------------------------------------------------------------- insert

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
        size = next(s for s in _insert_sizes(self._slots) if len(slots) <= s)
        pad = size - len(slots)
        # Padding points past the last slot, where writes are dropped.
        where = np.asarray([*slots, *[self._slots] * pad], np.int32)
        chosen = np.asarray([*rows, *[0] * pad], np.int32)
        keys = np.asarray([*seeds, *[0] * pad], np.uint32)
        return self._insert(decode_state, prefix, chosen, where, keys, SlotSampling.of(sampling, size))

    def _insert_program(
        self, state: DecodeState, prefix: Prefix, rows: Any, slots: Any, seeds: Any, sampling: SlotSampling
    ) -> DecodeState:
        self.compilations["insert"] += 1
        bucket = prefix.tokens.shape[1]

        def put(old: jax.Array, new: Any) -> jax.Array:
            return old.at[slots].set(new, mode="drop")

        def put_cache(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[slots, :bucket].set(new[rows].astype(old.dtype), mode="drop")

        last = prefix.lengths[rows] - 1
        return DecodeState(
            cache=jax.tree.map(put_cache, state.cache, prefix.cache),
            tokens=put(state.tokens, prefix.tokens[rows, last]),
            positions=put(state.positions, last),
            seeds=put(state.seeds, seeds),
            sampling=jax.tree.map(put, state.sampling, sampling),
            lengths=put(state.lengths, 0),
            active=put(state.active, True),
        )

    def release(self, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """End the responses in `slots` at once, without a record. Consumes `decode_state`."""
        ended = np.zeros(self._slots, bool)
        ended[list(slots)] = True
        return self._release(decode_state, ended)

    def _release_program(self, state: DecodeState, ended: Any) -> DecodeState:
        self.compilations["release"] += 1
        return dataclasses.replace(state, active=state.active & ~ended)

    # ------------------------------------------------------------------------------------------- generate

    def init_decode_state(self) -> DecodeState:
        """A decode state with no slot in use."""
        return self._init()

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, RolloutTokens]:
        """Feed one token a slot and sample the next. Consumes `decode_state`; the result is still on its way."""
        weights = current(params)
        state, data = self._generate(weights.decode_params, np.int32(weights.version), decode_state)
        return state, RolloutTokens.of(data, self.records)

    def advance(self, params: Weights | WeightHolder, decode_state: DecodeState) -> tuple[DecodeState, jax.Array]:
        """`steps_per_dispatch` steps by one version in one dispatch: records int32 [steps, S, W], see `RecordLayout`.

        Steps after the last active slot has finished are not taken; their records say that no slot is valid. Consumes
        `decode_state`; the result is still on its way.
        """
        weights = current(params)
        return self._advance(weights.decode_params, np.int32(weights.version), decode_state)

    def _generate_program(self, decode_params: Any, version: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        self.compilations["generate"] += 1
        return self._step(decode_params, version, state)

    def _advance_program(self, decode_params: Any, version: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        self.compilations["advance"] += 1
        shape = (self.steps_per_dispatch, self._slots, self.records.width)

        def some_go(carry: Any) -> jax.Array:
            done, state, _ = carry
            return (done < shape[0]) & jnp.any(state.active)

        def step(carry: Any) -> Any:
            done, state, records = carry
            state, data = self._step(decode_params, version, state)
            return done + 1, state, records.at[done].set(data)

        # A loop that ends, not a scan with a branch in it: XLA would copy the cache from and to each branch.
        _, state, records = jax.lax.while_loop(some_go, step, (jnp.int32(0), state, jnp.zeros(shape, jnp.int32)))
        return state, records

    def _step(self, decode_params: Any, version: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        cache = model.Cache(*state.cache)
        fed = (cache, state.tokens, state.positions)
        logits, cache, expert_ids = model.decode(decode_params, self.config, *fed, self._execution)
        asked, sizes = state.sampling, (self.records.topk, self.records.nucleus)
        drawn = draw(logits, state.seeds, state.positions, asked.temperature, *sizes, asked.top_p, asked.top_k)
        lengths = state.lengths + state.active
        stopped = jnp.any(drawn.tokens[:, None] == asked.stop_ids, axis=-1)
        full = lengths >= asked.limit
        finish = jnp.where(state.active, jnp.where(stopped, STOP, jnp.where(full, LENGTH, GOING)), GOING)
        going = state.active & (finish == GOING)
        data = self.records.pack(drawn, state.active, lengths, finish, version, expert_ids)
        advanced = dataclasses.replace(
            state,
            cache=(cache.k, cache.v),
            tokens=jnp.where(going, drawn.tokens, state.tokens),
            positions=state.positions + going,
            lengths=lengths,
            active=going,
        )
        return advanced, data

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
        return self._slots

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
        assert isinstance(self._execution.layout.mesh, Mesh)
        return self._execution.layout.mesh

    @property
    def colocated_cpus(self) -> list[Any] | None:
        """The CPU devices of this host, or None where JAX was started without them."""
        try:
            return jax.local_devices(backend="cpu")
        except RuntimeError:
            return None

    @functools.cached_property
    def _replicated(self) -> jax.sharding.NamedSharding:
        return self._execution.layout.sharding((), ())


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

"""What the engine runs on its devices: each program compiled once for each shape, and counted when it is.

load                             parameters in the layout and dtype of decoding
prefill                          prompts of a bucket, whole
begin, chunk, keep               the same piece by piece: what is known of them, one piece more, into the pool
insert, release                  responses into slots and out of them
generate, advance                one step of every slot, or several
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_sat import model
from jaxrl_sat.layout import Layout
from jaxrl_sat.model import ModelConfig, stored
from jaxrl_sat.sampler.record import GOING, LENGTH, STOP, RecordLayout
from jaxrl_sat.sampler.sampling import draw
from jaxrl_sat.sampler.state import (
    DecodeState,
    Pool,
    Prefix,
    SlotSampling,
    empty_state,
    pool_shardings,
    slot_shardings,
)
from jaxrl_sat.types import Numerics, Params

RECOMPUTED_TOKENS = 2048
"""Tokens that the slots' caches are read again by at once, at least one a slot."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What programs are compiled for. `length`: positions of a slot; `chunk`: tokens of a piece, 0 for none."""

    slots: int
    length: int
    chunk: int
    steps: int
    dtype: Any
    cache_dtype: Any
    recompute: bool


class Programs:
    """See the module. Decode states, pools, and prefixes that a piece is added to are consumed."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        numerics: Numerics,
        excess_precision: bool,
        records: RecordLayout,
        shapes: Shapes,
    ):
        self.config = config
        self.records = records
        self.shapes = shapes
        # Where a step takes as long as its weights take to read, and XLA reads one on the right twice.
        output_first = layout.device.platform == "cpu"
        self.execution = model.Execution(
            layout, numerics=numerics, excess_precision=excess_precision, output_first=output_first
        )
        self.compilations: collections.Counter[str] = collections.Counter()
        sizes = (shapes.slots, shapes.length, shapes.cache_dtype, layout, shapes.recompute)
        make_state = functools.partial(empty_state, config, *sizes)
        state = slot_shardings(jax.eval_shape(make_state), config, layout)
        whole = layout.sharding((), ())
        self.state_shapes = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), jax.eval_shape(make_state), state
        )
        loaded = layout.place(model.decode_param_specs(config, layout, numerics, output_first))
        pool = pool_shardings(config, layout, shapes.cache_dtype)
        jit = functools.partial(jax.jit, compiler_options=self.execution.compiler_options)
        self.init = jax.jit(make_state, out_shardings=state)
        self.init_pool = jax.jit(self._empty_pool, static_argnums=0, out_shardings=pool)
        self.load = jit(self._load, out_shardings=loaded)
        self.prefill = jit(self._prefill)
        self.begin = jit(self._begin)
        self.chunk = jit(self._chunk, donate_argnums=1)
        self.keep = jit(self._keep, donate_argnums=0, out_shardings=pool)
        self.insert = jit(self._insert, donate_argnums=0, out_shardings=state)
        self.release = jit(self._release, donate_argnums=0, out_shardings=state)
        self.generate = jit(self._generate, donate_argnums=2, out_shardings=(state, whole))
        self.advance = jit(self._advance, donate_argnums=2, out_shardings=(state, whole))

    def _load(self, params: Params) -> Any:
        self.compilations["load"] += 1
        execution = self.execution
        return model.decode_params(params, self.shapes.dtype, execution.numerics, execution.output_first)

    # -------------------------------------------------------------------------------------------- prefill

    def trace_reading(self, decode_params: Any, rows: int, bucket: int) -> Any:
        """Trace what reads most of such prompts, for parameters of these shapes: one piece, or prompts whole."""
        layout = self.execution.layout
        whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=layout.sharding((), ()))
        given = (whole((rows,)), whole((rows, bucket)), whole((rows,)))
        if not 0 < self.shapes.chunk < bucket:
            return self.prefill.trace(decode_params, *given)
        prefix = jax.eval_shape(functools.partial(self._begin, None, None), *given)
        placed = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            prefix,
            slot_shardings(prefix, self.config, layout),
        )
        return self.chunk.trace(decode_params, placed, whole(()))

    def _prefill(self, decode_params: Any, versions: Any, tokens: Any, lengths: Any) -> Prefix:
        self.compilations["prefill"] += 1
        constrain = self.execution.layout.constrain
        tokens, lengths = constrain(tokens, "rows", None), constrain(lengths, "rows")
        cache, expert_ids = model.prefill(
            decode_params, self.config, tokens, lengths, self.execution, self.shapes.cache_dtype
        )
        compact = self.records.compact(expert_ids)
        return self._placed(
            Prefix(cache=(cache.k, cache.v), tokens=tokens, lengths=lengths, expert_ids=compact, versions=versions)
        )

    def _placed(self, prefix: Prefix) -> Prefix:
        return jax.lax.with_sharding_constraint(prefix, slot_shardings(prefix, self.config, self.execution.layout))

    def _begin(self, pool: Pool | None, blocks: Any, versions: Any, tokens: Any, lengths: Any) -> Prefix:
        """Prompts of which the pieces `blocks` [B, n] of the pool are known."""
        self.compilations["begin"] += 1
        if pool is not None:
            cache = jax.tree.map(lambda kept: stored.from_blocks(kept, blocks), pool.cache, is_leaf=stored.is_stored)
            expert_ids = stored.from_blocks(pool.expert_ids[:, None], blocks)[:, 0]
        else:
            rows, bucket = tokens.shape
            empty = model.init_cache(self.config, rows, bucket, self.shapes.cache_dtype, self.execution)
            cache = (empty.k, empty.v)
            expert_ids = jnp.zeros((*tokens.shape, self.records.num_expert_ids), self.records.expert_dtype)
        return self._placed(
            Prefix(cache=cache, tokens=tokens, lengths=lengths, expert_ids=expert_ids, versions=versions)
        )

    def _chunk(self, decode_params: Any, prefix: Prefix, start: Any) -> Prefix:
        self.compilations["chunk"] += 1
        size = self.shapes.chunk
        tokens = jax.lax.dynamic_slice_in_dim(prefix.tokens, start, size, axis=1)
        positions = jnp.broadcast_to(start + jnp.arange(size), tokens.shape)
        cache, expert_ids = model.prefill_chunk(
            decode_params, self.config, model.Cache(*prefix.cache), tokens, positions, start, self.execution
        )
        compact = self.records.compact(expert_ids)
        routing = jax.lax.dynamic_update_slice_in_dim(prefix.expert_ids, compact, start, axis=1)
        return self._placed(dataclasses.replace(prefix, cache=(cache.k, cache.v), expert_ids=routing))

    def _empty_pool(self, size: int) -> Pool:
        chunk = self.shapes.chunk
        cache = model.init_cache(self.config, size, chunk, self.shapes.cache_dtype, self.execution)
        expert_ids = jnp.zeros((size, chunk, self.records.num_expert_ids), self.records.expert_dtype)
        return Pool(cache=(cache.k, cache.v), expert_ids=expert_ids)

    def pool_bytes(self) -> int:
        """Bytes of one piece in a pool."""
        leaves = jax.tree.leaves(jax.eval_shape(functools.partial(self._empty_pool, 1)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def _keep(self, pool: Pool, prefix: Prefix, blocks: Any) -> Pool:
        self.compilations["keep"] += 1

        def put(kept: Any, rows: Any) -> Any:
            return stored.to_blocks(kept, rows, blocks)

        cache = jax.tree.map(put, pool.cache, prefix.cache, is_leaf=stored.is_stored)
        routing = put(pool.expert_ids[:, None], prefix.expert_ids[:, None])[:, 0]
        return Pool(cache=cache, expert_ids=routing)

    # ------------------------------------------------------------------------------------- insert, release

    def _insert(
        self, state: DecodeState, prefix: Prefix, rows: Any, slots: Any, seeds: Any, sampling: SlotSampling
    ) -> DecodeState:
        self.compilations["insert"] += 1

        def put(old: jax.Array, new: Any) -> jax.Array:
            return old.at[slots].set(new, mode="drop")

        def put_cache(old: Any, new: Any) -> Any:
            return stored.insert(old, jax.tree.map(lambda array: array[rows], new), slots)

        last = prefix.lengths[rows] - 1
        history = state.history
        if self.shapes.recompute:
            history = history.at[slots, : prefix.tokens.shape[1]].set(prefix.tokens[rows], mode="drop")
        return DecodeState(
            cache=jax.tree.map(put_cache, state.cache, prefix.cache, is_leaf=stored.is_stored),
            tokens=put(state.tokens, prefix.tokens[rows, last]),
            positions=put(state.positions, last),
            seeds=put(state.seeds, seeds),
            sampling=jax.tree.map(put, state.sampling, sampling),
            lengths=put(state.lengths, 0),
            active=put(state.active, True),
            read_by=put(state.read_by, prefix.versions[rows]),
            history=history,
        )

    def _release(self, state: DecodeState, ended: Any) -> DecodeState:
        self.compilations["release"] += 1
        return dataclasses.replace(state, active=state.active & ~ended)

    # ------------------------------------------------------------------------------------------- generate

    def _generate(self, decode_params: Any, version: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        self.compilations["generate"] += 1
        return self._step(decode_params, version, self._read_again(decode_params, version, state))

    def _advance(self, decode_params: Any, version: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        self.compilations["advance"] += 1
        shape = (self.shapes.steps, self.shapes.slots, self.records.width)

        def some_go(carry: Any) -> jax.Array:
            done, state, _ = carry
            return (done < shape[0]) & jnp.any(state.active)

        def step(carry: Any) -> Any:
            done, state, records = carry
            state, data = self._step(decode_params, version, state)
            return done + 1, state, records.at[done].set(data)

        state = self._read_again(decode_params, version, state)
        # A loop that ends, not a scan with a branch in it: XLA would copy the cache from and to each branch.
        _, state, records = jax.lax.while_loop(some_go, step, (jnp.int32(0), state, jnp.zeros(shape, jnp.int32)))
        return state, records

    def _step(self, decode_params: Any, version: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        cache = model.Cache(*state.cache)
        fed = (cache, state.tokens, state.positions)
        logits, cache, expert_ids = model.decode(decode_params, self.config, *fed, self.execution)
        asked, sizes = state.sampling, (self.records.topk, self.records.nucleus)
        drawn = draw(logits, state.seeds, state.positions, asked.temperature, *sizes, asked.top_p, asked.top_k)
        lengths = state.lengths + state.active
        stopped = jnp.any(drawn.tokens[:, None] == asked.stop_ids, axis=-1)
        full = lengths >= asked.limit
        finish = jnp.where(state.active, jnp.where(stopped, STOP, jnp.where(full, LENGTH, GOING)), GOING)
        going = state.active & (finish == GOING)
        data = self.records.pack(drawn, state.active, lengths, finish, version, expert_ids)
        history = state.history
        if self.shapes.recompute:
            slots = jnp.arange(self.shapes.slots)
            history = history.at[slots, state.positions + 1].set(drawn.tokens, mode="drop")
        advanced = dataclasses.replace(
            state,
            cache=(cache.k, cache.v),
            tokens=jnp.where(going, drawn.tokens, state.tokens),
            positions=state.positions + going,
            lengths=lengths,
            active=going,
            history=history,
        )
        return advanced, data

    def _read_again(self, decode_params: Any, version: Any, state: DecodeState) -> DecodeState:
        """Where it is wanted: prompts and responses so far read anew in the slots that other weights have read."""
        if not self.shapes.recompute:
            return state
        length = self.shapes.length
        size = min(length, max(1, RECOMPUTED_TOKENS // self.shapes.slots))
        stale = state.active & (state.read_by != version)
        known = jnp.where(stale, state.positions, 0)  # what stands at `positions` is yet to be fed

        def chunk(carry: Any) -> Any:
            start, cache = carry
            at = start + jnp.arange(size)
            tokens = state.history[:, jnp.minimum(at, length - 1)]
            positions = jnp.where(at < known[:, None], at, length)
            cache, _ = model.prefill_chunk(decode_params, self.config, cache, tokens, positions, start, self.execution)
            return start + size, cache

        begun = (jnp.int32(0), model.Cache(*state.cache))
        _, cache = jax.lax.while_loop(lambda carry: carry[0] < jnp.max(known), chunk, begun)
        read_by = jnp.where(stale, version, state.read_by)
        return dataclasses.replace(state, cache=(cache.k, cache.v), read_by=read_by)

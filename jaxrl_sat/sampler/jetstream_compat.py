"""The one place that imports JetStream (PyPI `google-jetstream` 0.2.2), and what has to be mended for it to serve here.

* `engine_api` imports `seqio.vocabularies` for two class names, and seqio loads TensorFlow: ten seconds and a gigabyte.
  Two empty classes stand in while JetStream is imported, and are taken away again.
* `core.orchestrator` sets the root logger to DEBUG and hangs a handler on it: undone.
* `core.orchestrator.delete_pytree` calls `jax.tree_map`, which newer JAX has not: rebound.
* `token_utils.pad_tokens` fails on a list, which is what a request that brings ids and history gives it, and the Driver
  then kills its process: rebound to take one.
* The Driver's generate thread asserts that a slot is in use after it looked for one to fill; where the detokenizing
  thread frees the last one in between, it kills the process. No slot is in use then, so `make_driver` starts it anew.
* The Driver samples for a client that has left to the end: `make_driver` has it end with the next token.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_sat.types import InputError


@contextlib.contextmanager
def _seqio_stand_in() -> Iterator[None]:
    """Answer `import seqio.vocabularies` with two empty classes, unless somebody already loaded the real one."""
    if "seqio.vocabularies" in sys.modules:
        yield
        return
    package, module = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        setattr(module, name, type(name, (), {}))
    package.vocabularies = module  # type: ignore[attr-defined]
    placed = {"seqio": package, "seqio.vocabularies": module}
    before = {name: sys.modules.get(name) for name in placed}
    sys.modules.update(placed)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


with _seqio_stand_in():
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
Tokenizer = tokenizer_api.Tokenizer
TokenizerParameters: Any = vars(tokenizer_pb2)["TokenizerParameters"]  # protobuf makes it at run time

_pad_tokens = token_utils.pad_tokens
LONGEST_BUCKET = 32768
"""JetStream pads prompts to a power of two from 16 to this."""


def delete_pytree(tree: Any) -> None:
    """Free the device buffers of a tree's arrays. What `orchestrator.delete_pytree` does, on any JAX."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


def pad_tokens(tokens: Any, bos_id: int, pad_id: int, **kwargs: Any) -> tuple[Any, int]:
    """`token_utils.pad_tokens` for anything that NumPy takes for a vector of ids."""
    return _pad_tokens(np.asarray(tokens, np.int32), bos_id, pad_id, **kwargs)


def orchestrator() -> types.ModuleType:
    """JetStream's `core.orchestrator`, mended, and the root logger left as it was."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with _seqio_stand_in():
        from jetstream.core import orchestrator as module
    root.setLevel(level)
    root.handlers[:] = handlers
    module.delete_pytree = delete_pytree
    token_utils.pad_tokens = pad_tokens
    return module


def make_driver(engine: Any, params: Any) -> Any:
    """JetStream's Driver over one engine that reads prompts and decodes in turns, its threads started.

    `params` are captured once: weights that may be swapped come in a `WeightHolder`. The event loop that its requests
    come from has to stay open until the Driver has stopped.
    """
    module = orchestrator()

    class Driver(module.Driver):
        def __init__(self, **kwargs: Any):
            self._placed: list[Any] = []
            super().__init__(**kwargs)

        def place_request_on_prefill_queue(self, request: Any) -> None:
            self._placed.append(request)
            super().place_request_on_prefill_queue(request)

        def under_way(self) -> int:
            """Requests that have not ended, those included whose client has left, which end with their next token."""
            self._placed = [one for one in self._placed if one.complete is None or not one.complete.all()]
            for one in self._placed:
                if one.return_channel is not None and one.return_channel.cancelled():
                    one.max_tokens = 0
            return len(self._placed)

        def _generate_thread(self, idx: int) -> None:
            while self.live:
                with contextlib.suppress(AssertionError):
                    return super()._generate_thread(idx)

    return Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[params],
        generate_params=[params],
        interleaved_mode=True,
    )


class IdTokenizer(Tokenizer):
    """JetStream's view of the run's tokenizer: padded ids in, text out.

    `codec` has `encode(str) -> list[int]` and `decode(list[int]) -> str`; without one only requests that already carry
    ids can be served, and text raises InputError.
    """

    def __init__(self, bos_id: int, eos_id: int, pad_id: int, stop_ids: tuple[int, ...], codec: Any = None):
        self._ids = (bos_id, eos_id, pad_id)
        self._stop_ids = set(stop_ids)
        self._codec = codec

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Ids of `s`, padded to a JetStream bucket, and their true number. Keywords are those of `pad_tokens`."""
        if self._codec is None:
            raise InputError("text request: the engine was built without a tokenizer, send token ids")
        return pad_tokens(self._codec.encode(s), self.bos_id, self.pad_id, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Text of `token_ids`; without a codec the ids themselves, separated by spaces."""
        if self._codec is None:
            return " ".join(map(str, token_ids))
        return self._codec.decode(token_ids)

    @property
    def bos_id(self) -> int:
        """Id that opens a prompt."""
        return self._ids[0]

    @property
    def eos_id(self) -> int:
        """Id that ends a text."""
        return self._ids[1]

    @property
    def pad_id(self) -> int:
        """Id that fills a bucket."""
        return self._ids[2]

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end a response. Padding is not one: a policy may sample it, and it is recorded like any word."""
        return self._stop_ids

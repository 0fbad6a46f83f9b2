"""Importing the sampler costs neither TensorFlow nor a device, and leaves the process as it was."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.sampler import jetstream_compat
from jaxrl_sat.types import InputError

PROBE = """
import json, sys
import jaxrl_sat.sampler
import jaxrl_sat.sampler.jetstream_compat as compat
from jax._src import xla_bridge
devices = dict(xla_bridge._backends)
compat.orchestrator()
loaded = [name for name in sys.modules if name.split(".")[0] in ("tensorflow", "seqio")]
print(json.dumps({"backends": list(devices), "loaded": loaded}))
"""


def test_import_loads_no_tensorflow_and_touches_no_device():
    out = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout.splitlines()[-1]) == {"backends": [], "loaded": []}


def test_orchestrator_leaves_the_root_logger_alone():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    module = jetstream_compat.orchestrator()
    assert (root.level, root.handlers) == (level, handlers)
    assert module.delete_pytree is jetstream_compat.delete_pytree
    assert module.engine_api.Engine is jetstream_compat.Engine


def test_delete_pytree_frees_arrays_and_passes_over_the_rest():
    array = jnp.ones(3)
    tree = {"a": array, "b": [array, 3, None, np.zeros(2)]}
    jetstream_compat.delete_pytree(tree)
    assert array.is_deleted()


def test_a_driver_outlives_the_race_in_its_generate_thread(monkeypatch):
    """The assertion that JetStream's thread loses it by; with its own thread class it would kill this process."""
    module, begun, ended = jetstream_compat.orchestrator(), [], threading.Event()

    def generate(self: object, index: int) -> None:
        begun.append(index)
        assert len(begun) > 1, "some slots are in use"
        ended.set()

    monkeypatch.setattr(module.JetThread, "run", threading.Thread.run)
    for name in ("_prefill_thread", "_transfer_thread", "_detokenize_thread"):
        monkeypatch.setattr(module.Driver, name, lambda self, index: None)
    monkeypatch.setattr(module.Driver, "_generate_thread", generate)
    driver = jetstream_compat.make_driver(types.SimpleNamespace(max_concurrent_decodes=2), None)
    assert ended.wait(60)
    driver.stop()
    assert begun == [0, 0]


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(c) - 90 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + 90) for i in ids)


def test_tokenizer_pads_to_jetstreams_buckets():
    tokenizer = jetstream_compat.IdTokenizer(bos_id=1, eos_id=2, pad_id=0, stop_ids=(2, 5), codec=Letters())
    tokens, length = tokenizer.encode("abc", is_bos=True, max_prefill_length=32, jax_padding=False)
    np.testing.assert_array_equal(tokens, [1, 7, 8, 9] + [0] * 12)
    assert length == 4
    assert tokenizer.decode([7, 8]) == "ab"
    assert tokenizer.stop_tokens == {2, 5}


def test_text_without_a_tokenizer_is_refused():
    tokenizer = jetstream_compat.IdTokenizer(bos_id=1, eos_id=2, pad_id=0, stop_ids=(2,))
    assert tokenizer.decode([7, 8]) == "7 8"
    with pytest.raises(InputError, match="token ids"):
        tokenizer.encode("abc")

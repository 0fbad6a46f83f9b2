"""Set before JAX or the package is imported: eight CPU devices, checked shapes, a compilation cache that stays.

The cache lies in the checkout (`.cache/jax`); a second run of the tests spends no time in XLA for what did not change.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Most of the time of these tests is the compiler's. LLVM's level 0 takes a third, and the arrays are too small to miss
# the rest; XLA's older emitters take half, since the newer ones build a context of MLIR for every kernel.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)

import jax
import pytest
from jaxtyping import install_import_hook

# Imports and traces make objects by the million, hardly any of them in cycles.
gc.set_threshold(100_000, 50, 100)

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Imported before the hook: a pytree's leaves are also shardings, shape structs and placeholders, so the records of
# types.py cannot check their fields. The functions that take them do.
import jaxrl_sat.types  # noqa: E402, F401

install_import_hook("jaxrl_sat", "beartype.beartype")


LONGEST = (
    "test_train.py",
    "test_config_keys.py",
    "test_golden.py",
    "test_sharding.py",
    "test_step.py",
    "test_learner.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes a file at a time: the longest first, or at the end one waits for the other."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: the collector need not walk it again and again."""
    gc.freeze()

"""Plain checks of arguments at trace time. They hold in every run; the annotations are checked in tests alone."""

from __future__ import annotations

import jax.numpy as jnp

KINDS = {jnp.floating: "floating", jnp.integer: "integer", jnp.bool_: "bool"}


def expect(name: str, array, shape: tuple[int, ...], kind: type) -> None:
    """Raise ValueError, naming the argument, unless `array` has this shape and kind of dtype (a key of KINDS)."""
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} has dtype {array.dtype}; expected {KINDS[kind]}")

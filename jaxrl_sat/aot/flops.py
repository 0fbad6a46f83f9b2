"""Floating-point operations of a traced program, loops multiplied out, which the compiler's own analysis does not do.

Matrix products alone are counted: they are what a TPU's speed is quoted in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

CAUSAL = 0.5
"""Of the grid of an attention kernel, the part that a causal mask leaves to be computed."""


def operations(jaxpr: Any, devices: int, platform: str = "tpu") -> float:
    """Operations a device of a program for `devices` devices of `platform`; `jaxpr` is that of `jax.stages.Traced`.

    What a branch may skip counts as taken, by its dearest alternative; a loop of unknown length counts once. Outside of
    `shard_map` work is taken to be spread evenly.
    """
    return _total(jaxpr.jaxpr, platform) / devices


def _total(jaxpr: Any, platform: str) -> float:
    chosen: dict[Any, int] = {}  # which branch of a cond the platform takes, by the variable that says so
    total = 0.0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "platform_index":
            chosen[eqn.outvars[0]] = _branch(params["platforms"], platform)
        elif name in ("clamp", "convert_element_type") and chosen:
            chosen.update((eqn.outvars[0], chosen[var]) for var in eqn.invars if _is_known(var, chosen))
        elif name == "cond":
            costs = [_total(branch.jaxpr, platform) for branch in params["branches"]]
            index = eqn.invars[0]
            total += costs[chosen[index]] if _is_known(index, chosen) else max(costs)
        elif name in ("dot_general", "ragged_dot_general"):
            total += _product(eqn)
        else:
            total += _times(name, params) * sum(_total(inner, platform) for inner in _inner(params))
    return total


def _is_known(var: Any, chosen: dict[Any, int]) -> bool:
    return not hasattr(var, "val") and var in chosen  # a literal has a value, and no hash


def _branch(platforms: tuple[Any, ...], platform: str) -> int:
    """Of the alternatives, each a tuple of platforms or None for all others, the one for `platform`."""
    return next(index for index, names in enumerate(platforms) if names is None or platform in names)


def _times(name: str, params: dict[str, Any]) -> float:
    """How often what an operation holds is run."""
    if name == "scan":
        return float(params["length"])
    if name == "shard_map":
        return float(params["mesh"].size)
    if name == "pallas_call":
        return _steps(params["grid_mapping"]) * (CAUSAL if "splash" in str(params.get("name")) else 1.0)
    return 1.0


def _steps(mapping: Any) -> int:
    """Steps of a kernel's grid. A length known only at run time is taken as the most blocks along any operand's side:
    in a grouped product those of its rows.
    """
    known = [size for size in mapping.grid if isinstance(size, int)]
    if len(known) == len(mapping.grid):
        return math.prod(known)
    sides = [
        -(-size // getattr(block, "block_size", block))
        for operand in mapping.block_mappings
        for size, block in zip(operand.array_aval.shape, operand.block_shape, strict=True)
        if isinstance(block, int) or hasattr(block, "block_size")  # a side without is taken one by one: the groups
    ]
    return max(sides) * math.prod(known)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def _product(eqn: Any) -> float:
    left = eqn.invars[0].aval.shape
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    (contracted, _), _ = numbers.dot_dimension_numbers if numbers else eqn.params["dimension_numbers"]
    out = math.prod(eqn.outvars[0].aval.shape)
    if numbers and set(numbers.lhs_ragged_dimensions) & set(contracted):
        out //= eqn.invars[2].aval.shape[-1]  # each row goes into the product of its own group alone
    return 2.0 * out * math.prod(left[axis] for axis in contracted)

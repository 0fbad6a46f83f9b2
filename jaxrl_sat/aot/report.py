"""Compiles programs one by one and says of each what it takes of a device, or why it does not fit."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from jaxrl_sat import model
from jaxrl_sat.aot import flops, hints, memory, programs
from jaxrl_sat.aot.programs import Program
from jaxrl_sat.aot.topology import Topology
from jaxrl_sat.config import RunConfig

SHOWN = 12
"""Buffers of a program that does not fit that are written out."""


def document(
    config: RunConfig, model_config: model.ModelConfig, topology: Topology, made: list[Program]
) -> dict[str, Any]:
    """The JSON object of DESIGN 7, with each program's mesh and the parts of its state beside what is asked there."""
    return {
        "topology": topology.name,
        "slices": topology.slices,
        "devices": len(topology.devices),
        "device_kind": topology.devices[0].device_kind,
        "hbm_bytes": topology.hbm_bytes,
        "jax": jax.__version__,
        "model": Path(config.model.path).name,
        "programs": [compiled(program, config, model_config, topology) for program in made],
    }


def compiled(
    program: Program, config: RunConfig, model_config: model.ModelConfig, topology: Topology
) -> dict[str, Any]:
    """One line of `programs`, bytes and floating-point operations a device."""
    devices = len(topology.devices)
    facts: dict[str, Any] = {
        "name": program.name,
        "rows": program.rows,
        "microbatches": program.microbatches,
        "tokens_per_device": program.tokens // devices,
        "mesh": program.mesh,
        "state_bytes_expected": sum(program.state.values()),
        "state": program.state,
        "model_flops": program.model_flops / devices,
    }
    _say(f"{program.name}: tracing")
    began = time.perf_counter()
    trace = program.trace()
    facts["flops"] = flops.operations(trace.jaxpr, devices)
    lowered = trace.lower()
    traced = time.perf_counter()
    _say(f"{program.name}: traced in {traced - began:.0f} s, compiling for {devices} devices")
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not memory.exhausted(str(error)):
            raise
        facts |= {"compile_s": round(time.perf_counter() - traced, 1), "fits": False}
        _say(f"{program.name}: {str(error).splitlines()[0]}")
        return facts | _too_large(lowered, str(error), program, config, model_config)
    facts |= {"compile_s": round(time.perf_counter() - traced, 1), "fits": True}
    facts |= _measured(executable)
    _say(f"{program.name}: {facts['peak_bytes'] / hints.GIB:.2f} GiB of {topology.hbm_bytes / hints.GIB:.2f}")
    return facts


def _measured(executable: jax.stages.Compiled) -> dict[str, Any]:
    stats: Any = executable.memory_analysis()
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        # What the compiler holds against the limit: alive at once, and less than the sum of the above, as temporaries
        # are counted with the holes between them.
        "peak_bytes": stats.peak_memory_in_bytes + stats.generated_code_size_in_bytes,
    }


def _too_large(
    lowered: jax.stages.Lowered, message: str, program: Program, config: RunConfig, model_config: model.ModelConfig
) -> dict[str, Any]:
    """What the error says, and from a second compilation that writes them down, the largest buffers."""
    _say(f"{program.name}: compiling again for the largest buffers")
    with tempfile.TemporaryDirectory() as folder:
        try:
            lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if not memory.exhausted(str(error)):
                raise
        used = memory.usage(Path(folder)) or memory.Usage(0, 0, ())
    generates = program.name != programs.TRAIN
    rows = memory.table(used.largest, SHOWN)
    for row in rows:
        _say(f"  {row['bytes'] / hints.GIB:8.2f} GiB  {row['count']} x {row['shape']}  {row['of']}")
    hint = hints.hint(used.largest, config, model_config, generates)
    _say(f"{program.name}: {hint}")
    return {
        "argument_bytes": used.argument_bytes,
        "temp_bytes": used.temp_bytes,
        "peak_bytes": memory.required_bytes(message),
        "largest_buffers": rows,
        "hint": hint,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

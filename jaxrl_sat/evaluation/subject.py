"""The model under evaluation: what its path names, its weights, and the sampling engine it answers through."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_sat import mesh, model, parts, sources, workdir
from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.layout import Layout
from jaxrl_sat.paths import is_address, user_path
from jaxrl_sat.sampler import RolloutEngine, SamplerService, WeightHolder
from jaxrl_sat.sampler.fleet import load_checked
from jaxrl_sat.types import InputError, Params, SamplingParams

KEY = "--model"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model without its weights. `checkpoint`: the folder of that of a run which has them, None for `source`'s own.

    `files`: what tells two contents of one path apart, as far as that is to be had without reading them.
    """

    source: str
    config: model.ModelConfig
    tokenizer: Tokenizer
    checkpoint: Path | None
    files: str

    @classmethod
    def of(cls, path: str) -> Subject:
        """What `path` names: embedded, a model's folder or address, or a run's work folder. Raises `InputError`."""
        folder = None if path == "embedded" or is_address(path) else user_path(KEY, path)
        checkpoint = _newest(folder / "checkpoints") if folder and (folder / "checkpoints").is_dir() else None
        source = path if checkpoint is None else workdir.model_of(checkpoint.parents[1], KEY)[0]
        try:
            config = sources.read_model_config(source)
        except InputError as error:
            raise InputError(f"{KEY}: {error}") from error
        files = _files(folder) if checkpoint is None else f"checkpoint {checkpoint.name}"
        return cls(source, config, parts.tokenizer_of(source, config, KEY), checkpoint, files)

    def params(self, dtype: str, layout: Layout) -> Params:
        """The weights, placed as `layout` has a sampler's; those of a checkpoint in the dtype that the run trained in.

        Raises `InputError`.
        """
        shardings: Any = layout.place(model.param_specs(self.config, layout))
        if self.checkpoint is None:
            return model.load_hf(sources.model_address(self.source), dtype, shardings)[1]
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            model.abstract_params(self.config, workdir.model_of(self.checkpoint.parents[1], KEY)[1]),
            shardings,
        )
        with contextlib.closing(Checkpointer(self.checkpoint.parent, keep=None, read_only=True)) as checkpoints:
            try:
                return checkpoints.params(abstract, int(self.checkpoint.name))[1]
            except InputError as error:
                raise InputError(f"{KEY}: {str(error).removeprefix('--workdir: ')}") from error


def _newest(folder: Path) -> Path:
    """A run's newest checkpoint. The run may go on, and what is asked is that one."""
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    if not steps:
        raise InputError(f"{KEY}: {folder} has no checkpoint; allowed: the work folder of a run that has written one")
    return folder / str(max(steps))


def _files(folder: Path | None) -> str:
    """Sizes and times of the weights' files; nothing of what lies elsewhere."""
    if folder is None:
        return ""
    stats = [file.stat() for file in sorted(folder.glob("*.safetensors"))]
    return " ".join(f"{stat.st_size}@{int(stat.st_mtime)}" for stat in stats)


def make_service(
    subject: Subject,
    sampling: SamplingParams,
    dtype: str,
    slots: int,
    longest: int,
    sizes: Mapping[str, int],
) -> SamplerService:
    """A live queue before an engine of `slots` slots on a sampler's mesh of these sizes, with the model's weights.

    `longest`: tokens of the longest prompt. Raises `InputError` for a mesh that does not fit the model or the devices.
    """
    devices, count = jax.devices(), math.prod(sizes.values())
    if count > len(devices):
        raise InputError(f"--mesh: {count} devices, {len(devices)} found; allowed: {len(devices)} or fewer")
    try:
        mesh.check_cuts("sampler", sizes, mesh.SAMPLER_RULES, subject.config)
    except InputError as error:
        raise InputError(f"--mesh: {error}") from error
    layout = Layout.of(mesh.device_mesh("sampler", sizes, devices[:count]), mesh.SAMPLER_RULES)
    engine = RolloutEngine(
        config=subject.config,
        layout=layout,
        slots=slots,
        max_prompt_tokens=longest,
        max_response_tokens=sampling.max_response_tokens,
        sampling=sampling,
        topk=1,
        dtype=dtype,
        cache_dtype=dtype,
    )
    [weights] = load_checked([engine], subject.params(dtype, layout), 0).engines
    return SamplerService(
        [engine], [WeightHolder(weights)], waiting_limit=1 << 20, output_limit=1 << 20, codec=subject.tokenizer
    )

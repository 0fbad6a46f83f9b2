"""Where the logical axes of arrays lie on a mesh of devices, and the collectives that follow from it.

Two views of one table. Outside `shard_map` arrays are whole and `spec` says how they are cut. Inside (`Layout.manual`)
each device has its own piece, and `gather`, `total`, `largest`, `index` take the entry of a spec that says how a
dimension is cut; where it is not they do nothing, so one device runs the same lines as a pod. A gradient taken through
`manual` is that of the whole program: between its borders the cotangent of what lies on several devices alike is
spread over them as parts of a sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

Rules = Mapping[str, str | tuple[str, ...] | None]
"""Logical axis -> the mesh axes that cut it, outermost first."""

Cut = str | tuple[str, ...] | None
"""An entry of a `PartitionSpec`: the mesh axes that cut one dimension."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and its table. Without a mesh: one device, nothing is cut. Hashable, so a static argument.

    An abstract mesh, which has no devices, will do for specs.
    """

    mesh: Mesh | AbstractMesh | None = None
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, rules: Rules) -> Layout:
        """The layout that `rules` make on `mesh`; mesh axes that it has not, or of size 1, cut nothing."""

        def cuts(rule: str | tuple[str, ...] | None) -> tuple[str, ...]:
            names = (rule,) if isinstance(rule, str) else rule or ()
            return tuple(name for name in names if mesh.shape.get(name, 1) > 1)

        return cls(mesh, tuple((name, cuts(rule)) for name, rule in rules.items()))

    def axes(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that the table gives a logical axis."""
        return next((axes for name, axes in self.rules if name == logical), ())

    def ways(self, cut: Cut) -> int:
        """Into how many pieces a cut divides a dimension."""
        return math.prod(self._sizes[axis] for axis in _names(cut))

    @property
    def _sizes(self) -> Mapping[str, int]:
        return self.mesh.shape if self.mesh is not None else {}

    @property
    def device(self) -> Any:
        """One of the devices: all are of a kind."""
        return self.mesh.devices.flat[0] if isinstance(self.mesh, Mesh) else jax.devices()[0]

    # -------------------------------------------------------------------------------------- whole arrays

    def spec(self, logical: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """How an array of `shape` is cut. A mesh axis cuts the first dimension that asks for it and that it divides."""
        used: set[str] = set()
        cuts: list[Cut] = []
        for name, size in zip(logical, shape, strict=True):
            names: tuple[str, ...] = ()
            for axis in self.axes(name):
                if axis not in used and size % (self._sizes[axis] * math.prod(self._sizes[a] for a in names)) == 0:
                    names += (axis,)
            used.update(names)
            cuts.append(names[0] if len(names) == 1 else names or None)
        return PartitionSpec(*cuts)

    def sharding(self, logical: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Where an array of `shape` lies; the layout must have a mesh."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, self.spec(logical, shape))

    def specs(self, shapes: Any, logical: Any) -> Any:
        """`spec` of each array of a pytree; `logical` has a tuple of names where `shapes` has an array."""
        return jax.tree.map(lambda array, names: self.spec(names, array.shape), shapes, logical)

    def place(self, specs: Any) -> Any:
        """A sharding for each spec of a pytree."""
        mesh = self.mesh
        assert mesh is not None
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def constrain(self, x: Array, *logical: str | None) -> Array:
        """Lays an array down as the table says, inside a compiled program."""
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, self.sharding(logical, x.shape))

    def manual(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` of the pieces, run by every device, as a function of whole arrays."""
        if self.mesh is None or self.mesh.size == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    # -------------------------------------------------------------------- inside `manual`: this device's piece

    def gather(self, x: Array, cut: Cut, dimension: int) -> Array:
        """A dimension made whole from the pieces of a cut; its gradient is scattered back to them."""
        return x if cut is None else _gather(x, cut, dimension)

    def total(self, x: Any, *cuts: Cut) -> Any:
        """Summed over the devices that hold the other pieces."""
        axes = _names(*cuts)
        return jax.lax.psum(x, axes) if axes else x

    def largest(self, x: Any, *cuts: Cut) -> Any:
        """The largest over the devices that hold the other pieces. No gradient passes."""
        axes = _names(*cuts)
        return jax.lax.pmax(jax.lax.stop_gradient(x), axes) if axes else x

    def index(self, cut: Cut) -> Array:
        """The number of this device's piece, int32."""
        return jnp.int32(0) if cut is None else jax.lax.axis_index(cut).astype(jnp.int32)


def _all_gather(x: Array, cut: Cut, dimension: int) -> Array:
    return jax.lax.all_gather(x, cut, axis=dimension, tiled=True)


def _scatter(cut: Cut, dimension: int, _: None, cotangent: Array) -> tuple[Array]:
    # The parts are added in float32: hundreds of them in bfloat16 would lose the small ones.
    total = jax.lax.psum_scatter(cotangent.astype(jnp.float32), cut, scatter_dimension=dimension, tiled=True)
    return (total.astype(cotangent.dtype),)


_gather: Any = jax.custom_vjp(_all_gather, nondiff_argnums=(1, 2))
_gather.defvjp(lambda x, cut, dimension: (_all_gather(x, cut, dimension), None), _scatter)


def put(x: Any, sharding: NamedSharding) -> Array:
    """A host array on the devices of a sharding; where those are of several processes, each gives its own pieces."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _names(*cuts: Cut) -> tuple[str, ...]:
    return tuple(axis for cut in cuts for axis in ((cut,) if isinstance(cut, str) else cut or ()))

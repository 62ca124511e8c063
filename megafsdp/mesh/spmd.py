"""Find the data and model axes of a full mesh, on all axes of which parameters are DTensors.

Torch calls it an *SPMD mesh*: parameters, activations and losses are DTensors over all axes, and
``dp_mesh_dims`` of ``fully_shard`` names the data axes among them::

    mesh (dp 2, cp 2, tp 2), shard=("dp", "cp")        data mesh of 4 ranks, model axis tp
    a weight [Replicate(), Replicate(), Shard(0)]      Shard(0) on the model axis
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from megafsdp.errors import expected
from megafsdp.mesh.dtensor import joined_mesh
from megafsdp.mesh.torch_private import flatten_mesh

_WHERE = "dp_mesh_dims of fully_shard()"


class DataParallelDims(Protocol):
    """Names of data axes, such as torch's ``DataParallelMeshDims`` has them, from 2.12 on."""

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Return the axes that divide parameters; several count as one."""

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Return the axes that repeat shards, or everything if there is none to divide."""


@dataclass(frozen=True)
class SpmdMesh:
    """A mesh of data axes and at most one model axis.

    Attributes:
        mesh: All axes.
        data: The data axes: one, or those that repeat and those that divide, each as one axis.
        data_axes: Their indices in ``mesh``.
        model: The model axis; None without one.
        model_axis: Its index in ``mesh``.
        divides: Whether a data axis divides parameters.
    """

    mesh: DeviceMesh
    data: DeviceMesh
    data_axes: tuple[int, ...]
    model: DeviceMesh | None
    model_axis: int | None
    divides: bool

    def axis_name(self, axis: int) -> str:
        """Return the name of an axis of ``mesh``."""
        assert self.mesh.mesh_dim_names is not None, "checked by spmd_mesh_of()"
        return self.mesh.mesh_dim_names[axis]


class SpmdParameter(DTensor):
    """A gathered parameter on all axes.

    Code that computes on its local tensor has a share of the batch there, so its gradient is an
    addend on each data axis. :class:`DTensor` would call it replicated, as gradients are that it
    has summed itself.

    Attributes:
        model_axis: The index of the model axis; None without one.
    """

    model_axis: int | None

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the local tensor; aliases. Unless given, gradients are partial on data axes."""
        if grad_placements is None:
            grad_placements = [
                placement if axis == self.model_axis else Partial()
                for axis, placement in enumerate(self.placements)
            ]
        return super().to_local(grad_placements=grad_placements)


def as_spmd(parameter: DTensor, model_axis: int | None) -> SpmdParameter:
    """Change the class of a DTensor on all axes, of which one may be a model axis."""
    changed: Any = parameter
    changed.__class__ = _spmd_class(model_axis)
    return cast(SpmdParameter, changed)


@functools.cache
def _spmd_class(model_axis: int | None) -> type[SpmdParameter]:
    """Return the class for a model axis: ``torch.compile`` reads it off the class alone."""

    def unflatten(*description: Any) -> SpmdParameter:
        return as_spmd(DTensor.__tensor_unflatten__(*description), model_axis)

    own = {"model_axis": model_axis, "__tensor_unflatten__": staticmethod(unflatten)}
    return type(SpmdParameter.__name__, (SpmdParameter,), own)


def spmd_mesh_of(mesh: DeviceMesh | None, dims: DataParallelDims | None) -> SpmdMesh | None:
    """Return the axes that ``dp_mesh_dims`` names in a full mesh; None if it is None.

    Collective over the ranks of the mesh the first time that it names several axes as one.

    Raises:
        TypeError: ``dims`` does not name axes.
        ValueError: There is no mesh, its axes have no names, or not each of these; or an axis is
            named twice.
        NotImplementedError: Several axes of more than one rank are not data axes.
    """
    if dims is None:
        return None
    shard, replicate = _names(dims, "shard_names"), _names(dims, "replicate_names")
    named, names = (*replicate, *shard), () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or not named or not set(named) <= set(names) or len(set(named)) < len(named):
        raise ValueError(
            expected(
                "a mesh of all axes, and names of some of them, each once",
                f"{list(named)} of {'no mesh' if mesh is None else f'axes {list(names)}'}",
                where=_WHERE,
                hint="Give mesh= the mesh on which parameters are DTensors, made with "
                "mesh_dim_names=",
            )
        )
    others = [axis for axis, name in enumerate(names) if name not in named]
    # A DTensor over an axis of one rank has the whole tensor, whatever the placement.
    large = [axis for axis in others if mesh.size(axis) > 1]
    if len(large) > 1:
        raise NotImplementedError(
            expected(
                "one model axis beside the data axes",
                f"{[names[axis] for axis in large]}",
                where=_WHERE,
                hint="Name the axes over which parameters are not cut, such as that of context "
                "parallelism, among the data axes",
            )
        )
    data = [_as_one(mesh, each) for each in (replicate, shard) if each]
    model_axis = next(iter(large or others), None)
    return SpmdMesh(
        mesh,
        data[0] if len(data) == 1 else joined_mesh(*data),
        tuple(axis for axis, name in enumerate(names) if name in named),
        None if model_axis is None else mesh[names[model_axis]],
        model_axis,
        bool(shard),
    )


def _names(dims: object, attribute: str) -> tuple[str, ...]:
    names = getattr(dims, attribute, None)
    if not isinstance(names, tuple):
        raise TypeError(
            expected(
                "a DataParallelMeshDims of torch",
                repr(dims),
                where=_WHERE,
                hint="Give torch.distributed.fsdp.DataParallelMeshDims(shard='dp')",
            )
        )
    return names


def _as_one(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names])

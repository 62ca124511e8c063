"""What ``shard_placement_fn`` chooses for each parameter: a dimension, and a mesh of its own.

As in torch, the function returns None, a ``Shard``, or a ``ShardPlacementResult``, whose
``mesh_info`` names another data-parallel mesh. Experts need that: their ranks are fewer, as each
rank has some experts of every layer::

    mesh (dp 4)                    router, norms, attention       rows cut over 4 ranks
    mesh_info.mesh (efsdp 2)       stacks of experts, cut by ep   rows cut over the 2 ranks that
                                                                  have the same experts

What the function returns is read here or refused, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.errors import expected
from megafsdp.fsdp.grouping import FoundParameter
from megafsdp.fsdp.keywords import PlacementFunction
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.spmd import SpmdMesh, spmd_mesh_of


@dataclass(frozen=True)
class UnitMeshes:
    """The meshes given for one unit.

    Attributes:
        mesh: The data-parallel mesh, or a full one; None for one of all ranks.
        experts: The data-parallel mesh of experts' parameters; None for that of all others.
        spmd: The axes of ``mesh`` if parameters are DTensors on all of them.
        experts_spmd: The same of the mesh of experts' parameters.
    """

    mesh: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    spmd: SpmdMesh | None = None
    experts_spmd: SpmdMesh | None = None

    @property
    def data(self) -> DeviceMesh | None:
        """Return the data-parallel mesh of parameters that are no experts'."""
        return self.mesh if self.spmd is None else self.spmd.data

    def is_default(self, data: DeviceMesh, spmd: SpmdMesh | None) -> bool:
        """Return whether a mesh is that of the unit's other parameters."""
        if self.mesh is None:
            # The mesh of all ranks is made later, if no mesh is given.
            return spmd is None and data.ndim == 1 and data.size() == dist.get_world_size()
        return (data, spmd) == (self.data, self.spmd)


def choose_meshes(
    found: Sequence[FoundParameter],
    placement_fn: PlacementFunction | None,
    meshes: UnitMeshes,
    *,
    is_even: bool = False,
) -> UnitMeshes:
    """Say which parameters are divided over the mesh of experts, and return the unit's meshes.

    Local, except that it may make the group of a mesh over several axes on first use.

    Args:
        found: The unit's parameters, in which the results are written.
        placement_fn: The user's function; None divides what is annotated as experts' over
            ``meshes.experts``.
        meshes: The meshes that the user gave.
        is_even: Whether each parameter is cut into chunks of dim 0.

    Raises:
        NotImplementedError: A placement cuts rows apart, or parameters name several other meshes.
    """
    # Of the keyword: a mesh that the function names is for the parameters that it names it for.
    is_given = meshes.experts is not None
    for item in found:
        item.is_expert = is_given and annotation_of(item.parameter).is_expert
        placement: Any = None if placement_fn is None else placement_fn(item.parameter)
        info = getattr(placement, "mesh_info", None)
        _check_dim(item, placement if info is None else placement.placement, is_even=is_even)
        if info is None:
            continue
        # torch keeps the full mesh beside the data axes that it has found in it.
        spmd = spmd_mesh_of(getattr(info, "spmd_mesh", None), info.dp_mesh_dims)
        data = info.mesh if spmd is None else spmd.data
        item.is_expert = not meshes.is_default(data, spmd)
        if not item.is_expert:
            continue
        if meshes.experts is None:
            meshes = replace(meshes, experts=data, experts_spmd=spmd)
        elif meshes.experts != data:
            raise NotImplementedError(
                expected(
                    f"one mesh beside that of the unit, {meshes.experts}",
                    f"{data} too",
                    where=f"shard_placement_fn for '{item.record.name}'",
                    hint="Give parameters of a third mesh to a fully_shard() of their own",
                )
            )
    return meshes


def _check_dim(item: FoundParameter, placement: object, *, is_even: bool) -> None:
    """Check that a placement cuts between rows, which flat buffers do without padding.

    Placements of any class with a ``dim`` count: torch has several, and users their own.
    """
    ndim = item.parameter.ndim
    dim = getattr(placement, "dim", None)
    # Rows of a stack (E, N, K) are those of its matrices: they are cut on both first dimensions.
    dims = range(2 if ndim == 3 and not is_even else 1)
    if placement is None or (dim is not None and (dim if dim >= 0 else dim + ndim) in dims):
        return
    # Local rows of another dimension would not be one range of a flat buffer.
    raise NotImplementedError(
        expected(
            " or ".join(f"Shard({each})" for each in dims),
            placement,
            where=f"shard_placement_fn for '{item.record.name}'",
            hint="Return None: rows of flat buffers are cut on dimension 0, and rows of stacks "
            "anywhere",
        )
    )

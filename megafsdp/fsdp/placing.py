"""Find the mesh that divides each parameter of a unit, and this rank's part of it on a model axis.

Parameters come plain, as DTensors over a model axis, or as DTensors on a mesh of all axes
(``dp_mesh_dims``). What their layers and placements say is read in
:mod:`megafsdp.fsdp.params.model_parts`; this file brings a unit's parameters and meshes together,
and refuses what does not fit before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megafsdp.errors import expected
from megafsdp.fsdp.division import UnitMeshes
from megafsdp.fsdp.grouping import FoundParameter
from megafsdp.fsdp.params.model_parts import (
    check_expert,
    check_expert_ranks,
    check_same_ranks,
    plain_placement,
    read_placement,
    read_spmd_placement,
    tensor_parallel_mesh,
)
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.dtensor import cut_dim, joined_mesh
from megafsdp.mesh.parallel_dims import TP
from megafsdp.mesh.spmd import SpmdMesh
from megafsdp.mesh.spmd_types import check_untyped


def check_meshes(*meshes: object) -> None:
    """Check that what is given as a mesh is one.

    Raises:
        TypeError: It is something else.
    """
    for mesh in meshes:
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(
                expected(
                    "a DeviceMesh",
                    f"a {type(mesh).__name__}",
                    where="the mesh of fully_shard()",
                    hint="Leave it out for all ranks; DeviceMesh.from_group() makes one of a group",
                )
            )


def place_parameters(
    found: Sequence[FoundParameter], modules: Sequence[nn.Module], meshes: UnitMeshes
) -> None:
    """Find the mesh that divides each parameter, and this rank's model part of it; local.

    Plain parameters count as repeated over the model axis of the DTensors of this unit or of those
    below it, or else over the tensor-parallel axis of the mesh from which the unit's mesh was
    sliced. Experts' parameters do not: each rank may have other experts.

    Args:
        found: The parameters, in which the results are written.
        modules: The unit's modules.
        meshes: The unit's meshes.

    Raises:
        ValueError: A DTensor is on a mesh that does not fit, a plain parameter should be a DTensor,
            or experts are divided over ranks that have other experts, or that are not the model's,
            or a parameter has types for a full mesh.
        NotImplementedError: A DTensor is cut in a way that is not built.
    """
    if meshes.spmd is not None:
        _place_on_all_axes(found, meshes, meshes.spmd)
        return
    for item in found:
        check_untyped(item.record.name, item.parameter)
    mesh = meshes.mesh
    experts = _find_experts(found, meshes)
    model_mesh = _place_dtensors(found, mesh, experts)
    model_mesh = model_mesh or _model_mesh_of_units(modules) or tensor_parallel_mesh(mesh)
    # Copies of a plain parameter on a model axis are one tensor in a checkpoint and count once in a
    # norm, so its DTensor must say that they are copies.
    for item in found:
        name, parameter = item.record.name, item.parameter
        experts_here = annotation_of(parameter).experts
        has_own_experts = experts_here is not None and experts_here.count < experts_here.total
        if item.is_expert and not has_own_experts:
            if meshes.experts is not None:
                check_expert_ranks(name, parameter, (mesh, meshes.experts), model_mesh)
        elif not isinstance(parameter, DTensor) and not has_own_experts:
            item.record.model = plain_placement(name, parameter, model_mesh)


def _find_experts(found: Sequence[FoundParameter], meshes: UnitMeshes) -> DeviceMesh | None:
    """Check which parameters are experts'; return the mesh that divides them, if it is another."""
    for item in found:
        check_expert(item.record.name, item.parameter, meshes.mesh, meshes.experts)
    is_unit_of_experts = meshes.experts is None and _is_unit_of_experts(found)
    for item in found:
        # Without a mesh of their own, experts are parameters like all others. In a unit of experts
        # alone, the unit's mesh is theirs, and that of the unit around it is another.
        item.is_expert = is_unit_of_experts or (item.is_expert and meshes.experts != meshes.mesh)
    return meshes.mesh if is_unit_of_experts else meshes.experts


def _place_dtensors(
    found: Sequence[FoundParameter], mesh: DeviceMesh | None, experts: DeviceMesh | None
) -> DeviceMesh | None:
    """Place the parameters that are DTensors; return the model axis of those that are no experts'.

    Local.
    """
    model_mesh: DeviceMesh | None = None
    axes: dict[tuple[DeviceMesh, DeviceMesh], None] = {}
    for item in found:
        if isinstance(item.parameter, DTensor):
            data_mesh = _place_dtensor(item, experts if item.is_expert else mesh)
            axis = item.parameter.device_mesh
            axes[data_mesh, axis] = None
            model_mesh = model_mesh or (None if item.is_expert else axis)
    for data_mesh, axis in axes:
        # Raises if the ranks of the two meshes do not form a grid.
        joined_mesh(data_mesh, axis)
    return model_mesh


def _place_on_all_axes(found: Sequence[FoundParameter], meshes: UnitMeshes, spmd: SpmdMesh) -> None:
    of_experts = meshes.experts_spmd
    if meshes.experts is not None and of_experts is None:
        raise NotImplementedError(
            expected(
                "a full mesh for experts too, and names of its data axes",
                f"{meshes.experts}",
                where="fully_shard() with dp_mesh_dims",
                hint="Leave out expert_mesh, and return torch's ShardPlacementResult of such a "
                "mesh from shard_placement_fn; or leave out dp_mesh_dims",
            )
        )
    if of_experts is not None:
        check_same_ranks(spmd.mesh, of_experts.mesh)
    for item in found:
        own = of_experts if item.is_expert and of_experts is not None else spmd
        record, parameter = item.record, item.parameter
        owners = [owner for owner, _ in record.living_owners()]
        record.model = read_spmd_placement(record.name, parameter, owners, own)
        # A typed parameter is one of the parts.
        record.shape = torch.Size(record.model.part.shape)


def _is_unit_of_experts(found: Sequence[FoundParameter]) -> bool:
    """Return whether a unit is a layer's experts alone, as their DTensors show.

    All are on one axis that is not that of tensor parallelism, and it gives each rank some matrices
    of a stack.
    """
    parameters = [item.parameter for item in found]
    axes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    axis = next(iter(axes), None)
    # tp may cut stacks too, such as weights of attention by heads: its name says that it does.
    if len(axes) != 1 or axis is None or axis.mesh_dim_names == (TP,):
        return False
    stacks = [p for p in parameters if isinstance(p, DTensor) and p.ndim == 3]
    return any(cut_dim(placement) == 0 for stack in stacks for placement in stack.placements)


def _model_mesh_of_units(modules: Sequence[nn.Module]) -> DeviceMesh | None:
    """Return the model axis of the units below; None if they have none."""
    groups = (group for unit in units_below(modules).values() for group in unit.groups)
    axes = [group.axes for group in groups if not group.axes.is_expert]
    return next((a.model_mesh for a in axes if a.model_mesh is not None), None)


def _place_dtensor(item: FoundParameter, mesh: DeviceMesh | None) -> DeviceMesh:
    """Find this rank's model part of a DTensor; return the mesh that divides it."""
    name, parameter = item.record.name, item.parameter
    assert isinstance(parameter, DTensor), "asked of DTensors"
    if mesh is None:
        raise ValueError(
            expected(
                "the mesh of data-parallel ranks, which DTensor parameters do not say",
                f"no mesh, and '{name}' on {parameter.device_mesh}",
                where="fully_shard()",
                hint="Give mesh=, the part of one mesh beside the model axis",
            )
        )
    owners = [owner for owner, _ in item.record.living_owners()]
    item.record.model = read_placement(name, parameter, owners, mesh)
    return mesh

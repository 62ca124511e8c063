"""Find the mesh that divides each parameter of a unit, and this rank's part of it on a model axis.

Parameters come plain, as DTensors over a model axis, or as DTensors on a mesh of all axes
(``dp_mesh_dims``). What their layers and placements say is read in
:mod:`megafsdp.fsdp.params.model_parts`; this file brings a unit's parameters and meshes together,
and refuses what does not fit before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megafsdp.errors import expected
from megafsdp.fsdp.grouping import FoundParameter
from megafsdp.fsdp.params.model_parts import (
    check_expert,
    check_expert_ranks,
    plain_placement,
    read_placement,
    read_spmd_placement,
    tensor_parallel_mesh,
)
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.dtensor import joined_mesh
from megafsdp.mesh.spmd import SpmdMesh


def _check_meshes(*meshes: object) -> None:
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
    found: Sequence[FoundParameter],
    modules: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    spmd: SpmdMesh | None = None,
) -> None:
    """Find the mesh that divides each parameter, and this rank's model part of it; local.

    Plain parameters count as repeated over the model axis of the DTensors of this unit or of those
    below it, or else over the tensor-parallel axis of the mesh from which ``mesh`` was sliced.
    Experts' parameters do not: each rank may have other experts.

    Args:
        found: The parameters, in which the results are written.
        modules: The unit's modules.
        mesh: The data-parallel mesh; None for one of all ranks, which has no model axis.
        expert_mesh: The data-parallel mesh of experts; None for ``mesh``.
        spmd: The mesh of all axes on which parameters are DTensors; None if they are not.

    Raises:
        TypeError: A mesh is not a ``DeviceMesh``.
        ValueError: A DTensor is on a mesh that does not fit, a plain parameter should be a DTensor,
            or experts are divided over ranks that have other experts, or that are not the model's.
        NotImplementedError: A DTensor is cut in a way that is not built.
    """
    _check_meshes(mesh, expert_mesh)
    if spmd is not None:
        _place_on_all_axes(found, expert_mesh, spmd)
        return
    for item in found:
        check_expert(item.record.name, item.parameter, mesh, expert_mesh)
    if expert_mesh == mesh:
        expert_mesh = None
    model_mesh: DeviceMesh | None = None
    axes: dict[tuple[DeviceMesh, DeviceMesh], None] = {}
    for item in found:
        # Without a mesh of their own, experts are parameters like all others.
        item.is_expert = expert_mesh is not None and annotation_of(item.parameter).is_expert
        if isinstance(item.parameter, DTensor):
            data_mesh = _place_dtensor(item, expert_mesh if item.is_expert else mesh)
            axis = item.parameter.device_mesh
            axes[data_mesh, axis] = None
            model_mesh = model_mesh or (None if item.is_expert else axis)
    for data_mesh, axis in axes:
        # Raises if the ranks of the two meshes do not form a grid.
        joined_mesh(data_mesh, axis)
    model_mesh = model_mesh or _model_mesh_of_units(modules) or tensor_parallel_mesh(mesh)
    # Copies of a plain parameter on a model axis are one tensor in a checkpoint and count once in a
    # norm, so its DTensor must say that they are copies.
    for item in found:
        name, parameter = item.record.name, item.parameter
        has_own_experts = annotation_of(parameter).experts is not None
        if item.is_expert and not has_own_experts:
            assert expert_mesh is not None, "experts without a mesh of their own are like others"
            check_expert_ranks(name, parameter, (mesh, expert_mesh), model_mesh)
        elif not isinstance(parameter, DTensor) and not has_own_experts:
            item.record.model = plain_placement(name, parameter, model_mesh)


def _place_on_all_axes(
    found: Sequence[FoundParameter], expert_mesh: DeviceMesh | None, spmd: SpmdMesh
) -> None:
    if expert_mesh is not None:
        raise NotImplementedError(
            expected(
                "one mesh for all parameters",
                "an expert_mesh too",
                where="fully_shard() with dp_mesh_dims",
                hint="Leave out dp_mesh_dims: give mesh= the data axes, and parameters that are "
                "DTensors over the model axis alone",
            )
        )
    for record, parameter in ((item.record, item.parameter) for item in found):
        owners = [owner for owner, _ in record.living_owners()]
        record.model = read_spmd_placement(record.name, parameter, owners, spmd)


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

"""Read from incoming DTensors which part of each parameter a rank of a model axis has.

Tensor parallelism (or expert parallelism, of stacks) has cut a model before it is sharded: its
parameters are DTensors over a mesh of one axis, the *model axis*. Data parallelism then cuts only
the part that a rank has::

    weight (8, 4), cut on dim 0 by tp 2, then by dp 2      tp 0        tp 1
    part of a tp rank                                      rows 0-3    rows 4-7
    main weight of dp 0                                    rows 0-1    rows 4-5
    main weight of dp 1                                    rows 2-3    rows 6-7

A :class:`ModelPlacement` says what the part is, in which form forward and backward see it, and
whether the gradients of the axis's ranks are addends of one sum. Placements that cannot be right
are refused when they are read, before anything is changed. The sums over the axis are made in
:mod:`megafsdp.fsdp.params.model_gradients`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megafsdp.errors import expected
from megafsdp.mesh.annotation import annotation_of, copy_annotation
from megafsdp.mesh.dtensor import cut_dim
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.mesh.model_part import ModelPart, part_of, whole_part
from megafsdp.mesh.parallel_dims import TP
from megafsdp.mesh.spmd import SpmdMesh, as_spmd
from megafsdp.mesh.spmd_types import complete_types, is_typed, typed_part
from megafsdp.mesh.torch_private import StridedShard, local_of, root_of, wrap_part

# A class attribute of layers whose forward takes the plain part of a parameter.
COMPUTES_ON_PART = "computes_on_part"


@dataclass(frozen=True)
class DTensorForm:
    """The DTensor as which forward and backward see a gathered parameter.

    Attributes:
        mesh: The model axis, or a mesh that also has the data axes.
        placements: How each axis of ``mesh`` cuts the parameter; data axes do not.
        model_axis: The index of the model axis in ``mesh``; None without one.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    model_axis: int | None = 0


@dataclass(frozen=True)
class ModelPlacement:
    """How a model axis places one parameter, and what this rank does with it.

    Attributes:
        part: This rank's part of the parameter.
        mesh: The model axis; None without one.
        form: The DTensor that forward and backward see, which the layers of torch's
            ``parallelize_module`` need; None for the plain part.
        is_summed: Whether the gradients of the axis's ranks are addends of one sum.
    """

    part: ModelPart
    mesh: DeviceMesh | None = None
    form: DTensorForm | None = None
    is_summed: bool = False

    def unsharded(self, full: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return the gathered part as the parameter that forward and backward see; aliases it."""
        if self.form is None:
            return nn.Parameter(full, requires_grad=requires_grad)
        wrapped = wrap_part(full, self.form.mesh, self.form.placements, self.part.shape)
        parameter: Any = nn.Parameter(wrapped, requires_grad=requires_grad)
        if self.form.mesh != self.mesh:
            as_spmd(parameter, self.form.model_axis)
        return cast(nn.Parameter, parameter)


def tensor_parallel_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the tensor-parallel axis of the mesh from which this one was sliced, or None."""
    root = None if mesh is None else root_of(mesh)
    if mesh is None or root is None or TP not in (root.mesh_dim_names or ()):
        return None
    # A mesh with this axis, or flattened over it, divides among its ranks, and repeats nothing.
    is_inside = TP in (mesh.mesh_dim_names or ()) or len(_common_ranks(mesh, root[TP])) > 1
    return None if is_inside else root[TP]


def _common_ranks(mesh: DeviceMesh, other: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist()) & set(other.mesh.flatten().tolist())


def plain_placement(
    name: str, parameter: torch.Tensor, model_mesh: DeviceMesh | None = None
) -> ModelPlacement:
    """Return the placement of a plain parameter, which is whole on all ranks of the model axis.

    Args:
        name: Its FQN, for messages.
        parameter: The parameter.
        model_mesh: The model axis of the parameters around it.

    Raises:
        ValueError: Its layer declares that tensor parallelism cuts it.
    """
    annotation, shape = annotation_of(parameter), tuple(parameter.shape)
    if model_mesh is None:
        return ModelPlacement(whole_part(shape))
    if annotation.tp_dim is not None and model_mesh.size() > 1:
        raise ValueError(
            expected(
                f"a DTensor cut over the {model_mesh.size()} ranks of axis "
                f"'{(model_mesh.mesh_dim_names or ('',))[0]}', as its layer declares",
                f"a plain tensor of shape {shape}",
                where=f"'{name}', whose dim {annotation.tp_dim} tensor parallelism cuts",
                hint="Call set_device_mesh(tp_mesh=...) on its layer before fully_shard()",
            )
        )
    part = part_of(shape, None, model_mesh.size(), model_mesh.get_local_rank())
    return ModelPlacement(part, model_mesh, is_summed=annotation.sums_over_tp)


def read_placement(
    name: str, parameter: DTensor, owners: Iterable[nn.Module], data_mesh: DeviceMesh
) -> ModelPlacement:
    """Return the placement of a DTensor parameter.

    Args:
        name: Its FQN, for messages.
        parameter: The parameter.
        owners: The modules that own it.
        data_mesh: The mesh of :func:`fully_shard` that divides it.

    Raises:
        ValueError: It is a partial sum, or its mesh shares more ranks than this one with the data
            mesh, lacks this rank, or is on another device.
        NotImplementedError: It is cut by a mesh of several axes, or was sharded before.
    """
    mesh = parameter.device_mesh
    _check_mesh(name, parameter, data_mesh)
    _check_placement(name, parameter)
    part, annotation = model_part_of(parameter), annotation_of(parameter)
    _check_local(name, parameter, part)
    is_dtensor = not all(getattr(owner, COMPUTES_ON_PART, False) for owner in owners)
    return ModelPlacement(
        part,
        mesh,
        DTensorForm(mesh, parameter.placements) if is_dtensor else None,
        # With torch's layers each backward decides anew whether the gradient of a replicated
        # parameter is a sum. Ranks cannot agree on that without an exchange, so always sum.
        is_summed=part.dim is None and (is_dtensor or annotation.sums_over_tp),
    )


def read_spmd_placement(
    name: str, parameter: torch.Tensor, owners: Iterable[nn.Module], spmd: SpmdMesh
) -> ModelPlacement:
    """Return the placement of a parameter that is a DTensor on all axes, or is typed for them.

    Args:
        name: Its FQN, for messages.
        parameter: The parameter.
        owners: The modules that own it.
        spmd: The axes.

    Raises:
        ValueError: It is no DTensor on this mesh, or data axes cut it; or :func:`read_placement`
            raises it.
        NotImplementedError: :func:`read_placement` raises it.
    """
    if not isinstance(parameter, DTensor) and is_typed(parameter):
        part, is_addend = typed_part(name, parameter, spmd)
        complete_types(parameter, spmd)
        return ModelPlacement(part, spmd.model, is_summed=is_addend)
    if not isinstance(parameter, DTensor) or parameter.device_mesh != spmd.mesh:
        raise ValueError(
            expected(
                f"a DTensor on the mesh of fully_shard(), {spmd.mesh}",
                f"one on {parameter.device_mesh}"
                if isinstance(parameter, DTensor)
                else "a plain tensor",
                where=f"'{name}', with dp_mesh_dims",
                hint="Call distribute_module() or distribute_tensor() with that mesh first, or "
                "leave out dp_mesh_dims and give mesh= the data axes",
            )
        )
    placements, shape = parameter.placements, tuple(parameter.shape)
    cut = [axis for axis in spmd.data_axes if not placements[axis].is_replicate()]
    if cut:
        raise ValueError(
            expected(
                "Replicate() on all data axes",
                f"{placements[cut[0]]} on '{spmd.axis_name(cut[0])}'",
                where=f"'{name}', a DTensor parameter of shape {shape}",
                hint="Redistribute it before fully_shard(), which divides it over these axes",
            )
        )
    form = DTensorForm(spmd.mesh, placements, spmd.model_axis)
    if spmd.model is None or spmd.model_axis is None:
        return ModelPlacement(whole_part(shape), form=form)
    over_axis = wrap_part(local_of(parameter), spmd.model, (placements[spmd.model_axis],), shape)
    copy_annotation(parameter, over_axis)
    found = read_placement(name, over_axis, owners, spmd.data)
    return replace(found, form=form)


def model_part_of(parameter: DTensor) -> ModelPart:
    """Return this rank's part of a DTensor parameter on a mesh of one axis, the model axis."""
    mesh, annotation = parameter.device_mesh, annotation_of(parameter)
    placement = parameter.placements[0]
    dim = cut_dim(placement)
    # torch cuts DTensors as torch.chunk does; a layer that declares a fused cut made it itself.
    fused = annotation.fused if dim is not None and annotation.tp_dim == dim else None
    if fused is None and dim is not None and isinstance(placement, StridedShard):
        num_parts = int(placement.split_factor)
        sizes = (parameter.shape[dim] // num_parts,) * num_parts
        fused = FusedParts(tuple(map(str, range(num_parts))), sizes, dim)
    return part_of(tuple(parameter.shape), dim, mesh.size(), mesh.get_local_rank(), fused)


def check_expert(
    name: str, parameter: torch.Tensor, mesh: DeviceMesh | None, expert_mesh: DeviceMesh | None
) -> None:
    """Check that the ranks which divide an expert's parameter can have the same experts.

    Args:
        name: Its FQN, for messages.
        parameter: The parameter, of any kind.
        mesh: The mesh of :func:`fully_shard`; None for all ranks.
        expert_mesh: The mesh of experts; None for ``mesh``.

    Raises:
        ValueError: Experts are shared out, and some ranks of the mesh have other experts.
    """
    annotation = annotation_of(parameter)
    if not annotation.is_expert or not dist.is_initialized():
        return
    is_cut = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
    if expert_mesh is None and is_cut and annotation.tp_dim is None:
        raise ValueError(
            expected(
                "an expert_mesh, of the ranks that have the same experts",
                "none",
                where=f"'{name}', a DTensor of experts, in fully_shard()",
                hint="Give fully_shard() expert_mesh=, which ParallelDims.build() makes as "
                "Meshes.experts",
            )
        )
    experts = annotation.experts
    if experts is None:
        return
    num_ranks = dist.get_world_size()
    own_mesh = mesh if expert_mesh is None else expert_mesh
    size = num_ranks if own_mesh is None else own_mesh.size()
    # Each set of ranks that together have all experts has this rank's experts once.
    if size * experts.total > num_ranks * experts.count:
        raise ValueError(
            expected(
                f"at most {num_ranks * experts.count // experts.total} ranks with the same "
                f"{experts.count} of {experts.total} experts",
                f"{size} ranks",
                where=f"'{name}' in fully_shard()",
                hint="Give expert_mesh=, the mesh of the ranks that have the same experts",
            )
        )


def check_expert_ranks(
    name: str,
    parameter: torch.Tensor,
    meshes: tuple[DeviceMesh | None, DeviceMesh],
    model_mesh: DeviceMesh | None,
) -> None:
    """Check that experts are on the ranks of one copy of the model, or of all its replicas.

    Args:
        name: FQN of the experts' parameter, for messages.
        parameter: The parameter.
        meshes: The mesh, or None for all ranks, and the expert_mesh of :func:`fully_shard`.
        model_mesh: The model axis of the other parameters; None if it is not known.

    Raises:
        ValueError: They are on other ranks.
    """
    mesh, expert_mesh = meshes
    ep_mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    found = _ranks_of(expert_mesh, ep_mesh)
    root = None if mesh is None else root_of(mesh)
    wanted, most = _ranks_of(mesh, model_mesh), _ranks_of(root, None)
    # A unit of experts alone does not show the model axis of the other parameters.
    is_beside_unknown = model_mesh is None and wanted <= found <= most
    if found != wanted and not is_beside_unknown:
        raise ValueError(
            expected(
                f"an expert_mesh that covers ranks {sorted(wanted)} together with the experts' own "
                "axis, as the other parameters' meshes do",
                f"ranks {sorted(found)}",
                where=f"'{name}' in fully_shard()",
                hint="Make both by one ParallelDims.build(): Meshes.data and Meshes.experts",
            )
        )


def check_same_ranks(mesh: DeviceMesh, experts: DeviceMesh) -> None:
    """Check that full meshes, of experts and of the other parameters, have the same ranks.

    Raises:
        ValueError: They have not: experts would count in another norm.
    """
    wanted, found = _ranks_of(mesh, None), _ranks_of(experts, None)
    if found != wanted:
        raise ValueError(
            expected(
                f"a full mesh of experts over ranks {sorted(wanted)}, as that of all parameters",
                f"ranks {sorted(found)}",
                where="the mesh_info of shard_placement_fn, in fully_shard()",
                hint="Make both from one mesh of all ranks",
            )
        )


def _ranks_of(mesh: DeviceMesh | None, other: DeviceMesh | None) -> set[int]:
    """Return the ranks of the grid that two meshes span, which have this rank in common."""
    if mesh is None:
        return set(range(dist.get_world_size()))
    ranks = mesh.mesh.flatten()
    if other is not None:
        ranks = ranks[:, None] + other.mesh.flatten()[None, :] - dist.get_rank()
    return set(ranks.flatten().tolist())


def _check_mesh(name: str, parameter: DTensor, data_mesh: DeviceMesh) -> None:
    mesh = parameter.device_mesh
    where = f"'{name}', a DTensor on {mesh}, with placements {parameter.placements}"
    if mesh.ndim != 1:
        raise NotImplementedError(
            expected(
                "a DTensor parameter on a mesh of one axis, the model axis",
                f"a mesh of shape {tuple(mesh.shape)}",
                where=where,
                hint="Name the data axes of this mesh in dp_mesh_dims=, or distribute it over one "
                "axis, mesh['tp'], and give fully_shard() the others",
            )
        )
    if mesh.get_coordinate() is None or mesh.device_type != data_mesh.device_type:
        raise ValueError(
            expected(
                f"a model axis with this rank, of the device '{data_mesh.device_type}'",
                f"ranks {mesh.mesh.tolist()} of the device '{mesh.device_type}'",
                where=where,
                hint="Slice the mesh of fully_shard() and the model axis from one mesh",
            )
        )
    common = _common_ranks(mesh, data_mesh)
    # A one-rank axis shares only this rank with any mesh, but a mesh cannot have one axis twice.
    names = set(mesh.mesh_dim_names or ()) & set(data_mesh.mesh_dim_names or ())
    if len(common) > 1 or names or mesh == data_mesh:
        is_expert = annotation_of(parameter).is_expert
        raise ValueError(
            expected(
                "a model axis beside the mesh of fully_shard(), which shares one rank with it",
                f"ranks {sorted(common)} in both",
                where=where,
                hint="Give expert_mesh=, the mesh of the ranks with the same experts"
                if is_expert
                else "Give mesh=, the part of the mesh without the model axis: mesh['dp_shard']",
            )
        )


def _check_placement(name: str, parameter: DTensor) -> None:
    placement = parameter.placements[0]
    where = f"'{name}', a DTensor parameter of shape {tuple(parameter.shape)}"
    if placement.is_partial():
        raise ValueError(
            expected(
                "a parameter that is cut or replicated over the model axis",
                repr(placement),
                where=where,
                hint="Call redistribute(placements=[Replicate()]) on it before fully_shard()",
            )
        )
    if type(placement) not in (Shard, Replicate, StridedShard):
        raise NotImplementedError(
            expected(
                "a shard or Replicate() on the model axis",
                repr(placement),
                where=where,
                hint="Give the parameters of a model that was not sharded before",
            )
        )
    if isinstance(placement, StridedShard):
        dim, num_parts = int(placement.dim), int(placement.split_factor)
        # Several pieces of one row would be no region of the whole.
        if int(parameter.shape[dim]) % num_parts or dim == parameter.ndim - 1 > 0:
            raise NotImplementedError(
                expected(
                    f"{num_parts} fused tensors of one size, along another dim than the last",
                    f"{parameter.shape[dim]} elements along dim {dim}",
                    where=f"{where} with placement {placement}",
                    hint="Distribute it by Shard(), or lay its tensors along another dim",
                )
            )


def _check_local(name: str, parameter: DTensor, part: ModelPart) -> None:
    local = tuple(local_of(parameter).shape)
    if local != part.local_shape:
        raise ValueError(
            expected(
                f"{part.local_shape} of shape {part.shape} on rank {part.rank} of the model axis",
                f"a local tensor of shape {local}",
                where=f"'{name}', a DTensor parameter with placements {parameter.placements}",
                hint="Cut it with distribute_tensor(), or declare its fused parts",
            )
        )

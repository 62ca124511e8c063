"""Decide over which ranks a unit is divided: its meshes, strategy and resharding.

The functions turn the arguments of ``fully_shard`` into values or refuse them, before any module is
changed. A :class:`Division` then says which ranks divide each parameter group.
No collective is issued here, except to build a default mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.errors import expected
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.policy import Average, Strategy
from megafsdp.fsdp.runtime.process_groups import require_own_gpus
from megafsdp.mesh.parallel_dims import default_mesh
from megafsdp.mesh.spmd import SpmdMesh

# Indexed by ZeRO stage: Strategy lists its members in that order.
_STAGES = tuple(Strategy)


@dataclass(frozen=True)
class UnitMeshes:
    """The meshes given for one unit, and how they cut.

    Attributes:
        mesh: The data-parallel mesh, or a full one; None for one of all ranks.
        experts: The data-parallel mesh of experts' parameters; None for that of all others.
        spmd: The axes of ``mesh`` if parameters are DTensors on all of them.
        experts_spmd: The same of the mesh of experts' parameters.
        is_even: Whether each parameter is cut by itself into chunks of dim 0.
    """

    mesh: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    spmd: SpmdMesh | None = None
    experts_spmd: SpmdMesh | None = None
    is_even: bool = False

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


def strategy_of(value: str | int, spmd: SpmdMesh | None = None) -> Strategy:
    """Return the strategy of a Megatron name or a ZeRO stage 0 to 3.

    Without a data axis that divides, it is that of a replica, as in torch.

    Raises:
        ValueError: The name is unknown.
    """
    names = {s.value: s for s in Strategy} | dict(enumerate(_STAGES))
    # True would be found as 1.
    if isinstance(value, bool) or value not in names:
        raise ValueError(
            expected(
                f"one of {[s.value for s in Strategy]} or a ZeRO stage 0 to 3",
                repr(value),
                where="the strategy of fully_shard()",
                hint="Use 'optim_grads_params' for ZeRO-3",
            )
        )
    return names[value] if spmd is None or spmd.divides else Strategy.NO_SHARD


def mesh_of(mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """Return the data-parallel mesh, by default of all ranks.

    Raises:
        RuntimeError: There is neither a mesh nor a process group.
        ValueError: The mesh has more than two axes, or two without names; or ranks on NCCL share
            a GPU.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise RuntimeError(
                expected(
                    "an initialised process group or a mesh",
                    "neither",
                    where="fully_shard()",
                    hint="Call torch.distributed.init_process_group() first, or use torchrun",
                )
            )
        # Collective: all ranks come here with the same arguments.
        mesh = default_mesh(device_type)
    # Two unnamed axes are refused: their sizes do not show which one is the slow network.
    if mesh.ndim == 1 or (mesh.ndim == 2 and mesh.mesh_dim_names is not None):
        require_own_gpus(mesh)
        return mesh
    raise ValueError(
        expected(
            "a mesh of one axis, or of two named ones",
            f"shape {tuple(mesh.shape)} with axes {mesh.mesh_dim_names}",
            where="the mesh of fully_shard()",
            hint="Give the named data-parallel axes, for example mesh['dp_outer', 'dp_shard']",
        )
    )


def is_divided_over_outer_axis(outer_strategy: str, strategy: Strategy, mesh: DeviceMesh) -> bool:
    """Return whether the first axis of the mesh divides main weights too.

    Raises:
        ValueError: The name is unknown, there is no outer axis to divide over, or compute weights
            or gradients are not divided over the inner one.
    """
    where = "outer_strategy of fully_shard()"
    if outer_strategy == "no_shard":
        return False
    if outer_strategy != "optim":
        raise ValueError(
            expected(
                "'no_shard' or 'optim'",
                repr(outer_strategy),
                where=where,
                hint="Use 'no_shard' to replicate shards over the outer axis (HSDP), 'optim' to "
                "divide main weights and optimizer states over it (HFSDP)",
            )
        )
    if mesh.ndim != 2:
        raise ValueError(
            expected(
                "a mesh of two axes",
                f"shape {tuple(mesh.shape)}",
                where=f"{where}, which is 'optim'",
                hint="Give a mesh of an outer and an inner axis, or leave outer_strategy out",
            )
        )
    if strategy is not Strategy.OPTIM_GRADS_PARAMS:
        raise ValueError(
            expected(
                "strategy 'optim_grads_params'",
                repr(strategy.value),
                where=f"{where}, which is 'optim'",
                hint="Divide everything over the inner axis, or leave outer_strategy out",
            )
        )
    return True


def expert_mesh_of(
    expert_mesh: DeviceMesh | None, mesh: DeviceMesh, *, is_divided_over_outer_axis: bool
) -> DeviceMesh | None:
    """Return the data-parallel mesh of experts; None if it is the mesh of all other parameters.

    Raises:
        ValueError: It has more than two axes or two without names, is of another device, or lacks
            the outer axis over which main weights are divided.
    """
    # Two equal meshes would make two groups, hence twice the collectives.
    if expert_mesh is None or expert_mesh == mesh:
        return None
    is_divisible = expert_mesh.ndim == 2 or not is_divided_over_outer_axis
    if expert_mesh.device_type != mesh.device_type or not is_divisible:
        raise ValueError(
            expected(
                f"a mesh of {mesh.ndim} axes of the device '{mesh.device_type}', as the other has",
                f"shape {tuple(expert_mesh.shape)} of '{expert_mesh.device_type}'",
                where="expert_mesh of fully_shard()",
                hint="Make both meshes of the same outer axis and device",
            )
        )
    return mesh_of(expert_mesh, mesh.device_type)


@dataclass(frozen=True)
class Division:
    """What a unit divides, over which ranks, and how it averages gradients.

    Attributes:
        mesh: The data-parallel mesh, of one or two axes.
        expert_mesh: The data-parallel mesh of experts' parameters, if it is a different one.
        strategy: What the last axis divides.
        is_divided_over_outer_axis: Whether the first of two axes divides main weights too.
        gradient_scale: Factor on the sum of gradients over all ranks of the mesh.
        is_even: Whether each parameter is cut by itself, as ``torch.chunk`` cuts.
    """

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None
    strategy: Strategy
    is_divided_over_outer_axis: bool
    gradient_scale: float
    is_even: bool = False

    def reshard_of(self, reshard_after_forward: bool | int | None) -> bool | int | None:
        """Return the choice of resharding after forward; for one rank False, for all ranks True.

        Where the number does not divide the last axis of one of the meshes, their greatest common
        divisor takes its place on that axis.

        Raises:
            ValueError: It is neither a bool nor a number that divides the ranks of some mesh's last
                axis.
        """
        # bool first: True is an int too, and would mean one rank.
        if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
            return reshard_after_forward
        number = reshard_after_forward
        meshes = [mesh for mesh in (self.mesh, self.expert_mesh) if mesh is not None]
        sizes = list(dict.fromkeys(mesh.size(mesh.ndim - 1) for mesh in meshes))
        if not isinstance(number, int) or number < 1 or all(size % number for size in sizes):
            raise ValueError(
                expected(
                    "True, False, None, or a divisor of the "
                    f"{' or '.join(map(str, sizes))} ranks that divide parameters",
                    repr(number),
                    where="reshard_after_forward of fully_shard()",
                    hint="Give the number of ranks of one node, or True to free parameters",
                )
            )
        slices = [math.gcd(number, size) for size in sizes]
        # A slice divided among one rank is the full buffer; among all of them it is the shard.
        if max(slices) == 1:
            return False
        return True if slices == sizes and min(sizes) > 1 else number

    def axes(
        self, *, is_whole: bool, is_expert: bool, model_mesh: DeviceMesh | None
    ) -> DataParallelAxes:
        """Return the ranks of a parameter group.

        Args:
            is_whole: Whether it stays whole on every rank, whatever the strategy.
            is_expert: Whether its parameters are those of experts.
            model_mesh: The model axis over which its parameters are also cut or repeated, if any.
        """
        mesh = self.expert_mesh if is_expert and self.expert_mesh is not None else self.mesh
        # A group that cannot be cut has the buffers and collectives of a replica.
        if is_whole or self.strategy is Strategy.NO_SHARD:
            axes = DataParallelAxes.replicated(mesh)
        elif self.is_divided_over_outer_axis:
            axes = DataParallelAxes.divided(mesh)
        else:
            axes = DataParallelAxes.sharded(mesh)
        axes = replace(axes, is_expert=is_expert)
        return axes if model_mesh is None else axes.beside(model_mesh)


def division_of(
    mesh: DeviceMesh,
    meshes: UnitMeshes,
    strategy: Strategy,
    outer_strategy: str,
    average: Average,
) -> Division:
    """Return what a unit divides, from the arguments of :func:`fully_shard`.

    Raises:
        ValueError: ``outer_strategy`` or ``expert_mesh`` does not fit the others.
        NotImplementedError: Even chunks would be divided over two axes.
    """
    is_divided = is_divided_over_outer_axis(outer_strategy, strategy, mesh)
    if meshes.is_even and is_divided:
        raise NotImplementedError(
            expected(
                "one axis that divides parameters",
                "outer_strategy='optim', which divides main weights over two",
                where="fully_shard() with even_shards=True",
                hint="Leave one of them out",
            )
        )
    experts = expert_mesh_of(meshes.experts, mesh, is_divided_over_outer_axis=is_divided)
    # This factor alone averages gradients: no reduction divides again. It holds for experts too:
    # their mesh is smaller, but each of their gradients sums the tokens of as many more ranks.
    scale = 1.0 if average is Average.TOKEN else 1.0 / mesh.size()
    return Division(mesh, experts, strategy, is_divided, scale, meshes.is_even)

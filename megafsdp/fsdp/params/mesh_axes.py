"""The ranks among which a parameter group is divided or replicated.

The mesh has one axis, or an outer axis (the slow network) and an inner one. A division over the
inner axis is gathered for every use; a further division over the outer axis only once a step::

    mesh (dp_outer 2, dp_shard 3)         main weight           gathered from
    sharded   (ZeRO, HSDP)   rank (o, s)  piece s of 3          3 shards, each on 2 ranks
    divided   (HFSDP)        rank (o, s)  piece 2 s + o of 6    3 shards of 2 pieces
    replicated (no_shard)    rank (o, s)  all of it             -

A model axis beside them (tensor parallelism, or expert parallelism of stacks) has already cut or
repeated the parameters. Ranks along it never exchange weights, and DTensors list it after the data
axes.

This file only names ranks: it makes no buffer and issues no collective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.mesh.dtensor import joined_mesh
from megafsdp.mesh.parallel_dims import flat_group


@dataclass(frozen=True)
class DataParallelAxes:
    """The ranks among which one group is divided or replicated.

    Attributes:
        mesh: The data-parallel mesh.
        group: Ranks that gather and reduce the group's buffers: those of the mesh's last axis, or
            all of the mesh for a replicated group.
        outer_group: Ranks of the outer axis, over which shards are reduced once a step; None
            without an outer axis.
        all_ranks: Every rank of the mesh.
        num_shards: Ranks that divide the main weight; 1 if replicated.
        shard: Index of this rank's piece of the main weight; -1 if replicated.
        dtensor_mesh: The mesh of sharded parameters: the data axes, then the model axis.
        everyone: Every rank of ``dtensor_mesh``.
        is_divided: Whether the outer axis divides the main weight too.
        model_mesh: The model axis; None without one.
        is_expert: Whether these are the ranks of experts' parameters.
        maxima_group: Ranks that combine a recipe's maxima; None for the ranks that divide a
            parameter.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    outer_group: dist.ProcessGroup | None
    all_ranks: dist.ProcessGroup
    num_shards: int
    shard: int
    dtensor_mesh: DeviceMesh
    everyone: dist.ProcessGroup
    is_divided: bool = False
    model_mesh: DeviceMesh | None = None
    is_expert: bool = False
    maxima_group: dist.ProcessGroup | None = None

    @property
    def is_sharded(self) -> bool:
        """Return whether the group is gathered and reduce-scattered."""
        return self.shard >= 0

    @property
    def has_whole(self) -> bool:
        """Return whether this rank has the whole main weight, so that nothing is gathered."""
        return not self.is_sharded or (self.group.size() == 1 and not self.is_divided)

    @property
    def num_pieces(self) -> int:
        """Return how many pieces of the main weight one gathered shard consists of."""
        return self.num_shards // self.group.size() if self.is_divided else 1

    @property
    def model_group(self) -> dist.ProcessGroup | None:
        """Return the ranks of the model axis; None without one."""
        return None if self.model_mesh is None else self.model_mesh.get_group()

    @property
    def num_model_axes(self) -> int:
        """Return how many axes of :attr:`dtensor_mesh` are not data axes."""
        return self.dtensor_mesh.ndim - self.mesh.ndim

    @property
    def num_shard_axes(self) -> int:
        """Return how many data axes, counted from the last, divide the main weight."""
        if not self.is_sharded:
            return 0
        return self.mesh.ndim if self.is_divided else 1

    @property
    def gathered_shard(self) -> int:
        """Return the index of the inner axis's shard that this rank contributes to gathers."""
        return max(self.shard, 0) // self.num_pieces

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Return the ranks that together have one copy of the main weight; unused if replicated."""
        # HSDP repeats the main weight over the outer axis, HFSDP divides it.
        return self.all_ranks if self.is_divided else self.group

    @classmethod
    def sharded(cls, mesh: DeviceMesh) -> DataParallelAxes:
        """Divide over the last axis of a 1-D or 2-D mesh, replicate over the other one."""
        group = mesh.get_group(mesh.ndim - 1)
        outer = mesh.get_group(0) if mesh.ndim > 1 else None
        everyone = flat_group(mesh)
        return cls(mesh, group, outer, everyone, group.size(), group.rank(), mesh, everyone)

    @classmethod
    def divided(cls, mesh: DeviceMesh) -> DataParallelAxes:
        """Divide over both axes of a 2-D mesh, so that inner shards are consecutive pieces."""
        group, outer = mesh.get_group(1), mesh.get_group(0)
        everyone = flat_group(mesh)
        # The outer rank varies fastest: a gather over the outer axis then joins neighbouring
        # pieces, and its result is one shard of the inner axis, without a copy.
        piece = group.rank() * outer.size() + outer.rank()
        return cls(
            mesh, group, outer, everyone, mesh.size(), piece, mesh, everyone, is_divided=True
        )

    @classmethod
    def replicated(cls, mesh: DeviceMesh) -> DataParallelAxes:
        """Repeat everything on each rank of a 1-D or 2-D mesh."""
        # One all-reduce over all ranks, not one for each axis.
        everyone = flat_group(mesh)
        return cls(mesh, everyone, None, everyone, 1, -1, mesh, everyone)

    def beside(self, model_mesh: DeviceMesh) -> DataParallelAxes:
        """Return these axes with a model axis beside them."""
        joined = joined_mesh(self.mesh, model_mesh)
        # Comparisons and random draws for whole parameters go over both kinds of axes.
        return replace(
            self, dtensor_mesh=joined, everyone=flat_group(joined), model_mesh=model_mesh
        )

    def with_maxima_over(self, weight_mesh: DeviceMesh) -> DataParallelAxes:
        """Return these axes with a recipe's maxima combined over the ranks of a mesh."""
        return replace(self, maxima_group=flat_group(weight_mesh))

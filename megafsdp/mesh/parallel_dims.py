"""Degrees of parallelism and the device mesh they make.

This file is the only one that spells mesh axes: ``dp_outer`` (replicas of a sharded group, the slow
network), ``dp_shard`` (ranks that divide parameters), ``cp``, ``tp``, ``ep``, ``edp``. The last
four are reserved: their degrees must be 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafsdp.errors import expected
from megafsdp.mesh.torch_private import flatten_mesh, new_group_options

DP_OUTER = "dp_outer"
DP_SHARD = "dp_shard"
_RESERVED = ("cp", "tp", "ep")
_FILL = -1


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism.

    Attributes:
        dp_outer: Replicas of the sharded group (HSDP, HFSDP).
        dp_shard: Ranks that divide parameters, gradients and optimizer states; -1 takes what is
            left.
        cp: Context parallel degree; must be 1.
        tp: Tensor parallel degree; must be 1.
        ep: Expert parallel degree; must be 1.
    """

    dp_outer: int = 1
    dp_shard: int = _FILL
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """Check the degrees by themselves.

        Raises:
            ValueError: A degree is neither positive nor, for ``dp_shard``, -1.
            NotImplementedError: A reserved degree is not 1.
        """
        for name in (DP_OUTER, *_RESERVED):
            if getattr(self, name) < 1:
                raise ValueError(self._message("a positive degree", name))
        if self.dp_shard < 1 and self.dp_shard != _FILL:
            raise ValueError(self._message("a positive degree or -1", DP_SHARD))
        for name in _RESERVED:
            if getattr(self, name) != 1:
                raise NotImplementedError(self._message("degree 1", name))

    def _message(self, what: str, name: str) -> str:
        return expected(
            what,
            getattr(self, name),
            where=f"mesh axis '{name}' of ParallelDims",
            hint="Shard over data parallel ranks with dp_shard",
        )

    def resolve(self, world_size: int) -> ParallelDims:
        """Return the same dims with ``dp_shard`` filled in.

        Raises:
            ValueError: The degrees do not multiply to ``world_size``.
        """
        shard = self.dp_shard
        if shard == _FILL:
            shard = max(world_size // self.dp_outer, 1)
        if shard * self.dp_outer != world_size:
            raise ValueError(
                expected(
                    f"degrees that multiply to the world size {world_size}",
                    f"{DP_OUTER} {self.dp_outer} x {DP_SHARD} {shard}",
                    where="ParallelDims",
                    hint=f"Start {shard * self.dp_outer} processes, or set {DP_SHARD} to -1",
                )
            )
        return ParallelDims(self.dp_outer, shard)

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Make the mesh: 1-D over ``dp_shard``, or 2-D (dp_outer, dp_shard) if dp_outer > 1.

        Collective over all ranks of the default process group. The 1-D mesh uses that group; with
        NCCL the groups made for the 2-D one run their collectives on streams of high priority.

        Raises:
            ValueError: The degrees do not multiply to the world size.
        """
        dims = self.resolve(dist.get_world_size())
        if dims.dp_outer == 1:
            return init_device_mesh(device_type, (dims.dp_shard,), mesh_dim_names=(DP_SHARD,))
        names = (DP_OUTER, DP_SHARD)
        # torch writes the name of a group into its options, so each axis has its own.
        options: dict[int | str, Any] = {}
        for name in names:
            if made := new_group_options():
                options[name] = (None, made["pg_options"])
        return init_device_mesh(
            device_type,
            (dims.dp_outer, dims.dp_shard),
            mesh_dim_names=names,
            backend_override=options,
        )


def flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks of a mesh, in row-major order.

    Collective on first use with a mesh of several axes; torch makes one group for equal meshes.
    """
    return mesh.get_group() if mesh.ndim == 1 else flatten_mesh(mesh).get_group()


def default_mesh(device_type: str) -> DeviceMesh:
    """Make a 1-D mesh of all ranks; collective over all ranks of the default process group."""
    return ParallelDims().build_mesh(device_type)

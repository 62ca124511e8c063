"""Process groups that units need besides those of their meshes.

Neighbours divide a unit's storage among themselves between forward and backward; a twin lets
reductions run beside gathers. What is sent over them is decided elsewhere. The file also checks
what NCCL would refuse at the first collective: two ranks on one GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.buffer.comm.collectives import backends
from megafsdp.errors import expected, listed
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.mesh.parallel_dims import flat_group
from megafsdp.mesh.torch_private import default_store, new_group_options


class ExtraGroups:
    """Process groups that units need besides those of their meshes, each made once.

    Making one is collective over its ranks alone.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], dist.ProcessGroup] = {}

    def neighbours(self, axes: DataParallelAxes, num_ranks: int) -> dist.ProcessGroup:
        """Return the group of this rank and its neighbours on the inner axis.

        Args:
            axes: The axes.
            num_ranks: Size of the group; divides the size of the inner axis.
        """
        # Consecutive ranks: on the usual meshes those are of one host.
        first = axes.group.rank() // num_ranks * num_ranks
        return self._make(axes.group, first, num_ranks)

    def twin(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return another group of the same ranks, with a communicator of its own."""
        return self._make(group, 0, group.size())

    def _make(self, group: dist.ProcessGroup, first: int, num_ranks: int) -> dist.ProcessGroup:
        # Keys do not clash: a twin is as large as its group, and neighbours are always fewer.
        key = (group.group_name, num_ranks)
        if key not in self._made:
            ranks = dist.get_process_group_ranks(group)[first : first + num_ranks]
            self._made[key] = _new_group(ranks)
        return self._made[key]


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Make a group of some ranks; the others make other groups, or none, and take no part."""
    world = dist.group.WORLD
    assert world is not None, "units have a mesh, which has a default group"
    # Of a default group that is bound to a device torch splits the communicator, which needs all
    # ranks of the world: one pipeline stage alone would wait for ever.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(ranks, use_local_synchronization=True, **new_group_options())
    finally:
        world.bound_device_id = bound


def make_neighbours(
    groups: Iterable[ParameterGroup], num_ranks: bool | int | None, extra_groups: ExtraGroups
) -> None:
    """Make the groups of neighbours that a choice of resharding after forward asks for."""
    if isinstance(num_ranks, bool) or num_ranks is None:
        return
    for group in groups:
        if 1 < (size := num_neighbours(group.axes, num_ranks)) < group.axes.group.size():
            extra_groups.neighbours(group.axes, size)


def num_neighbours(axes: DataParallelAxes, num_ranks: int) -> int:
    """Return how many of ``num_ranks`` neighbouring ranks, say of a node, divide a group's storage.

    Experts may be divided among fewer ranks of a node than other parameters. One rank keeps all of
    it; all of the inner axis have no slices but their shards.
    """
    return math.gcd(num_ranks, axes.group.size()) if axes.is_sharded else 1


def separate_reductions(
    groups: Iterable[ParameterGroup], extra_groups: ExtraGroups, *, is_separate: bool
) -> None:
    """Choose whether reductions have communicators of their own; collective if they do.

    One communicator runs one collective at a time, so a gather would wait for the reduction before
    it.
    """
    for group in groups:
        inner, outer = group.axes.group, group.axes.outer_group
        if is_separate:
            inner = extra_groups.twin(inner)
            outer = outer and extra_groups.twin(outer)
        group.gradients.choose_groups(inner, outer)


def require_own_gpus(mesh: DeviceMesh) -> None:
    """Check that each rank of a mesh on NCCL computes on a GPU of its own; once a mesh.

    Collective over the ranks of the mesh, by the store in which they met: what NCCL says at the
    first collective names no cause, and not on all ranks.

    Raises:
        ValueError: Two ranks have one GPU; on all ranks.
    """
    group = flat_group(mesh)
    is_nccl = mesh.device_type == "cuda" and backends(group).get("cuda") == "nccl"
    shared = _shared_gpus(group.group_name, group.rank(), group.size()) if is_nccl else ""
    if shared:
        raise ValueError(
            expected(
                f"a GPU for each of the {group.size()} ranks, which NCCL needs",
                shared,
                where="the mesh of fully_shard()",
                hint="Call torch.cuda.set_device(local_rank) before it, start one rank a GPU, or"
                " use gloo",
            )
        )


@functools.cache
def _shared_gpus(group_name: str, rank: int, size: int) -> str:
    """Return which ranks have one GPU, alike on all ranks; nothing if none do."""
    store = dist.PrefixStore(f"megafsdp/gpus/{group_name}/", default_store())
    store.set(str(rank), _own_gpu())
    # The last one to come compares for all: each with each would be thousands of reads a rank.
    if store.add("arrived", 1) == size:
        ranks_of: dict[str, list[str]] = {}
        for each in map(str, range(size)):
            ranks_of.setdefault(store.get(each).decode(), []).append(each)
        shared = [f"ranks {', '.join(r)} on {gpu}" for gpu, r in ranks_of.items() if r[1:]]
        store.set("shared", listed(shared, separator="; "))
    # Waits for the last one.
    return store.get("shared").decode()


def _own_gpu() -> str:
    return f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"

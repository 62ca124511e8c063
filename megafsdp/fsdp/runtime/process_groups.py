"""Process groups that units need besides those of their meshes.

A group of neighbours divides a unit's storage between forward and backward; a twin group lets
reductions run beside gathers. What is sent over them is decided elsewhere. The file also checks
that no two ranks use one GPU, which NCCL would refuse at the first collective.
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

    Only the ranks of a group make it together (collective over them).
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], dist.ProcessGroup] = {}

    def neighbours(self, axes: DataParallelAxes, num_ranks: int) -> dist.ProcessGroup:
        """Return the group of this rank and its neighbours on the inner axis.

        Args:
            axes: The axes.
            num_ranks: Size of the group; divides the size of the inner axis.
        """
        # Consecutive ranks: on the usual meshes they are on one host.
        first = axes.group.rank() // num_ranks * num_ranks
        return self._make(axes.group, first, num_ranks)

    def twin(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return another group of the same ranks, with its own communicator."""
        return self._make(group, 0, group.size())

    def _make(self, group: dist.ProcessGroup, first: int, num_ranks: int) -> dist.ProcessGroup:
        # Keys do not clash: a twin is as large as its group, and neighbours are always fewer.
        key = (group.group_name, num_ranks)
        if key not in self._made:
            ranks = dist.get_process_group_ranks(group)[first : first + num_ranks]
            self._made[key] = _new_group(ranks)
        return self._made[key]


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Make a group of some ranks; other ranks make other groups, or none, and take no part."""
    world = dist.group.WORLD
    assert world is not None, "units have a mesh, which has a default group"
    # If the default group is bound to a device, torch splits its communicator, which needs all
    # ranks of the world: a pipeline stage on its own would wait for ever. So unbind it meanwhile.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(ranks, use_local_synchronization=True, **new_group_options())
    finally:
        world.bound_device_id = bound


def make_neighbours(
    groups: Iterable[ParameterGroup], num_ranks: bool | int | None, extra_groups: ExtraGroups
) -> None:
    """Make the groups of neighbours that ``reshard_after_forward`` needs."""
    if isinstance(num_ranks, bool) or num_ranks is None:
        return
    for group in groups:
        if 1 < (size := num_neighbours(group.axes, num_ranks)) < group.axes.group.size():
            extra_groups.neighbours(group.axes, size)


def num_neighbours(axes: DataParallelAxes, num_ranks: int) -> int:
    """Return how many of ``num_ranks`` neighbouring ranks, say of a node, divide a group's storage.

    Experts may be divided among fewer ranks of a node than other parameters. If the result is one,
    the rank keeps the full storage; if it is the whole inner axis, each slice is just the shard.
    """
    return math.gcd(num_ranks, axes.group.size()) if axes.is_sharded else 1


def separate_reductions(
    groups: Iterable[ParameterGroup], extra_groups: ExtraGroups, *, is_separate: bool
) -> None:
    """Choose whether reductions have communicators of their own; collective if they do.

    One communicator runs one collective at a time, so a gather would wait for an earlier reduction.
    """
    for group in groups:
        inner, outer = group.axes.group, group.axes.outer_group
        if is_separate:
            inner = extra_groups.twin(inner)
            outer = outer and extra_groups.twin(outer)
        group.gradients.choose_groups(inner, outer)


def require_own_gpus(mesh: DeviceMesh) -> None:
    """Check that each rank of a mesh on NCCL computes on its own GPU; once for each mesh.

    Collective over the ranks of the mesh, through their rendezvous store. NCCL's own error at the
    first collective names no cause, and does not come on all ranks.

    Raises:
        ValueError: Two ranks share a GPU; on all ranks.
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
    """Return which ranks share a GPU, the same text on all ranks; empty if none do."""
    store = dist.PrefixStore(f"megafsdp/gpus/{group_name}/", default_store())
    store.set(str(rank), _own_gpu())
    # The last rank to arrive compares for all: otherwise each rank would read thousands of keys.
    if store.add("arrived", 1) == size:
        ranks_of: dict[str, list[str]] = {}
        for each in map(str, range(size)):
            ranks_of.setdefault(store.get(each).decode(), []).append(each)
        shared = [f"ranks {', '.join(r)} on {gpu}" for gpu, r in ranks_of.items() if r[1:]]
        store.set("shared", listed(shared, separator="; "))
    # Waits for the last rank.
    return store.get("shared").decode()


def _own_gpu() -> str:
    return f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"

"""Process groups that units need besides those of their meshes.

Neighbours divide a unit's storage among themselves between forward and backward; a twin lets
reductions run beside gathers. What is sent over them is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.mesh.torch_private import new_group_options


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
        if group.axes.is_sharded:
            extra_groups.neighbours(group.axes, num_ranks)


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

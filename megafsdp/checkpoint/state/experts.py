"""Experts on disk: by their index in the layer, whichever rank has them.

A rank's stack of experts is stored as rows of the layer's stack; a parameter of a single expert is
stored under a name with the expert's index in the layer. Both follow from what the layer declared
(:class:`~megafsdp.mesh.annotation.ExpertRange`), without communication. Fused parts are cut in
state/fused.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import ExpertRange

# Stands for the index of an expert in the names that parameter groups list.
ANY_EXPERT = "*"


def name_in_layer(name: str, experts: ExpertRange | None) -> str:
    """Return a parameter's name with its expert's local index replaced by that in the layer.

    Raises:
        CheckpointError: The declared component of the name is not the index of a local expert.
    """
    if experts is None or experts.name_component is None:
        return name
    return _renamed(name, experts, str(experts.first + _local_index(name, experts)))


def name_of_group_member(name: str, experts: ExpertRange | None) -> str:
    """Return the name of a parameter in parameter groups; all experts of a layer have one name.

    So ranks with different experts have equal groups.
    """
    if experts is None or experts.name_component is None:
        return name
    return _renamed(name, experts, ANY_EXPERT)


def names_elsewhere(name: str, experts: ExpertRange | None) -> list[str]:
    """List the names under which other ranks store the same parameter of their experts.

    Only the first local expert's parameter lists them, so that a layer lists each name once.
    """
    if experts is None or experts.name_component is None or _local_index(name, experts):
        return []
    own = range(experts.first, experts.first + experts.count)
    return [_renamed(name, experts, str(i)) for i in range(experts.total) if i not in own]


def is_named_by_expert(experts: ExpertRange | None) -> bool:
    """Return whether a parameter exists only on the ranks of its expert."""
    if experts is None or experts.name_component is None:
        return False
    return experts.count < experts.total


def is_partial_stack(experts: ExpertRange | None) -> bool:
    """Return whether a parameter is a part of a layer's stack of experts."""
    if experts is None or experts.name_component is not None:
        return False
    return experts.count < experts.total


def stack_in_layer(
    name: str, shape: tuple[int, ...], experts: ExpertRange | None
) -> tuple[tuple[int, ...], Region]:
    """Return the shape of the whole layer's parameter and the region of it that this model has.

    Raises:
        CheckpointError: The number of experts in a stack is not the declared one.
    """
    if experts is None or experts.name_component is not None:
        return shape, Region((0,) * len(shape), shape)
    if shape[:1] != (experts.count,):
        raise CheckpointError.expected(
            f"a stack of {experts.count} experts along dim 0",
            f"shape {shape}",
            where=f"'{name}'",
            hint="Declare the ExpertRange that the layer has on this rank",
        )
    inner = shape[1:]
    return (experts.total, *inner), Region((experts.first, *[0] * len(inner)), shape)


def holders(
    name: str, parameter: torch.Tensor, experts: ExpertRange | None
) -> tuple[int, ...] | None:
    """Return the ranks that have the same experts as this one; None means all ranks.

    Raises:
        CheckpointError: The declared ranks do not include this rank.
    """
    if experts is None or not dist.is_initialized():
        return None
    if isinstance(parameter, DTensor):
        return tuple(parameter.device_mesh.mesh.reshape(-1).tolist())
    if experts.ranks is None:
        return None if experts.count == experts.total else (dist.get_rank(),)
    if dist.get_rank() not in experts.ranks:
        raise CheckpointError.expected(
            f"rank {dist.get_rank()} among the ranks that hold these experts",
            experts.ranks,
            where=f"the ExpertRange of '{name}'",
            hint="Declare global ranks, this one among them",
        )
    return tuple(sorted(experts.ranks))


def _local_index(name: str, experts: ExpertRange) -> int:
    component, stem, _, _ = _split(name, experts)
    index = component[len(stem) :]
    if not index.isdecimal() or int(index) >= experts.count:
        raise CheckpointError.expected(
            f"the index of one of {experts.count} experts in component "
            f"{experts.name_component} of the name",
            repr(component),
            where=f"'{name}'",
            hint="Give ExpertRange the position of the index, counted from the end",
        )
    return int(index)


def _renamed(name: str, experts: ExpertRange, index: str) -> str:
    _, stem, before, after = _split(name, experts)
    return ".".join([*before, stem + index, *after])


def _split(name: str, experts: ExpertRange) -> tuple[str, str, list[str], list[str]]:
    """Return the component with an expert's index, what of it is before, and the other ones."""
    assert experts.name_component is not None, "asked of parameters of single experts"
    components = name.split(".")
    position = max(len(components) + experts.name_component, -1)
    component = components[position] if position >= 0 else ""
    # A grouped layer numbers the weights of its experts, as "weight3"; in a path, such as that of
    # "linear_fc1", a number at the end means nothing.
    stem = component.rstrip("0123456789") if experts.name_component == -1 else ""
    return component, stem, components[: max(position, 0)], components[position + 1 :]

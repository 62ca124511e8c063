"""The choice of parameter groups to offload, by a fraction, and the move to the host.

Groups that run first in forward stay on the device: stepped weights must be back on the device
before their unit runs again, so the later a unit runs, the more time its copies have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megafsdp.device.host_memory import HostArena, aligned_nbytes
from megafsdp.device.memory import ByteLedger
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.fsdp.params.unit_ledger import HostMemory


def num_kept_on_device(numels: Sequence[int], fraction: float) -> int:
    """Return how many units at the front stay on the device, to offload about ``fraction``.

    ::

        numels 30 10 10 10, fraction 0.5:   | 30 | 10 10 10 |   one stays, exactly half is offloaded
        numels 60 10 10 10, fraction 0.5:   | 60 | 10 10 10 |   a third, since all would be farther

    Args:
        numels: Elements of each unit, in forward order.
        fraction: The part of all elements to offload; in a tie, more is offloaded.
    """
    total, offloaded = sum(numels), sum(numels)
    best, least = 0, abs(offloaded - fraction * total)
    for count, numel in enumerate(numels, start=1):
        offloaded -= numel
        distance = abs(offloaded - fraction * total)
        if distance < least:
            best, least = count, distance
    return best


def first_offloaded(movable_numels: Sequence[int], other_numel: int, fraction: float) -> int:
    """Return the index of the first movable group to offload, in forward order.

    Args:
        movable_numels: Elements of each group that can be offloaded.
        other_numel: Elements that stay on the device whatever the fraction.
        fraction: The part of all elements to offload.
    """
    return max(num_kept_on_device([other_numel, *movable_numels], fraction) - 1, 0)


def check_fraction(fraction: float | str, *, has_own_states: bool = False) -> None:
    """Check an offload fraction.

    Args:
        fraction: The user's value.
        has_own_states: Whether another optimizer keeps states on the host.

    Raises:
        ValueError: It is neither a number from 0 to 1 nor ``"auto"``; or it is ``"auto"``, which
            may move states, and another optimizer keeps them.
    """
    if fraction == "auto" and has_own_states:
        raise ValueError(
            expected(
                "a number from 0 to 1 beside cpu_optimizer_cls",
                "'auto'",
                where="offload_fraction of HybridDeviceOptimizer",
                hint="Give the part to offload: states of another optimizer stay where they are",
            )
        )
    is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if fraction != "auto" and not (is_number and 0.0 <= float(fraction) <= 1.0):
        raise ValueError(
            expected(
                "a number from 0 to 1, or 'auto'",
                repr(fraction),
                where="offload_fraction of HybridDeviceOptimizer",
                hint="Give the part of the elements that shall live on the host",
            )
        )


def groups_of(parameters: Iterable[torch.Tensor]) -> list[ParameterGroup]:
    """Return the parameter groups of parameters, in the order of each group's first parameter."""
    # Unique and in order: the boundary must be the same on all ranks.
    found = {id(owner): owner for owner in map(group_of, parameters) if owner is not None}
    return list(found.values())


def groups_to_offload(parameters: Sequence[torch.Tensor], fraction: float) -> list[ParameterGroup]:
    """Choose the parameter groups to offload; local, the same on all ranks.

    What cannot be offloaded stays on the device, but counts in the total: plain tensors, main
    weights that are not fp32, and groups with a trainable parameter that is not given. Groups that
    were offloaded before stay offloaded.

    Args:
        parameters: The optimizer's parameters, in forward order.
        fraction: The part of all local elements to offload.

    Raises:
        ValueError: Parameters are on the host by the offload policy of ``fully_shard``.
        NotImplementedError: The fraction is not 0 and some parameters are quantized.
    """
    groups = groups_of(parameters)
    _refuse_parameters_on_host(groups)
    if fraction:
        _refuse_quantized(groups)
    chosen = _chosen(parameters, fraction)
    return [g for g in groups if g in chosen or g.host_memory is not None]


def groups_to_return(parameters: Sequence[torch.Tensor], fraction: float) -> list[ParameterGroup]:
    """Choose the offloaded groups to bring back to the device, so that this fraction stays."""
    chosen = _chosen(parameters, fraction)
    return [g for g in groups_of(parameters) if g not in chosen and g.host_memory is not None]


def _chosen(parameters: Sequence[torch.Tensor], fraction: float) -> list[ParameterGroup]:
    given = {id(parameter) for parameter in parameters}
    groups = groups_of(parameters)
    movable = [group for group in groups if _is_movable(group, given)]
    numels = [group.main_weight.flat.numel() for group in movable]
    # The fraction counts all elements, so that 0.5 means half of the memory.
    others = sum(g.main_weight.flat.numel() for g in groups if g not in movable)
    plain = sum(p.numel() for p in parameters if group_of(p) is None)
    return movable[first_offloaded(numels, others + plain, fraction) :]


def _refuse_parameters_on_host(groups: Sequence[ParameterGroup]) -> None:
    for group in groups:
        if group.lives_on_host:
            raise ValueError(
                expected(
                    "parameters on the device, to move what the fraction says",
                    f"unit '{group.label}' with offload_policy, whose parameters are on the host",
                    where="HybridDeviceOptimizer",
                    hint="Leave out the offload_policy of fully_shard() or use FusedAdam, which "
                    "steps such parameters on the host",
                )
            )


def _refuse_quantized(groups: Sequence[ParameterGroup]) -> None:
    # Kernels of the device make codes from main weights, so these must be on the device.
    for group in groups:
        if group.quantization is not None:
            raise NotImplementedError(
                expected(
                    "offload_fraction 0 over quantized weights, whose codes the device makes",
                    f"another, and unit '{group.label}' under {group.quantization.recipe.name}",
                    where="HybridDeviceOptimizer",
                    hint="Use FusedAdam, or leave the recipe of MixedPrecisionPolicy out",
                )
            )


def _is_movable(group: ParameterGroup, given: set[int]) -> bool:
    # All parameters must be given: another optimizer that shares the group would step moved rows.
    return (
        group.dtypes.main == torch.float32
        and group.quantization is None
        and all(id(p.sharded) in given for p in group.parameters if p.sharded.requires_grad)
    )


def offload(group: ParameterGroup, ledger: ByteLedger, *, num_states: int, is_pinned: bool) -> None:
    """Move a group's main weight into a slab of the host with room for its fp32 states; local."""
    # If an earlier optimizer has offloaded the group, the new one uses its slab.
    if group.host_memory is None:
        numel = group.main_weight.flat.numel()
        nbytes = aligned_nbytes(numel * torch.float32.itemsize)
        arena = HostArena((1 + num_states) * nbytes, is_pinned=is_pinned)
        group.offload_main_weight(HostMemory(arena, ledger))

"""Whole tensors of a sharded model: full state dicts, and forwards with everything gathered.

Every rank of the model calls these functions while the model is at rest, and gets or gives every
tensor whole. To save training states shard by shard, use :mod:`megafsdp.checkpoint`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megafsdp.buffer.comm.agreement import raise_together
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor, local_tensor
from megafsdp.device.torch_private import sum_of_versions
from megafsdp.errors import expected, listed
from megafsdp.fsdp.grouping import is_replaced
from megafsdp.fsdp.params.meta import device_of, give_memory_to_meta_tensors, require_initialized
from megafsdp.fsdp.params.model_parts import model_part_of
from megafsdp.fsdp.runtime.guards import refuse_replaced, refuse_summoned
from megafsdp.fsdp.runtime.root import refuse_parts_of_ranks
from megafsdp.fsdp.runtime.unit import FSDPUnit, units_below
from megafsdp.fsdp.torch_state import mark_managed
from megafsdp.fsdp.weight_sync import mark_main_weights_changed, wait_before_load
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.model_part import ModelPart

# torch's name for what a module's get_extra_state() returns.
_EXTRA_STATE = "_extra_state"


@torch.inference_mode(mode=False)
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return main weights and buffers as full plain tensors, by FQN.

    Collective: one gather for each sharded parameter.

    Args:
        model: A module with units below it, at rest. Called by all ranks alike.

    Returns:
        The same dict on every rank: copies, on the model's device. Only the extra states of modules
        are each rank's own.

    Raises:
        RuntimeError: A tensor has no values because it came on the meta device, or
            ``summon_full_params`` shows compute weights that are not the main weights.
        ValueError: A unit is on some ranks of its root only, or ranks have other experts under the
            same names, so that others have other values.
    """
    refuse_parts_of_ranks(model, "full_state_dict()")
    _refuse_some_experts(model, "full_state_dict()")
    require_initialized([model], where="full_state_dict()")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    full: dict[int, torch.Tensor] = {}

    def whole(name: str, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        # Names of a tied parameter share one tensor, as in any state dict: savers store it once.
        parameter = parameters.get(name, value)
        if id(parameter) not in full:
            full[id(parameter)] = _whole(value, parameter).detach().clone()
        return full[id(parameter)]

    state = model.state_dict()
    return {name: whole(name, value) for name, value in state.items()}


def _refuse_some_experts(model: nn.Module, where: str) -> None:
    for name, parameter in model.named_parameters():
        experts = annotation_of(parameter).experts
        if experts is not None and experts.count < experts.total:
            raise ValueError(
                expected(
                    "parameters of all experts of a layer",
                    f"those of {experts.count} of {experts.total} experts",
                    where=f"'{name}' in {where}",
                    hint="Go by a checkpoint, which has them by their index in the layer: "
                    "checkpoint.save() and load()",
                )
            )


@torch.inference_mode(mode=False)
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy full plain tensors into a sharded model: each rank takes its own rows.

    The next forward makes the compute weights anew. Called by all ranks alike, each with the whole
    state; one small collective, so that all ranks raise if one must.

    Args:
        model: A module with units below it, at rest.
        state: A tensor for every name of ``model.state_dict()``, with its global shape, in any
            dtype; and the extra states of its modules.

    Raises:
        ValueError: Names are missing or unknown, or shapes differ, or ranks have other experts
            under the same names; nothing has been changed then, on any rank.
        RuntimeError: Only other ranks found such an error, which is quoted; or
            ``summon_full_params`` shows full parameters of a unit.
    """
    _refuse_some_experts(model, "load_full_state_dict()")
    own = model.state_dict()
    # Units that still show full parameters are pinned: writes to them would be lost.
    if any(is_replaced(parameter) for parameter in model.parameters()):
        refuse_summoned("load_full_state_dict()")
    # Nothing is changed before all ranks have agreed that their states fit.
    raise_together(_mismatch(own, state))
    # A background save may still be copying the main weights.
    wait_before_load()
    give_memory_to_meta_tensors(model, device_below(model), is_wanted=own.__contains__)
    # Read again: tensors on the meta device were replaced.
    own, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in own.items():
            if not _is_extra_state(name):
                _copy_from_whole(tensor, state[name], parameters.get(name, tensor))
    extra_states = {name: state[name] for name in own if _is_extra_state(name)}
    if extra_states:
        # load_state_dict() finds the module of each, under wrappers too.
        model.load_state_dict(extra_states, strict=False)
    mark_main_weights_changed(model)


def _whole(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor of a state dict, in the unsharded model's order; collective.

    Args:
        tensor: The tensor.
        parameter: The parameter whose value it is; the tensor itself if it is a buffer's.
    """
    full, part = full_tensor(tensor), _part_of_plain_dtensor(tensor, parameter)
    if part is None or part.dim is None or len(part.fused_sizes) == 1:
        return full
    # torch has joined [gate; up] of one rank after those of another.
    return part.join(full.chunk(part.num_ranks, part.dim))


def _copy_from_whole(tensor: torch.Tensor, whole: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy this rank's elements of a whole tensor into one of a state dict; local."""
    if isinstance(tensor, UnevenDTensor):
        tensor.copy_from_full_(whole)
        return
    part = _part_of_plain_dtensor(tensor, parameter)
    if part is not None:
        whole = part.cut(whole)
    elif isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        whole = local_tensor(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    local_tensor(tensor).copy_(whole)


def _part_of_plain_dtensor(tensor: torch.Tensor, parameter: torch.Tensor) -> ModelPart | None:
    """Return this rank's part of a DTensor over one axis that our units have not cut; else None."""
    if isinstance(tensor, UnevenDTensor) or not isinstance(parameter, DTensor):
        return None
    return model_part_of(parameter) if parameter.device_mesh.ndim == 1 else None


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def device_below(module: nn.Module) -> torch.device:
    """Return the device of the units below a module; without units torch's default device."""
    return device_of([group for unit in units_below([module]).values() for group in unit.groups])


def _mismatch(
    own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> ValueError | None:
    problems = [f"missing '{name}'" for name in own if name not in state]
    problems += [f"unknown '{name}'" for name in state if name not in own]
    problems += [
        f"'{name}' of shape {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in state and not _is_extra_state(name) and state[name].shape != tensor.shape
    ]
    if not problems:
        return None
    return ValueError(
        expected(
            "a full tensor for every parameter and buffer",
            listed(problems, separator="; "),
            where="load_full_state_dict()",
            hint="Give the state dict of an unsharded model of the same configuration",
        )
    )


@contextlib.contextmanager
def summon_full_params(module: nn.Module) -> Iterator[None]:
    """Show full compute weights of all units below a module while the context is open.

    Forwards inside gather nothing, so ranks may call the module a different number of times. For
    example, transformers' ``generate()`` may end on each rank by itself; outside the context all
    ranks run as long as the longest text. Collective on entry and at the end, where all ranks raise
    if one must; the whole model is in memory.

    The parameters are read-only. A write raises when the context ends, and is undone: main weights
    stay as they were. A write stays only where forward reads the main weights themselves (one rank,
    ``no_shard`` or a 0-dim parameter, without a cast). Do not write through ``parameter.data``:
    torch does not count such writes.

    Raises:
        RuntimeError: Parameters were written to on some rank, or other ranks raised in the context.
    """
    # Pinned units belong to an enclosing context, which ends later.
    units = [unit for unit in units_below([module]).values() if not unit.is_pinned]
    refuse_replaced(group for unit in units for group in unit.groups)
    for unit in units:
        _unshard(unit)
        mark_managed(unit.modules, False)
    counts = [_count_writes(unit) for unit in units]
    error: Exception | None = None
    try:
        yield
        error = _written(units, counts)
    except Exception as raised:
        error = raised
    finally:
        for unit in units:
            # Unpin first: show_sharded() and release() do nothing for a pinned unit.
            unit.is_pinned = False
            mark_managed(unit.modules)
            unit.show_sharded()
            unit.release()
    _raise_together(error, units)


def _count_writes(unit: FSDPUnit) -> list[tuple[int, int]]:
    """Return how often each group's main weight was marked, and its full parameters written."""
    return [
        (group.num_marks, sum_of_versions([p.unsharded for p in group.parameters]))
        for group in unit.groups
    ]


def _written(
    units: Sequence[FSDPUnit], before: Sequence[list[tuple[int, int]]]
) -> RuntimeError | None:
    """Return an error if full parameters were written to since they were counted; else None."""
    names = [
        unit.name
        for unit, counts in zip(units, before, strict=True)
        for (marks, versions), (new_marks, new_versions) in zip(
            counts, _count_writes(unit), strict=True
        )
        # A step or a load also changes full parameters that are the main weights themselves.
        if marks == new_marks and versions != new_versions
    ]
    if not names:
        return None
    return RuntimeError(
        expected(
            "full parameters that are only read",
            f"writes to those of the units {listed(list(dict.fromkeys(names)))}",
            where="summon_full_params()",
            hint="Write outside of it, by load_full_state_dict(model, state) or "
            "parameter.copy_from_full_(tensor)",
        )
    )


def _raise_together(error: Exception | None, units: Sequence[FSDPUnit]) -> None:
    """Raise on all ranks of the units if one has an error; full parameters are then made anew."""
    groups = [group for unit in units for group in unit.groups]
    if not groups:
        if error is not None:
            raise error
        return
    try:
        # Take the largest: groups of experts or of whole parameters may have fewer ranks.
        raise_together(error, max((g.axes.everyone for g in groups), key=lambda g: g.size()))
    except Exception:
        # A persistent weight may contain the writes: remake it, on all ranks, so that all gather.
        for group in groups:
            group.mark_stale()
        raise


def _unshard(unit: FSDPUnit) -> None:
    unit.require_context().start_unshard(unit)
    unit.finish_unshard()
    unit.show_unsharded()
    unit.is_pinned = True

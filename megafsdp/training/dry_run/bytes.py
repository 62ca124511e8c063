"""Bytes of optimizer states on the device and of an offloaded optimizer on the host, by arithmetic.

Which parameter groups are offloaded follows from the rule of the optimizer itself
(:mod:`megafsdp.optimizer.offload.placement`); this file sorts planned groups as the optimizer does.
FusedAdam allocates plain states as flat buffers with gaps and padding, like the main weights. All
other states are tensors of a parameter's own rows. Not counted: scalars, and the rounding of slabs
on the host to whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from megafsdp.buffer.layout import TensorSpec, row_numel_of
from megafsdp.device.host_memory import aligned_nbytes
from megafsdp.fsdp.estimate.footprint import most_on_a_rank
from megafsdp.fsdp.estimate.meta_engine import PlannedGroup, PlannedUnit
from megafsdp.optimizer.offload.placement import first_offloaded
from megafsdp.optimizer.states.formats import BLOCK_NUMEL, PLAIN_DTYPES, dtype_for, is_scaled
from megafsdp.optimizer.states.store import STATES
from megafsdp.training.config.optimizer_sections import MuonSection, OptimizerSection
from megafsdp.training.step.optimizers import is_for_muon, parameter_groups

# The fraction assumed for auto: a dry run cannot measure, and a run chooses at most this.
MOST_OF_AUTO = 1.0


@dataclass(frozen=True, slots=True)
class HostFootprint:
    """Bytes on the host of each rank, in the order in which they are shown.

    Attributes:
        main_weight: Main weights.
        optimizer_state: Both moments.
        second_copy: A second copy of main weights and moments, for a step that begins before the
            norm is known; an upper bound.
        main_grad: Gradients, as they are copied from the device.
        copied_back: Weights in the compute dtype on their way to the device.
        pinned: Pinned bytes: all of these, each buffer rounded up to 256 bytes; none if the device
            is a CPU.
    """

    main_weight: int = 0
    optimizer_state: int = 0
    second_copy: int = 0
    main_grad: int = 0
    copied_back: int = 0
    pinned: int = 0

    def rows(self) -> dict[str, int]:
        """Return the bytes by name, each byte once."""
        fields = asdict(self).items()
        return {name.replace("_", " "): nbytes for name, nbytes in fields if name != "pinned"}

    @property
    def total(self) -> int:
        """Return all bytes."""
        return sum(self.rows().values())


def optimizer_order(
    model: nn.Module, section: OptimizerSection, muon: MuonSection
) -> dict[str, int]:
    """Return the place of each trainable parameter, by name, in the configured optimizer; local."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, section, muon)
    ordered = [names[id(parameter)] for group in groups for parameter in group["params"]]
    return {name: place for place, name in enumerate(ordered)}


def groups_to_offload(
    units: Sequence[PlannedUnit], order: dict[str, int], fraction: float
) -> list[tuple[int, int]]:
    """Return which groups the optimizer offloads, as (index of the unit, index in it); local.

    Args:
        units: What the model is divided into, the root first.
        order: Place of each parameter in the optimizer.
        fraction: The part of a rank's elements to offload.
    """
    places: dict[tuple[int, int], int] = {}
    for number, unit in enumerate(units):
        prefix = "" if number == 0 else f"{unit.name}."
        for index, group in enumerate(unit.groups):
            if group.is_trainable:
                names = [prefix + slot.spec.name for slot in group.layout.slots]
                places[number, index] = min(order[name] for name in names if name in order)
    ordered = sorted(places, key=places.__getitem__)
    numels = [units[number].groups[index].layout.shard_numel for number, index in ordered]
    # All can be moved: a configuration offloads fp32 main weights alone, and no quantized ones.
    return ordered[first_offloaded(numels, 0, fraction) :]


def host_footprint(
    units: Sequence[PlannedUnit], section: OptimizerSection, *, is_pinned: bool
) -> HostFootprint:
    """Return what marked groups keep on the host; local, equal on all ranks.

    Args:
        units: What the model is divided into.
        section: The optimizer.
        is_pinned: Whether the run has a GPU.
    """
    offloaded = [g for unit in units for g in unit.groups if g.is_offloaded]
    parts = [_of_group(group, section, is_pinned=is_pinned) for group in offloaded]
    columns = zip(*(asdict(part).values() for part in parts), strict=True)
    return HostFootprint(*map(sum, columns))


def _of_group(group: PlannedGroup, section: OptimizerSection, *, is_pinned: bool) -> HostFootprint:
    numel, dtypes = group.layout.shard_numel, group.dtypes
    main_nbytes, state_nbytes = numel * dtypes.main.itemsize, numel * 4 * len(STATES)
    # Replicated gradients are known only at the step, so it cannot begin earlier.
    has_second = section.speculate is not False and section.offload_overlap and group.is_sharded
    is_cast = dtypes.compute != dtypes.main
    grad_nbytes, cast_nbytes = numel * dtypes.grad.itemsize, numel * dtypes.compute.itemsize
    # Weights and moments (once or twice), the gradient with its sum of squares, and the cast.
    slab_nbytes = (1 + len(STATES)) * aligned_nbytes(main_nbytes)
    pinned = (1 + has_second) * slab_nbytes + aligned_nbytes(grad_nbytes)
    pinned += aligned_nbytes(torch.float64.itemsize) + is_cast * aligned_nbytes(cast_nbytes)
    return HostFootprint(
        main_weight=main_nbytes,
        optimizer_state=state_nbytes,
        second_copy=main_nbytes + state_nbytes if has_second else 0,
        main_grad=grad_nbytes,
        copied_back=is_cast * cast_nbytes,
        pinned=is_pinned * pinned,
    )


def state_nbytes(units: Sequence[PlannedUnit], section: OptimizerSection, muon: MuonSection) -> int:
    """Return the bytes of the states on the device of the rank that has the most; local.

    Args:
        units: What the model is divided into, the root first.
        section: The optimizer.
        muon: Muon's options.
    """
    by_shard = {1: [0]}
    counted: dict[tuple[object, ...], list[int]] = {}
    for unit in units:
        prefix = "" if unit is units[0] else f"{unit.name}."
        for group in (g for g in unit.groups if g.is_trainable and not g.is_offloaded):
            layout, main = group.layout, group.dtypes.main
            specs = [slot.spec for slot in layout.slots]
            by_muon = tuple(
                section.kind == "muon" and is_for_muon(prefix + s.name, len(s.shape), muon)
                for s in specs
            )
            key = (id(layout), main, by_muon, group.have_cut_rows)
            if key not in counted:
                counted[key] = _nbytes_by_shard(group, section, by_muon)
            total = by_shard.setdefault(layout.num_shards, [0] * layout.num_shards)
            by_shard[layout.num_shards] = [a + b for a, b in zip(total, counted[key], strict=True)]
    return most_on_a_rank(by_shard, units)


def _nbytes_by_shard(
    group: PlannedGroup, section: OptimizerSection, by_muon: Sequence[bool]
) -> list[int]:
    layout, main = group.layout, group.dtypes.main
    flat: list[torch.dtype] = []
    dtypes: Sequence[torch.dtype] = ()
    if section.is_fused_adam:
        dtypes = section.state_dtypes
        remainders = [torch.int16] if section.store_param_remainders else []
        if main == (torch.bfloat16 if remainders else torch.float32):
            flat = remainders + [dtype for dtype in dtypes if dtype in PLAIN_DTYPES]
            dtypes = [dtype for dtype in dtypes if dtype not in PLAIN_DTYPES]
    elif section.kind != "sgd":
        dtypes = (main, main)
    elif section.momentum:
        dtypes = (main,)
    total = [layout.shard_numel * sum(dtype.itemsize for dtype in flat)] * layout.num_shards
    for index, slot in enumerate(layout.slots):
        kept = (main,) if by_muon[index] else dtypes
        length = layout.sub_buffers[slot.sub_buffer].shard_numel
        for shard in range(slot.offset // length, -(-(slot.offset + slot.spec.numel) // length)):
            start, stop = layout.owned_range(index, shard)
            total[shard] += sum(
                _nbytes(slot.spec, stop - start, dtype, is_row_cut=group.have_cut_rows[index])
                for dtype in kept
            )
    return total


def _nbytes(spec: TensorSpec, numel: int, wished: torch.dtype, *, is_row_cut: bool) -> int:
    """Return the bytes of one state of a parameter's elements on a rank, scales included."""
    dtype = dtype_for(torch.Size(spec.shape), wished)
    if is_scaled(dtype) and is_row_cut:
        return numel * torch.float32.itemsize
    if not is_scaled(dtype):
        return numel * dtype.itemsize
    columns = row_numel_of(spec.shape)
    num_blocks = numel // columns * -(-columns // BLOCK_NUMEL)
    return numel * dtype.itemsize + num_blocks * torch.float32.itemsize

"""Bytes of optimizer states on a rank's device, by arithmetic on planned units; for a dry run.

FusedAdam keeps plain states in flat buffers with gaps and padding, as the main weights lie; all
other states are tensors of a parameter's own rows. Scalars are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megafsdp.buffer.layout import FlatLayout, TensorSpec
from megafsdp.fsdp.estimate.blueprint import PlannedUnit
from megafsdp.optimizer.states.formats import BLOCK_NUMEL, PLAIN_DTYPES, dtype_for, is_scaled
from megafsdp.training.config.optimizer_sections import MuonSection, OptimizerSection
from megafsdp.training.step.optimizers import is_for_muon


def state_nbytes(units: Sequence[PlannedUnit], section: OptimizerSection, muon: MuonSection) -> int:
    """Return the bytes of the states on the device of the rank that has most; local.

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
            key = (id(layout), main, by_muon)
            if key not in counted:
                counted[key] = _nbytes_by_shard(layout, main, section, by_muon)
            total = by_shard.setdefault(layout.num_shards, [0] * layout.num_shards)
            by_shard[layout.num_shards] = [a + b for a, b in zip(total, counted[key], strict=True)]
    return sum(max(total) for total in by_shard.values())


def _nbytes_by_shard(
    layout: FlatLayout,
    main: torch.dtype,
    section: OptimizerSection,
    by_muon: Sequence[bool],
) -> list[int]:
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
            total[shard] += sum(_nbytes(slot.spec, stop - start, dtype) for dtype in kept)
    return total


def _nbytes(spec: TensorSpec, numel: int, wished: torch.dtype) -> int:
    """Return the bytes of one state of a parameter's elements on a rank, scales included."""
    dtype = dtype_for(torch.Size(spec.shape), wished)
    if not is_scaled(dtype):
        return numel * dtype.itemsize
    columns = math.prod(spec.shape[1:])
    num_blocks = numel // columns * -(-columns // BLOCK_NUMEL)
    return numel * dtype.itemsize + num_blocks * torch.float32.itemsize

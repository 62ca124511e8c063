"""Tensors cut by hand over the ranks of a call, so that some shards are empty."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.model_part import whole_part


def whole_mesh() -> DeviceMesh:
    """Return a 1-D mesh over all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layout_of(
    shape: tuple[int, ...], mesh: DeviceMesh, *, skipped: int, shard_rows: int
) -> UnevenLayout:
    """Describe a tensor that lies ``skipped`` rows after the start of its sub-buffer."""
    row_numel = math.prod(shape[1:])
    return UnevenLayout(
        part=whole_part(shape),
        row_numel=row_numel,
        buffer_offset=skipped * row_numel,
        shard_numel=shard_rows * row_numel,
        num_shards=mesh.size(mesh.ndim - 1),
        shard=mesh.get_local_rank(mesh.ndim - 1),
    )


def cut(
    full: torch.Tensor, mesh: DeviceMesh, *, skipped: int = 4, shard_rows: int = 10
) -> UnevenDTensor:
    """Cut a full tensor; by default 10 rows on 3 ranks fall in [6, 4, 0]."""
    layout = layout_of(tuple(full.shape), mesh, skipped=skipped, shard_rows=shard_rows)
    start, stop = layout.element_range()
    rows = full.detach().reshape(-1)[start:stop].clone().view(layout.local_shape())
    return UnevenDTensor.from_local_rows(rows, mesh, layout)

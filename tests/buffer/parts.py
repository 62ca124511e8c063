"""Parts of tensors on data axes and a model axis, cut by hand so that some shards are empty."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.annotation import FusedParts, annotation_of, copy_annotation
from megafsdp.mesh.dtensor import joined_mesh
from megafsdp.mesh.model_part import part_of

DATA_AXES = ("dp_outer", "dp_shard")


def joined(*shape: int) -> DeviceMesh:
    """Return the joined mesh of data axes and a tp axis, all ranks: (dp_shard, tp) or 3-D."""
    names = (*DATA_AXES[-len(shape) + 1 :], "tp")
    root = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return joined_mesh(root[names[:-1]], root["tp"])


def layout_on(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    dim: int | None,
    *,
    fused: FusedParts | None = None,
    num_shard_axes: int = 1,
    padding_rows: int = 1,
    row_numel: int | None = None,
) -> UnevenLayout:
    """Describe a part that lies some rows after the start of its sub-buffer."""
    *data, tp = mesh.get_coordinate() or ()
    part = part_of(shape, dim, mesh.size(mesh.ndim - 1), tp, fused)
    row_numel = row_numel or math.prod(part.local_shape[1:])
    axes = range(len(data) - num_shard_axes, len(data))
    # Shards are counted along the first axis first.
    shard = sum(data[axis] * math.prod(mesh.shape[axes.start : axis]) for axis in axes)
    num_shards = math.prod(mesh.size(axis) for axis in axes)
    num_rows = part.local_numel // max(row_numel, 1) + padding_rows
    return UnevenLayout(
        part=part,
        row_numel=row_numel,
        buffer_offset=padding_rows * row_numel,
        shard_numel=-(-num_rows // num_shards) * row_numel,
        num_shards=num_shards,
        shard=shard,
        num_model_axes=1,
    )


def part_on(
    mesh: DeviceMesh,
    full: torch.Tensor,
    dim: int | None,
    *,
    fused: FusedParts | None = None,
    num_shard_axes: int = 1,
    padding_rows: int = 1,
    row_numel: int | None = None,
) -> UnevenDTensor:
    """Cut a full tensor over a joined mesh."""
    layout = layout_on(
        mesh,
        tuple(full.shape),
        dim,
        fused=fused,
        num_shard_axes=num_shard_axes,
        padding_rows=padding_rows,
        row_numel=row_numel,
    )
    start, stop = layout.element_range()
    local = layout.part.cut(full.detach()).reshape(-1)[start:stop].clone()
    return UnevenDTensor.from_local_rows(
        local.view(layout.local_shape()), mesh, layout, num_shard_axes=num_shard_axes
    )


def cut_model(model: nn.Module, mesh: DeviceMesh, *, num_shard_axes: int = 1) -> nn.Module:
    """Replace the parameters of a plain model by their parts, as their layers declare them."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                declared = annotation_of(parameter)
                part = part_on(
                    mesh,
                    parameter,
                    declared.tp_dim,
                    fused=declared.fused,
                    num_shard_axes=num_shard_axes,
                )
                made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
                copy_annotation(parameter, made[parameter])
            module._parameters[name] = made[parameter]
    return model

"""Meshes and placements of DTensors that data axes and a model axis cut.

A model axis (tp, or ep for stacks of experts) gives each rank a part (model_part.py). Data axes cut
the part's rows, not as torch.chunk does. Placements are only labels for torch and its users: the
true cuts are in the DTensor's layout (buffer/dtensor/uneven_layout.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megafsdp.errors import expected
from megafsdp.mesh.model_part import ModelPart
from megafsdp.mesh.parallel_dims import DP_OUTER, DP_SHARD, flat_group
from megafsdp.mesh.torch_private import StridedShard, concatenate_meshes


def cut_dim(placement: Placement) -> int | None:
    """Return the tensor dimension that a placement cuts; None if it cuts none.

    ``placement.is_shard()`` is False for a strided shard in some versions of torch.
    """
    return placement.dim if isinstance(placement, Shard | StridedShard) else None


def are_rows_cut(parameter: torch.Tensor) -> bool:
    """Return whether a mesh axis cuts the rows of a matrix, as tp cuts input columns."""
    if not isinstance(parameter, DTensor):
        return False
    # A row of a stack is a row of one of its matrices.
    first = 2 if parameter.ndim == 3 else 1
    dims = map(cut_dim, parameter.placements)
    return any(dim is not None and dim >= first for dim in dims)


def shard_axes(placements: Sequence[Placement], num_model_axes: int) -> list[int]:
    """Return the data axes that divide a main weight's rows: the last one, all, or none."""
    data = placements[: len(placements) - num_model_axes]
    return [axis for axis, placement in enumerate(data) if cut_dim(placement) is not None]


def whole_of(tensor: DTensor) -> torch.Tensor:
    """Return the whole of a tensor that torch has cut; collective."""
    placements = list(tensor.placements)
    # With strided shards rows come together in another order, which torch handles.
    if any(isinstance(placement, StridedShard) for placement in placements):
        return tensor.full_tensor()
    # Gather axis by axis: if the mesh was flattened, torch 2.13 would gather both axes at once and
    # leave the padding of uneven chunks in the result.
    for axis in reversed(range(len(placements))):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def main_weight_placements(
    num_data_axes: int, num_shard_axes: int, part: ModelPart, num_model_axes: int
) -> tuple[Placement, ...]:
    """Return the placements of a main weight on its data axes, then its model axes.

    They are the same as in FSDP2, if FSDP2 supports the case. Examples for (dp_shard, tp), tp 2::

        tp cuts dim 0     _StridedShard(0, split_factor=2), Shard(0)
        tp cuts dim 1     Shard(0), Shard(1)
        tp cuts nothing   Shard(0), Replicate()

    Args:
        num_data_axes: Number of data axes of the mesh.
        num_shard_axes: How many of them cut the rows, counted from the last; the tensor is
            replicated over the others.
        part: This rank's part of the tensor along the last model axis.
        num_model_axes: Number of model axes, which come after the data axes.
    """
    # Shard(0) also labels uneven rows: a placement of our own would enter torch's caches.
    rows: list[Placement] = [Shard(0)] * num_shard_axes
    if rows and num_model_axes and part.dim == 0:
        # "Strided" says that the model axis has cut the rows before this data axis.
        rows[-1] = StridedShard(0, split_factor=part.num_ranks)
    model: list[Placement] = [Replicate()] * num_model_axes
    if num_model_axes and part.dim is not None:
        model[-1] = Shard(part.dim)
    return (*[Replicate()] * (num_data_axes - num_shard_axes), *rows, *model)


def are_placements_exact(part: ModelPart, num_shards: int) -> bool:
    """Return whether torch finds even chunks of a part's rows by :func:`main_weight_placements`."""
    # With fused tensors a rank has several pieces. And if a model axis and data axes cut the same
    # dimension, torch and this package agree on the rows only where all divide it.
    is_divided = not part.is_whole and part.shape[0] % (part.num_ranks * num_shards) == 0
    return part.is_whole or (len(part.fused_sizes) == 1 and (part.dim != 0 or is_divided))


def joined_mesh(data: DeviceMesh, model: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the data axes, then the model axes; local, over existing groups.

    Ranks that differ on another axis of the job have their own meshes.

    Raises:
        ValueError: The meshes share more than this rank, or their ranks do not form a grid.
    """
    data_ranks, model_ranks = data.mesh.flatten(), model.mesh.flatten()
    own = dist.get_rank()
    common = set(data_ranks.tolist()) & set(model_ranks.tolist())
    if common != {own}:
        raise _not_orthogonal(data, model, f"ranks {sorted(common)} in both")
    joined = concatenate_meshes([data, model])
    if joined is not None:
        return joined
    # A step along a model axis adds the same to the rank everywhere: meshes are slices of grids.
    ranks = data_ranks[:, None] + model_ranks[None, :] - own
    is_grid = ranks.unique().numel() == ranks.numel()
    if not is_grid or ranks.min() < 0 or ranks.max() >= dist.get_world_size():
        raise _not_orthogonal(data, model, f"ranks {ranks.tolist()}")
    meshes = (data, model)
    return DeviceMesh.from_group(
        [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)],
        data.device_type,
        mesh=ranks.view(*data.shape, *model.shape).to(torch.int),
        mesh_dim_names=(
            *(data.mesh_dim_names or (DP_OUTER, DP_SHARD)[-data.ndim :]),
            *(model.mesh_dim_names or tuple(f"model_{axis}" for axis in range(model.ndim))),
        ),
    )


def _not_orthogonal(data: DeviceMesh, model: DeviceMesh, got: str) -> ValueError:
    return ValueError(
        expected(
            "a data mesh and a model mesh with this rank alone in common",
            got,
            where=f"data mesh {data}, model mesh {model}",
            hint="Slice both from one init_device_mesh(), by different axes",
        )
    )


def group_of_axes(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of ranks that differ from this one only on some axes of a mesh.

    They are numbered along the last axis first. With several axes the first use is collective over
    all ranks of the job.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    if len(axes) == mesh.ndim:
        return flat_group(mesh)
    assert mesh.mesh_dim_names is not None, "a mesh of data axes and model axes has names"
    names = tuple(mesh.mesh_dim_names[axis] for axis in axes)
    # torch refuses a slice of axes whose strides do not descend, such as a tp axis outside data.
    return flat_group(concatenate_meshes([mesh[name] for name in names]) or mesh[names])

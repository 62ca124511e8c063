"""Get the plain tensor of a parameter for a kernel, and fill a parameter from a whole draw.

Kernels of these layers never see a DTensor: they compute with this rank's part. This file
decides neither which part that is (mesh/model_part.py) nor who needs it (layer.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Partial

from megafsdp.mesh.dtensor import cut_dim
from megafsdp.mesh.model_part import ModelPart, part_of
from megafsdp.mesh.torch_private import local_of


def localized(weight: Tensor, *, sums_over_tp: bool = False) -> Tensor:
    """Return the plain local tensor of a parameter, for use by a kernel; local.

    Under the engine of this package the parameter is plain in forward and is returned itself. A
    DTensor, as under torch's ``fully_shard`` or without any, gives an alias of its local tensor,
    which allocates nothing; the gradient becomes a DTensor again. A local tensor of a subclass,
    such as a quantized weight, is returned itself, so that backward sees a refresh in place.

    Args:
        weight: The parameter, on one mesh axis at most.
        sums_over_tp: Whether each rank computes a part of the gradient only. It is then marked
            ``Partial``: torch's ``fully_shard`` sums it over tp, and its optimizers do.
    """
    # The class is compared first: asking torch whether something is a DTensor is a call in Python.
    if type(weight) is nn.Parameter or not isinstance(weight, DTensor):
        return weight
    grad_placements = [Partial()] if sums_over_tp else None
    if type(local_of(weight)) is Tensor:
        # torch makes an alias on purpose: a local tensor that is itself an output of autograd keeps
        # the last graph alive.
        return weight.to_local(grad_placements=grad_placements)
    result: Tensor = _LocalItself.apply(weight, grad_placements or weight.placements)
    return result


class _LocalItself(torch.autograd.Function):
    """A DTensor's local tensor object, whose gradient is a DTensor of the same mesh."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: DTensor, grad_placements: object) -> Tensor:
        ctx.grad_of = weight.device_mesh, grad_placements  # type: ignore[attr-defined]
        ctx.layout = weight.shape, weight.stride()  # type: ignore[attr-defined]
        return local_of(weight)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[DTensor, None]:
        mesh, placements = ctx.grad_of  # type: ignore[attr-defined]
        shape, stride = ctx.layout  # type: ignore[attr-defined]
        made = DTensor.from_local(
            grad, mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return made, None


@torch.no_grad()
def draw_whole(parameter: Tensor, part: ModelPart | None, fill: Callable[[Tensor], object]) -> None:
    """Fill a parameter with this rank's part of what ``fill`` writes to the whole tensor; local.

    Every rank draws all numbers, so the values do not depend on the degree, and equal random states
    stay equal. A draw by torch into its own DTensor would give every rank the same numbers.

    Args:
        parameter: Plain, or a DTensor. The last axis of its mesh is tp if there is a ``part``; the
            others are data axes.
        part: This rank's part by tp; None if tp is not an axis of the parameter.
        fill: Writes to a plain tensor in place.

    Allocates the whole tensor for a DTensor of torch's.
    """
    # Exactly torch's class: our sharded parameters take their rows of a whole draw by themselves.
    if type(parameter) is not DTensor:
        fill(parameter)
        return
    own, mesh = local_of(parameter), parameter.device_mesh
    whole = torch.empty(parameter.shape, dtype=own.dtype, device=own.device)
    fill(whole)
    kept = whole if part is None else part.cut(whole)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank has parameters on its own meshes only"
    # torch's fully_shard cuts the local part, by the axes in their order, as torch.chunk does.
    for axis in range(mesh.ndim - (part is not None)):
        dim = cut_dim(parameter.placements[axis])
        kept = part_of(tuple(kept.shape), dim, mesh.size(axis), coordinate[axis]).cut(kept)
    own.copy_(kept)

"""Norms of gradients, and counts of their zeros.

A gradient may be sharded, replicated or plain. Every element counts once: what is sharded is summed
over the ranks that divide it, what is replicated is not. :class:`GradParts` sorts them by these
ranks, in few tensors: where all gradients of a flat buffer are there, the buffer stands for them.

Sums are exact to fp32: squares are added in double, other powers in pieces short enough for fp32.
Gradients are read, never changed; clip.py scales them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.errors import expected
from megafsdp.fsdp.params.main_gradient import FlatGradient
from megafsdp.optimizer.kernels.square_sum import has_square_sum_kernel, known_square_sums

# Short pieces, summed on in double: one fp32 sum over 50 M elements is wrong by 4e-3.
_PIECE_NUMEL = 1 << 16


@torch.no_grad()
def total_norm(grads: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients taken as one vector.

    Collective: one small all-reduce for each process group among the gradients, which may be
    sharded, replicated or plain; called by all ranks alike.

    Args:
        grads: The gradients, each once.
        norm_type: Order of the norm, positive; ``math.inf`` for the largest absolute value.

    Returns:
        A 0-dim fp32 tensor, equal on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    return norms_of_parts([parts_of(grads)], norm_type, device_of(grads))[0]


@torch.no_grad()
def param_group_norms(optimizer: Optimizer, norm_type: float = 2.0) -> torch.Tensor:
    """Return the gradient norm of each of an optimizer's parameter groups, for logging.

    Collective: one small all-reduce for each process group among the gradients, whatever the number
    of parameter groups; called by all ranks alike.

    Args:
        optimizer: Any optimizer, before its ``zero_grad()``.
        norm_type: As of :func:`total_norm`.

    Returns:
        ``(parameter groups,)`` fp32, equal on all ranks; 0 for a group without gradients.
    """
    grads = [
        [p.grad for p in group["params"] if p.grad is not None] for group in optimizer.param_groups
    ]
    device = device_of([grad for own in grads for grad in own])
    return norms_of_parts([parts_of(own) for own in grads], norm_type, device)


@torch.no_grad()
def num_zero_grads(parameters: nn.Module | Iterable[torch.Tensor]) -> torch.Tensor:
    """Return how many elements of all gradients are zero, for logging.

    Each element of a sharded or replicated gradient counts once. Parameters without a gradient do
    not count. Collective as :func:`total_norm`.

    Returns:
        A 0-dim int64 tensor, equal on all ranks.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.zeros((), dtype=torch.int64, device=device_of(grads))
    # Without joining: the gaps of a flat buffer are zeros of no gradient.
    for part in parts_of(grads, joins_buffers=False):
        zeros = (tensor.numel() - tensor.count_nonzero() for tensor in part.tensors)
        # A rank without elements must enter the all-reduce below too.
        own = sum((count.to(total.device) for count in zeros), total * 0)
        if part.group is not None:
            all_reduce(own, group=part.group, label="zero gradients")
        total += own
    return total


@dataclass(frozen=True, slots=True)
class GradParts:
    """Gradients divided among the same ranks.

    Attributes:
        group: The ranks; None if each rank has all elements.
        tensors: This rank's elements, in tensors of any shape; none is empty. They alias the
            gradients.
        gaps: Views of those elements in them that are no gradient's; they are zero and must be.
    """

    group: dist.ProcessGroup | None
    tensors: list[torch.Tensor]
    gaps: list[torch.Tensor]


def parts_of(grads: Iterable[torch.Tensor], *, joins_buffers: bool = True) -> list[GradParts]:
    """Find the parts of gradients, the same number of them on all ranks; local.

    Args:
        grads: The gradients, each once.
        joins_buffers: Let a flat buffer with its gaps stand for its gradients.

    Raises:
        NotImplementedError: A DTensor is sharded over several axes, or partial.
    """
    # By buffer and index: a gradient given twice counts twice, the second time by itself.
    flat: dict[DBuffer, dict[int, torch.Tensor]] = {}
    singles: list[torch.Tensor] = []
    for grad in grads:
        if not (joins_buffers and isinstance(grad, FlatGradient)):
            singles.append(grad)
            continue
        known = flat.setdefault(grad.buffer, {})
        if grad.index in known:
            singles.append(grad)
        else:
            known[grad.index] = grad
    parts: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    gaps: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    groups = _Groups()
    for buffer, by_index in flat.items():
        first, *others = by_index.values()
        # Without some of its gradients the buffer has elements that must not count.
        if 1 + len(others) < len(buffer.layout.slots):
            singles += [first, *others]
        else:
            parts.setdefault(groups.of(first), []).append(buffer.flat)
            # A caller that has scaled the buffer by NaN must zero the gaps again.
            gaps.setdefault(groups.of(first), []).extend(buffer.gaps)
    for grad in singles:
        parts.setdefault(groups.of(grad), []).append(local_tensor(grad))
    return [
        GradParts(group, [t for t in tensors if t.numel()], gaps.get(group, []))
        for group, tensors in parts.items()
    ]


class _Groups:
    """Look up process groups, each once: gradients lie in few ways and a lookup is slow."""

    def __init__(self) -> None:
        self._known: dict[object, dist.ProcessGroup | None] = {}

    def of(self, grad: torch.Tensor) -> dist.ProcessGroup | None:
        if not isinstance(grad, DTensor):
            return None
        # The mesh by identity: comparing two meshes compares their ranks.
        way = (type(grad), id(grad.device_mesh), grad.placements)
        if way not in self._known:
            self._known[way] = _dividing_ranks(grad)
        return self._known[way]


def _dividing_ranks(grad: DTensor) -> dist.ProcessGroup | None:
    # Under HFSDP rows are divided over two mesh axes, which have one group together.
    if isinstance(grad, UnevenDTensor):
        return grad.shard_group
    sharded = [axis for axis, p in enumerate(grad.placements) if not p.is_replicate()]
    if not sharded:
        return None
    if len(sharded) > 1 or grad.placements[sharded[0]].is_partial():
        raise NotImplementedError(
            expected(
                "gradients sharded over one mesh axis",
                f"placements {grad.placements}",
                where="the norm of gradients",
                hint="Use torch.nn.utils.clip_grad_norm_ for these parameters",
            )
        )
    return grad.device_mesh.get_group(sharded[0])


def device_of(grads: Sequence[torch.Tensor]) -> torch.device:
    """Return where gradients are; the CPU if there are none."""
    return grads[0].device if grads else torch.device("cpu")


def norms_of_parts(
    vectors: Sequence[Sequence[GradParts]], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the norm of each vector, ``(vectors,)`` fp32, each in parts; collective.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if norm_type <= 0:
        raise ValueError(
            expected(
                "a positive order",
                norm_type,
                where="the norm_type of clip_grad_norm_()",
                hint="Use 2.0, or math.inf for the largest absolute value",
            )
        )
    is_max = norm_type == math.inf
    # One collective for each group, in the order of the first gradient, which all ranks share.
    groups = dict.fromkeys(part.group for parts in vectors for part in parts)
    total = torch.zeros(len(vectors), dtype=torch.float64, device=device)
    for group in groups:
        own = torch.zeros_like(total)
        for i, parts in enumerate(vectors):
            tensors = [t for part in parts if part.group is group for t in part.tensors]
            for near in by_device(tensors):
                power = _local_power(near, norm_type).to(device)
                own[i] = torch.maximum(own[i], power) if is_max else own[i] + power
        if group is not None:
            all_reduce(own, op="max" if is_max else "sum", group=group, label="grad norm")
        total = torch.maximum(total, own) if is_max else total + own
    return (total if is_max else total.pow(1.0 / norm_type)).float()


def by_device(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide tensors by where they are: parameters of some units may live on the host."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())


def _local_power(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return this rank's sum of p-th powers, or its largest absolute value, in fp64."""
    if norm_type == 2.0 and all(map(has_square_sum_kernel, tensors)):
        # The kernels add in double, in an order fixed by positions: the same bits always.
        return known_square_sums(tensors).sum()
    # torch returns a norm in the dtype of its input, where fp16 would overflow.
    pieces = [piece for t in tensors for piece in t.reshape(-1).float().split(_PIECE_NUMEL)]
    norms = torch.stack(torch._foreach_norm(pieces, norm_type)).double()
    return norms.max() if norm_type == math.inf else norms.pow(norm_type).sum()

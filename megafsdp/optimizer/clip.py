"""The norm of all gradients, and clipping by it.

Every element counts once: shards are summed over the ranks that hold them, replicated ones are not.
Norms go by the rows of tensors, in pieces short enough for an fp32 sum to be exact to 1e-7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp.buffer.collectives import all_reduce
from megafsdp.buffer.uneven import UnevenDTensor, local_tensor
from megafsdp.errors import expected

_PIECE_NUMEL = 1 << 16  # A plain fp32 running sum over 50 M elements is wrong by 4e-3.
_EPSILON = 1e-6


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; return the norm before.

    The signature and the coefficient ``max_norm / (norm + 1e-6)`` are those of
    ``torch.nn.utils.clip_grad_norm_``. Collective: one small all-reduce for each process group
    among the gradients, which may be sharded, replicated or plain; called by all ranks alike.

    Args:
        parameters: A module, a tensor, or tensors with ``.grad``.
        max_norm: The largest norm allowed.
        norm_type: Order of the norm, positive; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: Raise instead of scaling by a NaN or infinite norm.

    Returns:
        The norm over all ranks, a 0-dim fp32 tensor, equal on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set; on all ranks.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(grads, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            expected(
                "a finite gradient norm",
                float(norm),
                where="clip_grad_norm_()",
                mend="Look for the first parameter whose gradient is not finite, or skip the step",
            )
        )
    locals_ = [local for local in (local_tensor(g) for g in grads) if local.numel()]
    if locals_:
        torch._foreach_mul_(locals_, clip_coefficient(norm, max_norm).to(locals_[0].device))
    return norm


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that clips gradients of this norm, a 0-dim tensor; local."""
    return (max_norm / (norm + _EPSILON)).clamp(max=1.0)


@torch.no_grad()
def total_norm(grads: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients taken as one vector; collective as :func:`clip_grad_norm_`.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if norm_type <= 0:
        raise ValueError(
            expected(
                "a positive order",
                norm_type,
                where="the norm_type of clip_grad_norm_()",
                mend="Use 2.0, or math.inf for the largest absolute value",
            )
        )
    by_group: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    device = torch.device("cpu")
    # Gradients of a model lie in few ways on few meshes, and finding a mesh's group takes long.
    groups: dict[object, dist.ProcessGroup | None] = {}
    for grad in grads:
        device = grad.device
        way: object = None
        if isinstance(grad, DTensor):
            way = (type(grad), id(grad.device_mesh), grad.placements)
        if way not in groups:
            groups[way] = _shard_group(grad)
        by_group.setdefault(groups[way], []).append(local_tensor(grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for group, locals_ in by_group.items():
        part = _local_power(locals_, norm_type, device)
        if group is not None:
            op = "max" if norm_type == math.inf else "sum"
            all_reduce(part, op=op, group=group, label="grad norm")
        total = torch.maximum(total, part) if norm_type == math.inf else total + part
    return total if norm_type == math.inf else total.pow(1.0 / norm_type)


def _shard_group(grad: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks among which a gradient is divided; None if every rank holds all of it.

    Raises:
        NotImplementedError: A DTensor is sharded over several axes, or partial.
    """
    if not isinstance(grad, DTensor):
        return None
    if isinstance(grad, UnevenDTensor):
        return grad.dividing_ranks
    sharded = [axis for axis, p in enumerate(grad.placements) if not p.is_replicate()]
    if not sharded:
        return None
    if len(sharded) > 1 or grad.placements[sharded[0]].is_partial():
        raise NotImplementedError(
            expected(
                "gradients sharded over one mesh axis",
                f"placements {grad.placements}",
                where="clip_grad_norm_()",
                mend="Use torch.nn.utils.clip_grad_norm_ for these parameters",
            )
        )
    return grad.device_mesh.get_group(sharded[0])


def _local_power(
    tensors: list[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return this rank's sum of p-th powers, or its largest absolute value, in fp32."""
    pieces = [
        piece for t in tensors if t.numel() for piece in t.reshape(-1).float().split(_PIECE_NUMEL)
    ]
    if not pieces:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch.stack(torch._foreach_norm(pieces, norm_type))
    return norms.max() if norm_type == math.inf else norms.pow(norm_type).sum()

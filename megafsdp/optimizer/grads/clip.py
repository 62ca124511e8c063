"""Clipping: gradients scaled in place, or the factor by which a step scales them.

Both use the norm of all gradients (norms.py) and one formula for the coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megafsdp.device.torch_private import without_dynamo
from megafsdp.errors import expected
from megafsdp.fsdp.runtime.unit import hidden_parameters
from megafsdp.optimizer.grads.norms import (
    by_device,
    device_of,
    grads_of,
    norms_of_parts,
    parts_of,
    total_norm,
)

# torch's, and Megatron-LM's: the coefficient of a zero norm stays finite.
_EPSILON = 1e-6


@without_dynamo
@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; return the old norm.

    The signature and the coefficient ``max_norm / (norm + 1e-6)`` are those of
    ``torch.nn.utils.clip_grad_norm_``. Collective: one small all-reduce for each process group
    among the gradients, which may be sharded, replicated or plain; called by all ranks alike.

    Args:
        parameters: A module, a tensor, or tensors with ``.grad``. A module may show unsharded
            parameters, as after ``unshard()``: the gradients of its sharded ones are used.
        max_norm: The largest norm allowed.
        norm_type: Order of the norm, positive; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: Raise instead of scaling by a NaN or infinite norm.
        foreach: Ignored, for compatibility with torch: multi-tensor kernels are always used.

    Returns:
        The norm over all ranks, a 0-dim fp32 tensor, equal on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set; on all ranks.
    """
    if isinstance(parameters, nn.Module):
        hidden = hidden_parameters(parameters)
        parameters = [hidden.get(id(each), each) for each in parameters.parameters()]
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    grads = grads_of(parameters)
    parts = parts_of(grads)
    norm = norms_of_parts([parts], float(norm_type), device_of(grads))[0]
    # Only on request, as it waits for the device. All ranks have the same norm, so all raise.
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            expected(
                "a finite gradient norm",
                float(norm),
                where="clip_grad_norm_()",
                hint="Look for the first parameter whose gradient is not finite, or skip the step",
            )
        )
    # Multiply even by 1: the host would have to wait to see that it is 1.
    coefficient = clip_coefficient(norm, max_norm)
    for near in by_device([tensor for part in parts for tensor in part.tensors]):
        torch._foreach_mul_(near, coefficient.to(near[0].device))
    # A NaN factor makes gaps NaN too; they would stay so after the user has repaired gradients.
    for gaps in by_device([gap for part in parts for gap in part.gaps]):
        torch._foreach_zero_(gaps)
    return norm


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that clips gradients of this norm, a 0-dim tensor; local."""
    return (max_norm / (norm + _EPSILON)).clamp(max=1.0)


class GradientFactor(NamedTuple):
    """The factor by which a step multiplies gradients.

    Attributes:
        scale: Unscaling times clipping, 0-dim fp64.
        norm: Norm of the unscaled gradients, 0-dim fp32; None without a limit.
    """

    scale: torch.Tensor
    norm: torch.Tensor | None


def gradient_factor(
    grads: Sequence[torch.Tensor],
    norm: torch.Tensor | None,
    max_norm: float | None,
    loss_scale: torch.Tensor | None,
) -> GradientFactor:
    """Return the factor that unscales and clips gradients, on their device.

    Collective as :func:`clip_grad_norm_` if there is a limit but no norm, else local.

    Args:
        grads: The gradients, each once.
        norm: Norm of the gradients as they are (scaled), 0-dim fp32; None if not yet measured.
        max_norm: The largest norm of unscaled gradients; None does not clip.
        loss_scale: The factor on the loss; None for 1.
    """
    # In fp64: it is rounded to fp32 once, for the kernel.
    device = device_of(grads)
    scale = torch.ones((), dtype=torch.float64, device=device)
    if loss_scale is not None:
        # A scale on the host enters the kernel as a number; to copy it would take a wait.
        scale /= loss_scale
    if max_norm is None:
        return GradientFactor(scale, None)
    norm = ((total_norm(grads) if norm is None else norm) * scale).float()
    # An infinite norm under an infinite limit would give NaN (inf / inf).
    if max_norm < math.inf:
        scale *= clip_coefficient(norm, max_norm)
    return GradientFactor(scale, norm)

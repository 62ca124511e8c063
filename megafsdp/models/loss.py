"""Cross entropy of next-token logits, with as little memory as its gradient allows.

The plain composition (cast to fp32, log-softmax, pick, average) keeps an fp32 copy of the logits
for backward and makes two more there. With a vocabulary of 150,000 these dwarf the layers. Here
the one gradient that must exist is written, and the arithmetic is fp32 on blocks:

    definition   blocks of rows, in torch    forward saves the logits as they came and one number a
                                             token; backward writes the gradient
    Triton       a row a program, on CUDA    forward writes the gradient, in place of the logits if
                                             the caller allows that; backward scales it

Shape suffixes: B batch, T sequence, N = B * T rows, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megafsdp.errors import expected

_LOGGER = logging.getLogger("megafsdp.models")

# One fp32 block of 512 MiB, ten a step of 8k tokens over 150k words: some twenty kernels a block
# are then nothing beside their bytes. On a CPU 2 MiB, which stay in its caches.
_BLOCK_NUMEL = 2**27
_BLOCK_NUMEL_ON_CPU = 2**19
# Not fp16: the gradient would underflow before the loss scale, which comes with backward.
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def masked_cross_entropy(
    logits_BTV: Tensor,
    labels_BT: Tensor,
    loss_mask_BT: Tensor | None = None,
    *,
    may_overwrite_logits: bool = False,
) -> Tensor:
    """Average the negative log-likelihood of the labels over the unmasked tokens.

    Args:
        logits_BTV: Scores, any floating dtype.
        labels_BT: Token ids; must be valid ids at masked places too.
        loss_mask_BT: 1 where a token counts and 0 where it does not; None counts all.
        may_overwrite_logits: Let the gradient take the logits' memory: nobody reads them again.
            Has an effect on CUDA, with fp32 or bf16 logits, where triton is installed.

    Returns:
        A scalar in fp32; 0 if no token counts. Allocates one number a token, and a gradient of the
        logits' own dtype unless it may overwrite them; without triton also a block, 512 MiB on
        CUDA.
    """
    labels_N = labels_BT.reshape(-1)
    if loss_mask_BT is None:
        weights_N = torch.full(labels_N.shape, 1.0 / labels_N.numel(), device=labels_N.device)
    else:
        # A policy that casts the inputs may hand over the mask in bf16, which cannot count past
        # 256.
        mask_N = loss_mask_BT.reshape(-1).float()
        weights_N = mask_N / mask_N.sum().clamp(min=1.0)
    logits_NV = logits_BTV.flatten(0, -2)
    kernels = _kernels_for(logits_NV)
    if kernels is None:
        return _WeightedCrossEntropy.apply(logits_NV, labels_N, weights_N)
    # A copy made by flatten() or contiguous() is ours anyway.
    is_copy = not logits_NV.is_contiguous() or logits_NV.data_ptr() != logits_BTV.data_ptr()
    return _FusedCrossEntropy.apply(
        logits_NV.contiguous(), labels_N, weights_N, kernels, may_overwrite_logits or is_copy
    )


def _kernels_for(logits_NV: Tensor) -> ModuleType | None:
    """Return the module of the kernels if they can take these logits."""
    # A compiler has a fusion of its own, and cannot see what a kernel overwrites.
    is_taken = (
        logits_NV.is_cuda
        and logits_NV.dtype in _KERNEL_DTYPES
        and not torch.compiler.is_compiling()
    )
    return _kernels() if is_taken else None


@functools.cache
def _kernels() -> ModuleType | None:
    """Return the module of the kernels; None, with one warning, where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        _LOGGER.warning(
            expected(
                "triton, for the loss and its gradient in one kernel",
                "no such package",
                where="masked_cross_entropy() on CUDA; blocks in torch run instead, which move the"
                " logits about ten times as often, and take 512 MiB",
                hint="Install triton",
            )
        )
        return None
    # Not at the top: it takes a second, and is needed on CUDA alone.
    import megafsdp.models.loss_kernel as loss_kernel

    return loss_kernel


class _FusedCrossEntropy(torch.autograd.Function):
    """As :class:`_WeightedCrossEntropy`, with the gradient written in forward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits_NV: Tensor,
        labels_N: Tensor,
        weights_N: Tensor,
        kernels: ModuleType,
        may_overwrite_logits: bool,
    ) -> Tensor:
        grads_NV = None
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            grads_NV = logits_NV if may_overwrite_logits else torch.empty_like(logits_NV)
        losses_N: Tensor = kernels.score_rows(logits_NV, labels_N, weights_N, grads_NV)
        if grads_NV is not None:
            # Kernels write by address. Autograd must see it, if an operator has saved the logits.
            torch.autograd.graph.increment_version(grads_NV)
            ctx.save_for_backward(grads_NV)
            ctx.kernels = kernels  # type: ignore[attr-defined]
        return torch.dot(losses_N, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grads_NV,) = ctx.saved_tensors  # type: ignore[attr-defined]
        ctx.kernels.scale_in_place(grads_NV, grad_loss)  # type: ignore[attr-defined]
        # A second backward through this graph would scale again: autograd refuses it by the count.
        torch.autograd.graph.increment_version(grads_NV)
        return grads_NV, None, None, None, None


class _WeightedCrossEntropy(torch.autograd.Function):
    """Sum of row weight times negative log-likelihood, differentiable once, in the logits only."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        losses_N = torch.empty_like(weights_N)
        log_sums_N = torch.empty_like(weights_N)
        for rows in _blocks(logits_NV):
            scores = logits_NV[rows].float()
            log_sums_N[rows] = scores.logsumexp(dim=-1)
            losses_N[rows] = log_sums_N[rows] - scores.gather(1, labels_N[rows, None]).squeeze(1)
        ctx.save_for_backward(logits_NV, labels_N, weights_N, log_sums_N)
        return torch.dot(losses_N, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, labels_N, weights_N, log_sums_N = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_logits_NV = torch.empty_like(logits_NV)
        scales_N = weights_N * grad_loss
        for rows in _blocks(logits_NV):
            # Softmax minus one-hot, scaled by the row's weight.
            grad = (logits_NV[rows] - log_sums_N[rows, None]).exp_()
            picked = labels_N[rows, None]
            grad.scatter_(1, picked, grad.gather(1, picked) - 1.0).mul_(scales_N[rows, None])
            grad_logits_NV[rows] = grad
        return grad_logits_NV, None, None


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    num_rows, num_columns = logits_NV.shape
    block_numel = _BLOCK_NUMEL_ON_CPU if logits_NV.device.type == "cpu" else _BLOCK_NUMEL
    block_rows = max(1, block_numel // num_columns)
    for start in range(0, num_rows, block_rows):
        yield slice(start, start + block_rows)

"""Cross entropy of next-token logits, with as little memory as its gradient allows.

The plain composition (cast to fp32, log-softmax, pick, average) keeps an fp32 copy of the logits
for backward and makes two more there. With a vocabulary of 150,000 these dwarf the layers. Here
only the gradient, which must exist, is written, and the arithmetic is fp32 on blocks:

    definition   blocks of rows, in torch    megafsdp/parallel/loss.py: forward saves the logits as
                                             they came and one number a token; backward writes the
                                             gradient; the only form with tp, which cuts columns
    Triton       a row a program, on CUDA    forward writes the gradient, in place of the logits if
                                             the caller allows that; backward scales it

Shape suffixes: B batch, T sequence, N = B * T rows, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megafsdp.device.autograd import check_no_second_backward
from megafsdp.errors import expected
from megafsdp.parallel import cross_entropy

_LOGGER = logging.getLogger("megafsdp.models")

# Not fp16: the gradient would underflow before the loss scale, which comes with backward.
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def masked_cross_entropy(
    logits_BTV: Tensor,
    labels_BT: Tensor,
    loss_mask_BT: Tensor | None = None,
    *,
    num_counted: Tensor | None = None,
    may_overwrite_logits: bool = False,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Average the negative log-likelihood of the labels over the unmasked tokens.

    Differentiable once: a backward with ``create_graph=True`` raises ``NotImplementedError``.

    Args:
        logits_BTV: Scores, any floating dtype.
        labels_BT: Token ids; must be valid ids at masked places too.
        loss_mask_BT: 1 where a token counts and 0 where it does not; None counts all.
        num_counted: The divisor of the sum, a 0-dim tensor, if these are only a part of the tokens;
            None divides by the number of unmasked tokens here.
        may_overwrite_logits: Let the gradient take the logits' memory: they are not read again.
            Has an effect on CUDA, with fp32 or bf16 logits, where triton is installed.
        tp_group: Ranks that have the other columns of the vocabulary; None if ``logits_BTV`` has
            all. With it the call is collective, and the definition in torch runs.

    Returns:
        A scalar in fp32 (fp64 for fp64 logits); 0 if no token counts. Allocates one number a
        token, and a gradient of the logits' own dtype unless it may overwrite them; without triton
        also a block, 512 MiB on CUDA.
    """
    labels_N = labels_BT.reshape(-1)
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    if loss_mask_BT is None:
        mask_N = labels_N.new_ones(labels_N.shape, dtype=dtype)
    else:
        # A policy that casts the inputs may hand over the mask in bf16, which cannot count past
        # 256.
        mask_N = loss_mask_BT.reshape(-1).to(dtype)
    weights_N = mask_N / (mask_N.sum() if num_counted is None else num_counted).clamp(min=1.0)
    logits_NV = logits_BTV.flatten(0, -2)
    kernels = None if tp_group is not None else _kernels_for(logits_NV)
    if kernels is None:
        return cross_entropy(logits_NV, labels_N, weights_N, tp_group)
    # A copy made by flatten() or contiguous() may be overwritten in any case.
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
    # Imported here: it takes a second, and is needed only on CUDA.
    import megafsdp.models.loss_kernel as loss_kernel

    return loss_kernel


class _FusedCrossEntropy(torch.autograd.Function):
    """Like :func:`cross_entropy`, with the gradient written in forward."""

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
            # Kernels write by address: tell autograd, in case an operator has saved the logits.
            torch.autograd.graph.increment_version(grads_NV)
            ctx.save_for_backward(grads_NV)
            ctx.kernels = kernels  # type: ignore[attr-defined]
        return torch.dot(losses_N, weights_N)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        check_no_second_backward(
            where="backward of the cross entropy",
            hint="Take torch.nn.functional.cross_entropy() of the logits",
        )
        (grads_NV,) = ctx.saved_tensors  # type: ignore[attr-defined]
        ctx.kernels.scale_in_place(grads_NV, grad_loss)  # type: ignore[attr-defined]
        # A second backward through this graph would scale again; the version makes autograd refuse.
        torch.autograd.graph.increment_version(grads_NV)
        return grads_NV, None, None, None, None

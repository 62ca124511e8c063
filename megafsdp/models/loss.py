"""Cross entropy of next-token logits, with as little memory as its gradient allows.

The plain composition (cast to fp32, log-softmax, pick, average) keeps an fp32 copy of the logits
for backward and makes two more there. With a vocabulary of 150,000 these dwarf the layers. Here
forward saves the logits as they came and one number a token, and backward writes the one gradient
that must exist; the arithmetic is fp32 on blocks of rows.

Shape suffixes: B batch, T sequence, N = B * T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# One fp32 block of 512 MiB, ten a step of 8k tokens over 150k words: some twenty kernels a block
# are then nothing beside their bytes. On a CPU 2 MiB, which stay in its caches.
_BLOCK_NUMEL = 2**27
_BLOCK_NUMEL_ON_CPU = 2**19


def masked_cross_entropy(
    logits_BTV: Tensor, labels_BT: Tensor, loss_mask_BT: Tensor | None = None
) -> Tensor:
    """Average the negative log-likelihood of the labels over the unmasked tokens.

    Args:
        logits_BTV: Scores, any floating dtype.
        labels_BT: Token ids; must be valid ids at masked places too.
        loss_mask_BT: 1 where a token counts and 0 where it does not; None counts all.

    Returns:
        A scalar in fp32; 0 if no token counts. Allocates, beside 16 MiB blocks, one number a token
        in forward and a gradient of the logits' own dtype in backward.
    """
    labels_N = labels_BT.reshape(-1)
    if loss_mask_BT is None:
        weights_N = torch.full(labels_N.shape, 1.0 / labels_N.numel(), device=labels_N.device)
    else:
        # A policy that casts the inputs may hand over the mask in bf16, which cannot count past
        # 256.
        mask_N = loss_mask_BT.reshape(-1).float()
        weights_N = mask_N / mask_N.sum().clamp(min=1.0)
    return _WeightedCrossEntropy.apply(logits_BTV.flatten(0, -2), labels_N, weights_N)


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

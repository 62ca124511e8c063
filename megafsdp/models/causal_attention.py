"""Causal attention by torch's kernels, in the dtype in which they are fast.

Shape suffixes: B batch, T sequence, N query heads, G query groups, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this length torch's CPU kernels (2.13) spend more time on bf16 than on fp32.
_LONGEST_IN_FP32 = 256


def causal_attention(q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Let every query attend to the keys at its place and before it.

    On a CPU, fp16 of any length and bf16 of up to 256 tokens are computed in fp32, which saves fp32
    copies of the inputs for backward.

    Args:
        q_BNTD: Queries.
        k_BGTD: Keys; G divides N, and each serves N / G successive heads.
        v_BGTD: Values.

    Returns:
        (B, N, T, D) in the dtype of the queries.
    """
    dtype = q_BNTD.dtype
    if _is_faster_in_fp32(q_BNTD):
        q_BNTD, k_BGTD, v_BGTD = q_BNTD.float(), k_BGTD.float(), v_BGTD.float()
    is_grouped = q_BNTD.shape[1] != k_BGTD.shape[1]
    context_BNTD = F.scaled_dot_product_attention(
        q_BNTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=is_grouped
    )
    return context_BNTD.to(dtype)


def _is_faster_in_fp32(q_BNTD: Tensor) -> bool:
    if q_BNTD.device.type != "cpu":
        return False
    is_short = q_BNTD.shape[2] <= _LONGEST_IN_FP32
    return q_BNTD.dtype == torch.float16 or (q_BNTD.dtype == torch.bfloat16 and is_short)

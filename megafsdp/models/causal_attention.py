"""Causal attention by torch's kernels, in the dtype in which they are fast.

Shape suffixes: B batch, T sequence, N query heads, G query groups, D head dim; S the keys that T
queries may see. With context parallelism T is this rank's part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megafsdp.device.torch_private import without_dynamo, without_modes
from megafsdp.parallel.context import own_chunks, whole_sequence

# Up to this length torch's CPU kernels (2.13) spend more time on bf16 than on fp32.
_LONGEST_IN_FP32 = 256


def causal_attention(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Let every query attend to the keys at its place and before it.

    On a CPU, fp16 of any length and bf16 of up to 256 tokens are computed in fp32, which saves fp32
    copies of the inputs for backward.

    Args:
        q_BNTD: Queries.
        k_BGTD: Keys; G divides N, and each serves N / G successive heads.
        v_BGTD: Values.
        cp_group: Ranks that have the other tokens, as :mod:`megafsdp.parallel.context` shares them
            out; None if all are here. The call is then collective over them, and each rank has the
            keys and values of the whole sequence meanwhile.

    Returns:
        (B, N, T, D) in the dtype of the queries.
    """
    if cp_group is not None:
        return _attend_across(q_BNTD, k_BGTD, v_BGTD, cp_group)
    return attend_to_end(q_BNTD, k_BGTD, v_BGTD)


# A compiled layer ends its graph here, as at every exchange.
@without_dynamo
def _attend_across(
    q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Have the queries of both chunks attend to the keys of the whole sequence before them."""
    both_BGTX = whole_sequence(torch.cat((k_BGTD, v_BGTD), dim=-1), group, dim=2)
    k_BGTD, v_BGTD = both_BGTX.split((k_BGTD.shape[-1], v_BGTD.shape[-1]), dim=-1)
    contexts_BNTD = []
    for chunk, queries_BNTD in zip(own_chunks(group), q_BNTD.chunk(2, dim=2), strict=True):
        num_seen = (chunk + 1) * queries_BNTD.shape[2]
        k_BGSD, v_BGSD = k_BGTD[:, :, :num_seen], v_BGTD[:, :, :num_seen]
        contexts_BNTD.append(attend_to_end(queries_BNTD, k_BGSD, v_BGSD))
    return torch.cat(contexts_BNTD, dim=2)


def attend_to_end(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
    """Let the last of T queries see all S keys, and each query before it one key less."""
    dtype = q_BNTD.dtype
    if _is_faster_in_fp32(q_BNTD):
        q_BNTD, k_BGSD, v_BGSD = q_BNTD.float(), k_BGSD.float(), v_BGSD.float()
    is_grouped = q_BNTD.shape[1] != k_BGSD.shape[1]
    num_queries, num_keys = q_BNTD.shape[2], k_BGSD.shape[2]
    mask = None
    if num_queries != num_keys:
        # Not at the top: it imports the compiler, which takes seconds.
        from torch.nn.attention.bias import causal_lower_right

        # No tensor of values: it tells torch which kernel to take.
        with without_modes():
            mask = causal_lower_right(num_queries, num_keys)
    context_BNTD = F.scaled_dot_product_attention(
        q_BNTD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )
    return context_BNTD.to(dtype)


def _is_faster_in_fp32(q_BNTD: Tensor) -> bool:
    if q_BNTD.device.type != "cpu":
        return False
    is_short = q_BNTD.shape[2] <= _LONGEST_IN_FP32
    return q_BNTD.dtype == torch.float16 or (q_BNTD.dtype == torch.bfloat16 and is_short)

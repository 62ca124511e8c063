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
from megafsdp.parallel.documents import Documents

# Up to this length torch's CPU kernels (2.13) spend more time on bf16 than on fp32.
_LONGEST_IN_FP32 = 256


def causal_attention(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    cp_group: dist.ProcessGroup | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Let every query attend to the keys at its place and before it.

    On a CPU, fp16 of any length and bf16 of up to 256 tokens are computed in fp32, which saves fp32
    copies of the inputs for backward.

    Args:
        q_BNTD: Queries.
        k_BGTD: Keys; G divides N, and each serves N / G successive heads.
        v_BGTD: Values.
        cp_group: Ranks that have the other tokens, as :mod:`megafsdp.parallel.context` shares them
            out; None if all are here. With it the call is collective, and each rank temporarily has
            the keys and values of the whole sequence.
        documents: Documents of the rows (with cp, of the whole sequence); queries attend only to
            keys of their own document. None for one document a row.

    Returns:
        (B, N, T, D) in the dtype of the queries.
    """
    if cp_group is not None:
        return _attend_across(q_BNTD, k_BGTD, v_BGTD, cp_group, documents)
    if documents is not None:
        return _attend_in_documents(q_BNTD, k_BGTD, v_BGTD, documents)
    return attend_to_end(q_BNTD, k_BGTD, v_BGTD)


# A compiled layer ends its graph here, as at every exchange.
@without_dynamo
def _attend_across(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    group: dist.ProcessGroup,
    documents: Documents | None,
) -> Tensor:
    """Let the queries of both chunks attend to all keys of the sequence up to their own place."""
    both_BGTX = whole_sequence(torch.cat((k_BGTD, v_BGTD), dim=-1), group, dim=2)
    k_BGTD, v_BGTD = both_BGTX.split((k_BGTD.shape[-1], v_BGTD.shape[-1]), dim=-1)
    contexts_BNTD = []
    for chunk, queries_BNTD in zip(own_chunks(group), q_BNTD.chunk(2, dim=2), strict=True):
        start = chunk * queries_BNTD.shape[2]
        stop = start + queries_BNTD.shape[2]
        if documents is not None:
            chunk_BNTD = _attend_in_documents(queries_BNTD, k_BGTD, v_BGTD, documents, start)
        else:
            chunk_BNTD = attend_to_end(queries_BNTD, k_BGTD[:, :, :stop], v_BGTD[:, :, :stop])
        contexts_BNTD.append(chunk_BNTD)
    return torch.cat(contexts_BNTD, dim=2)


# A compiled layer ends its graph here: other lengths would be another graph.
@without_dynamo
def _attend_in_documents(
    q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, documents: Documents, start: int = 0
) -> Tensor:
    """Let T successive tokens of S, the first at ``start``, attend within their documents."""
    num_rows, stop = q_BNTD.shape[0], start + q_BNTD.shape[2]
    documents.check(num_rows, k_BGSD.shape[2], where="the documents given to causal_attention()")
    queries, keys = documents.between(start, stop), documents.between(0, stop)
    by_row = [x.unbind() for x in (q_BNTD, k_BGSD[:, :, :stop], v_BGSD[:, :, :stop])]
    rows_NTD = []
    for of_row in zip(queries, keys, *by_row, strict=True):
        asked, seen, q_NTD, k_GSD, v_GSD = of_row
        pieces = zip(
            q_NTD.split(asked, dim=1),
            k_GSD.split(seen, dim=1),
            v_GSD.split(seen, dim=1),
            strict=True,
        )
        contexts_NTD = [
            attend_to_end(*(x.unsqueeze(0) for x in document)).squeeze(0)
            for document in pieces
            # Documents that end before the first query have no queries.
            if document[0].shape[1]
        ]
        rows_NTD.append(torch.cat(contexts_NTD, dim=1))
    return torch.stack(rows_NTD)


def attend_to_end(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
    """Let the last of T queries see all S keys, and each query before it one key less."""
    dtype = q_BNTD.dtype
    if _is_faster_in_fp32(q_BNTD):
        q_BNTD, k_BGSD, v_BGSD = q_BNTD.float(), k_BGSD.float(), v_BGSD.float()
    is_grouped = q_BNTD.shape[1] != k_BGSD.shape[1]
    num_queries, num_keys = q_BNTD.shape[2], k_BGSD.shape[2]
    mask = None
    if num_queries != num_keys:
        # Imported here, as it imports the compiler, which takes seconds.
        from torch.nn.attention.bias import causal_lower_right

        # Not a tensor of values: it tells torch which kernel to take.
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

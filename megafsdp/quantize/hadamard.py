"""The random Hadamard transform of 16 tokens: it spreads an outlier over its neighbours.

Both operands of a weight gradient are transformed along tokens, in blocks of 16, before they are
quantized. The transform is orthogonal, so in exact arithmetic it does not change their product:
``(H g)^T (H x) = g^T x``. A block is ``H = S D / 4``: ``D`` changes signs by a fixed vector, ``S``
is Sylvester's matrix of signs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafsdp._native import native_module

BLOCK = 16
_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def transform_tokens(values: Tensor) -> Tensor:
    """Transform a matrix along its rows, the tokens; fp32; allocates.

    Args:
        values: ``(tokens, features)`` of a float dtype. Tokens are padded with zeros to a multiple
            of 16; the result has the padded rows too, where they are no longer zero.

    Returns:
        ``(tokens rounded up to 16, features)``.
    """
    num_tokens, num_features = values.shape
    out_rows = num_tokens + -num_tokens % BLOCK
    module = native_module()
    is_native = type(values) is Tensor and values.device.type == "cpu"
    if module is not None and is_native and values.dtype in _DTYPE_NAMES and values.numel() > 0:
        out = torch.empty((out_rows, num_features), dtype=torch.float32, device="cpu")
        values = values.detach().contiguous()
        module.transform_rows(
            values=values.data_ptr(),
            dtype=_DTYPE_NAMES[values.dtype],
            num_rows=num_tokens,
            num_cols=num_features,
            out=out.data_ptr(),
            num_threads=torch.get_num_threads(),
        )
        return out
    padded = F.pad(values.float(), (0, 0, 0, out_rows - num_tokens))
    blocks = padded.view(-1, BLOCK, num_features)
    # Exact, as it only changes signs and divides by 4.
    signs = torch.tensor(_SIGNS, dtype=torch.float32, device=values.device) / 4
    blocks = blocks * signs[:, None]
    # Sums of pairs in a fixed order: in a product with the matrix, each library would add in its
    # own order, and devices would differ in the last bit.
    for distance in (1, 2, 4, 8):
        pairs = blocks.view(-1, BLOCK // (2 * distance), 2, distance, num_features)
        first, second = pairs.unbind(2)
        blocks = torch.stack((first + second, first - second), dim=2)
    return blocks.view(-1, num_features)

"""What the kernels take: dtypes by name, and checks of flat tensors and counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafsdp.errors import expected

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES}


def check_positive(name: str, number: int) -> None:
    """Check a count.

    Raises:
        ValueError: It is below 1.
    """
    if number < 1:
        raise ValueError(expected("a positive number", number, where=name, mend="Count from 1"))


def check_flat(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    *,
    numel: int,
    device: torch.device,
) -> None:
    """Check a buffer of a kernel.

    Args:
        name: Of the argument, for the message.
        tensor: The buffer.
        dtypes: Dtypes that it may have.
        numel: Elements that it must have.
        device: Where it must be.

    Raises:
        ValueError: It is not flat, contiguous, of this length, dtype and device.
    """
    is_right = (
        tensor.dtype in dtypes
        and tensor.dim() == 1
        and tensor.numel() == numel
        and tensor.is_contiguous()
        and tensor.device == device
    )
    if not is_right:
        raise ValueError(
            expected(
                f"a contiguous flat tensor of {numel} elements on {device}, of dtype "
                f"{' or '.join(str(dtype) for dtype in dtypes) or 'None'}",
                f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.device}, "
                f"{tensor.dtype}",
                where=f"{name} of AdamBuffers or sum_of_squares()",
                mend="Pass views of flat buffers with one element for each weight",
            )
        )

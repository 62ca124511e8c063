"""torch's defaults of device and dtype, as a program may set them for its own tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Set both, and bring back those that torch starts with."""
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)

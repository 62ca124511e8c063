"""The process group of a part that is one rank, and the model that several parts train."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.part import Size


@contextlib.contextmanager
def one_rank(size: Size) -> Iterator[torch.device]:
    """Be the only rank of a process group in this context; yields its device."""
    backend = size.either("cpu:gloo,cuda:nccl", "gloo")
    if not size.is_rehearsal:
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield torch.device(size.either("cuda:0", "cpu"))
        finally:
            dist.destroy_process_group()

"""What a launcher tells each process by its environment, for libraries that read it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def launcher_environment() -> Iterator[None]:
    """Set what torchrun sets, for the ranks of a pool, while the context is open."""
    before = dict(os.environ)
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    # No process connects to it: the process group is there.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        # accelerate has one state for all that uses it in a process.
        if state := sys.modules.get("accelerate.state"):
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()

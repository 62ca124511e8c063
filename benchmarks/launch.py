"""Start a function on several ranks and return what rank 0 returns."""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megafsdp.device.host_memory import keep_freed_memory

# Tests choose one that imports torch once for all launches.
START_METHOD = "spawn"


def launch(
    function: Callable[..., object], *args: object, num_ranks: int, shares_gpu: bool = False
) -> object:
    """Run ``function(*args)`` on ranks of a fresh process group, one thread each.

    NCCL with one rank a GPU if there are enough GPUs, else gloo on the CPU. There the C library
    keeps freed memory, as in training, so that no side's time depends on what lies at the end of
    the heap. Tensors on the host always go through gloo.

    Args:
        function: A module-level function.
        *args: Its arguments.
        num_ranks: Number of ranks.
        shares_gpu: Put all ranks on the first GPU, with gloo: NCCL refuses two ranks on one.

    Returns:
        Rank 0's value.

    Raises:
        Exception: A rank failed; its traceback is in the message.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(
            _run_rank,
            (num_ranks, shares_gpu, directory, function, args),
            nprocs=num_ranks,
            start_method=START_METHOD,
        )
        return pickle.loads(Path(directory, "value").read_bytes())


def device_type(num_ranks: int) -> str:
    """Return where the ranks of a launch compute."""
    return "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"


def _run_rank(
    rank: int,
    num_ranks: int,
    shares_gpu: bool,
    directory: str,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    # FSDP2 raises FutureWarning for names that it calls itself.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    is_cuda = not shares_gpu and device_type(num_ranks) == "cuda"
    if shares_gpu:
        torch.cuda.set_device(0)
    elif is_cuda:
        torch.cuda.set_device(rank)
    else:
        keep_freed_memory()
    store = f"file://{directory}/store"
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_ranks)
    try:
        value = function(*args)
        if rank == 0:
            Path(directory, "value").write_bytes(pickle.dumps(value))
    finally:
        dist.destroy_process_group()

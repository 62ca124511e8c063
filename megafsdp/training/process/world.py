"""The processes of a run: their number, their device, and their process group."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import barrier
from megafsdp.device.host_memory import keep_freed_memory
from megafsdp.errors import ConfigError, expected


@dataclass(frozen=True, slots=True)
class World:
    """Where this process stands among all of a run.

    Attributes:
        rank: This process.
        size: Number of processes.
        local_rank: This process among those of its machine.
        local_size: Number of processes on this machine.
        device: What it computes on.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Return whether this process prints and writes files."""
        return self.rank == 0


def find_world(device: str) -> World:
    """Read the world from the running process group, else from torchrun's environment; local.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: The environment names no rank of a world, CUDA is asked for and absent, or
            there are more local ranks than GPUs.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank, size = _launched()
    local_rank = launch_number("LOCAL_RANK", rank)
    local_size = launch_number("LOCAL_WORLD_SIZE", size)
    is_cuda = uses_cuda(device)
    if is_cuda and torch.cuda.device_count() < local_size:
        raise ConfigError(
            expected(
                f"a GPU for each of the {local_size} ranks of this machine",
                f"{torch.cuda.device_count()} GPUs",
                where="the training configuration, run.device",
                hint="Start one rank a GPU, or set run.device to cpu",
            )
        )
    where = torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")
    return World(rank, size, local_rank, local_size, where)


def uses_cuda(device: str) -> bool:
    """Return whether ranks compute on CUDA if ``run.device`` is ``auto``, ``cpu`` or ``cuda``."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def launch_number(name: str, default: int) -> int:
    """Read a number that a launcher has set in the environment; local.

    Args:
        name: The variable's.
        default: Its value where it is not set.

    Raises:
        ConfigError: It is no whole number of at least 0.
    """
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise _wrong_launch("a whole number of at least 0", repr(text), name)
    return int(text)


def _launched() -> tuple[int, int]:
    """Return this rank and the number of ranks as the environment has them."""
    rank, size = launch_number("RANK", 0), launch_number("WORLD_SIZE", 1)
    has_rank, has_size = "RANK" in os.environ, "WORLD_SIZE" in os.environ
    if has_rank and not has_size:
        raise _wrong_launch("WORLD_SIZE beside RANK", f"RANK {rank} alone", "RANK")
    # This process would train on the first rank's share, and no process on the other ranks'.
    if size > 1 and not has_rank:
        raise _wrong_launch("RANK beside WORLD_SIZE", f"WORLD_SIZE {size} alone", "WORLD_SIZE")
    if not rank < size:
        raise _wrong_launch("a RANK below WORLD_SIZE", f"{rank} of {size}", "RANK")
    return rank, size


def _wrong_launch(what: str, got: str, name: str) -> ConfigError:
    hint = f"Start the ranks with torchrun, or unset {name} to train in this process alone"
    return ConfigError(expected(what, got, where=f"the environment, {name}", hint=hint))


@contextlib.contextmanager
def process_group(world: World, *, timeout_s: float) -> Iterator[None]:
    """Keep a default process group open; one that is open already is used and left open.

    Collective over all ranks on entry, and on exit without an error. On CPU with several ranks a
    machine each gets one thread, unless OMP_NUM_THREADS is set: threads of ranks that share cores
    slow each other down many times over. There glibc keeps freed memory, unless its own variables
    are set.

    Raises:
        ConfigError: The environment names a rank and not where the ranks meet.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    else:
        keep_freed_memory()
        if world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
    if dist.is_initialized():
        yield
        return
    _init(world, datetime.timedelta(seconds=timeout_s))
    try:
        yield
        # Leaving while another rank still communicates would fail that rank.
        barrier()
    finally:
        dist.destroy_process_group()


def _init(world: World, timeout: datetime.timedelta) -> None:
    is_cuda = world.device.type == "cuda"
    # Small objects travel over gloo, so that they cost the GPU nothing.
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    device_id = world.device if is_cuda else None
    if "RANK" in os.environ:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise _wrong_launch(f"{name} beside RANK", "none", "RANK")
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        return
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id
    )

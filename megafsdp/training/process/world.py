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
from megafsdp.buffer.comm.trace import issued
from megafsdp.device.host_memory import keep_freed_memory
from megafsdp.errors import ConfigError, RankError, expected
from megafsdp.mesh.torch_private import high_priority_options
from megafsdp.training.process.hang_watch import MAX_NAMING_S, watching_for_hangs
from megafsdp.training.process.rendezvous import meet
from megafsdp.training.process.signals import ending_on_signals

# Set by torchrun to True or False.
_SERVED_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
# What gloo and NCCL say if the process at the other end of a connection has ended.
_LOST_RANK = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("remote process exit", "ncclRemoteError", "peer has closed"),
)


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
        name: Name of the variable.
        default: The number if it is not set.

    Raises:
        ConfigError: It is not a whole number of at least 0.
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

    Collective over all ranks on entry, and on exit without an error. Until the ranks have met,
    SIGTERM, SIGINT and SIGHUP end the process. Afterwards a thread looks for ranks that leave the
    others waiting, and ends all processes if there are any.

    On CPU with several ranks on a machine, each gets one thread, unless OMP_NUM_THREADS is set:
    threads of ranks that share cores slow each other down many times over. Also on CPU, glibc keeps
    freed memory, unless its own variables are set.

    Args:
        world: Where this process stands.
        timeout_s: How long ranks may wait for each other, to meet and in a collective.

    Raises:
        ConfigError: The environment names a rank but not where the ranks meet.
        RankError: Other ranks did not come, or one has ended.
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
    with ending_on_signals():
        store = _open_store(world, timeout_s)
        _init(world, store, timeout_s)
    try:
        with watching_for_hangs(store, rank=world.rank, world_size=world.size, timeout_s=timeout_s):
            yield
            # Leaving while another rank still communicates would fail that rank.
            barrier()
    except RuntimeError as error:
        if not any(words in str(error) for words in _LOST_RANK):
            raise
        raise _lost_rank(error) from error
    finally:
        dist.destroy_process_group()


def _lost_rank(error: RuntimeError) -> RankError:
    """Return one error for the many messages of libraries on a connection whose other end died."""
    kind, label = issued.recent[-1][2:] if issued.recent else ("the first collective", "")
    return RankError(
        expected(
            "all ranks to go on",
            f"the end of one ({str(error).splitlines()[0][-160:]})",
            where=f"{kind} of '{label}'" if label else kind,
            hint="Look for the first error, or the signal, of the other ranks: this error only"
            " followed. The same command goes on from the last checkpoint, and torchrun does so by"
            " itself with --max-restarts",
        )
    )


def _open_store(world: World, timeout_s: float) -> dist.Store:
    """Return the store where ranks of this start exchange addresses; collective over all ranks."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise _wrong_launch(f"{name} beside RANK", "none", "RANK")
    address, port = os.environ["MASTER_ADDR"], launch_number("MASTER_PORT", 0)
    # torchrun serves a store itself; ranks that something else has started meet at the first one.
    is_served = os.environ.get(_SERVED_VARIABLE) == "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            world.size,
            is_master=world.is_first and not is_served,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise RankError(
            expected(
                f"the store of the ranks at {address}:{port} within {timeout_s:g} s",
                f"{type(error).__name__}: {str(error).splitlines()[0]}",
                where=f"the rendezvous of rank {world.rank}, MASTER_ADDR and MASTER_PORT",
                hint="Start rank 0 too, or the launcher of the first machine, let the machines"
                " reach this port, or raise run.timeout_s",
            )
        ) from error
    return meet(store, rank=world.rank, world_size=world.size, timeout_s=timeout_s)


def _init(world: World, store: dist.Store, timeout_s: float) -> None:
    is_cuda = world.device.type == "cuda"
    # The watch names the ranks that others wait for. torch's own limit is for what it cannot see.
    timeout = datetime.timedelta(seconds=timeout_s + MAX_NAMING_S)
    dist.init_process_group(
        # Small objects travel over gloo, so that they cost the GPU nothing.
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=world.device if is_cuda else None,
        pg_options=high_priority_options(timeout) if is_cuda else None,
    )

"""Pools of memory that a communicator registers, on a stand-in backend and a stand-in device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megafsdp.buffer.comm import user_buffers
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.comm.user_buffers import (
    PlannedPool,
    RegisteredPool,
    registered_pools,
    why_not_registered,
)
from megafsdp.device.memory import ByteLedger, Category, FlatStorage, Slabs
from tests.ranks import Ranks

CPU = torch.device("cpu")


class Device:
    """A stand-in for torch.cuda and a backend, which notes what it is told."""

    mem_allocator = "the library's allocator"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_gone = False
        self.can_multicast = True

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return what was set."""
        return self.can_multicast

    def register_mem_pool(self, pool: str) -> None:
        """Note it."""
        self.events.append(f"register {pool}")

    def deregister_mem_pool(self, pool: str) -> None:
        """Note it; a communicator that is gone refuses, as torch's does."""
        if self.is_gone:
            raise dist.DistBackendError("NCCL communicator has not been initialized")
        self.events.append(f"deregister {pool}")

    def new_pool(self, allocator: str | None) -> str:
        """Stand in for torch.cuda.MemPool."""
        self.events.append(f"pool of {allocator or 'torch'}")
        return "pool"

    @contextlib.contextmanager
    def use_pool(self, pool: str, device: torch.device) -> Iterator[None]:
        """Stand in for torch.cuda.use_mem_pool."""
        self.events.append(f"begin {pool}")
        yield
        self.events.append(f"end {pool}")

    def synchronize(self, device: torch.device) -> None:
        """Note it."""
        self.events.append("synchronize")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Return a stand-in that RegisteredPool uses."""
    made = Device()
    monkeypatch.setattr(torch.cuda, "MemPool", made.new_pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", made.use_pool)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    empty = torch.empty

    def noted(*args: object, **kwargs: object) -> torch.Tensor:
        made.events.append(f"allocate {args[0]}")
        return empty(*args, **kwargs)

    monkeypatch.setattr(user_buffers.torch, "empty", noted)
    return made


def test_a_pool_is_registered_with_its_block_in_it(device: Device) -> None:
    """A registration covers what the pool contains by then, hence the block comes first."""
    RegisteredPool(device, CPU, 64)
    expected = ["pool of the library's allocator", "begin pool", "allocate 64", "end pool"]
    assert device.events[:5] == [*expected, "register pool"]


def test_without_the_librarys_memory_plain_memory_is_registered(device: Device) -> None:
    """Torch refuses NCCL's allocator where no switch can multicast."""
    device.can_multicast = False
    RegisteredPool(device, CPU, 64)
    assert device.events[0] == "pool of torch" and "register pool" in device.events


def test_storages_are_allocated_from_the_pool_which_goes_when_the_last_is_deleted(
    device: Device,
) -> None:
    """What was queued may use the memory: the device is waited for before it is deregistered."""
    ledger = ByteLedger()
    storages = [
        FlatStorage(4, torch.float32, device=CPU, ledger=ledger, category=Category.UNSHARDED)
        for _ in range(2)
    ]
    slabs = Slabs(
        16,
        max_slabs=1,
        new_pool=lambda nbytes: RegisteredPool(device, CPU, nbytes),
        ledger=ledger,
        category=Category.UNSHARDED,
    )
    device.events.clear()
    gc.disable()
    try:
        for storage in storages:
            storage.release()
            storage.slabs = slabs
            storage.allocate()
            storage.release()
        assert device.events.count("begin pool") == 3
        assert device.events.count("register pool") == 1
        device.events.clear()
        del slabs, storage
        storages.pop()
        assert device.events == []
        storages.pop()
        assert device.events == ["synchronize", "deregister pool"]
    finally:
        gc.enable()


def test_a_pool_may_outlive_its_communicator(device: Device) -> None:
    """destroy_process_group() before the model is deleted raises nothing."""
    pool = RegisteredPool(device, CPU, 64)
    device.is_gone = True
    device.events.clear()
    del pool
    assert device.events == ["synchronize"]


def _reasons() -> tuple[str | None, ...]:
    group = dist.group.WORLD
    kept = user_buffers.backends
    user_buffers.backends = lambda _: {"cpu": "nccl"}
    try:
        # What serves the group is gloo's, which registers no memory.
        old = why_not_registered(group, CPU)
    finally:
        user_buffers.backends = kept
    return why_not_registered(group, CPU), old, why_not_registered(group, torch.device("meta"))


def test_what_cannot_be_registered_is_named(ranks: Ranks) -> None:
    """Another backend, an older torch; a plan on the meta device needs neither."""
    ((other, old, planned),) = ranks(1).run(_reasons)
    assert other == "a process group of gloo on cpu"
    assert old == f"a backend of torch {torch.__version__} without register_mem_pool()"
    assert planned is None


def _opened() -> tuple[list[str], int, type]:
    device = Device()
    kept = user_buffers.backend_of
    user_buffers.backend_of = lambda *_: device
    try:
        with record_collectives() as record:
            new_pool = registered_pools(dist.group.WORLD, CPU)
    finally:
        user_buffers.backend_of = kept
    planned = registered_pools(dist.group.WORLD, torch.device("meta"))
    return list(record.calls), new_pool.func is RegisteredPool, type(planned(8))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_communicator_is_made_before_memory_is_registered(ranks: Ranks, num_ranks: int) -> None:
    """By a collective, on one rank too: torch refuses to register memory without one."""
    found = ranks(num_ranks).run(_opened)
    assert found == [(["all_reduce"], True, PlannedPool)] * num_ranks

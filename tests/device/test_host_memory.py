"""Host memory is handed out aligned and without overlap, pinned exactly, and given back."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megafsdp
from megafsdp.device import host_memory
from megafsdp.device.host_memory import HostArena, aligned_nbytes, host_bytes
from tests.device.stand_in_cudart import StandInCudart, is_mapped, stand_in

# Prints, of a process as it starts and of one that keeps freed memory, the answer and the page
# faults of blocks that are freed at once, each larger than any before: glibc by itself maps every
# one of them afresh. Tensors would bring small blocks of their own between them. Both processes are
# forked from one, which imports the file without the package: that takes seconds.
_FAULTS = """
import ctypes, os, resource, sys, types

sys.modules["megafsdp"] = package = types.ModuleType("megafsdp")
package.__path__ = [sys.argv[1]]
from megafsdp.device.host_memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for is_kept in (False, True):
    if os.fork() == 0:
        answer = is_kept and keep_freed_memory()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for mebibytes in range(1, 25):
            block = libc.malloc(mebibytes << 20)
            libc.memset(block, 1, mebibytes << 20)
            libc.free(block)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print(answer, faults, flush=True)
        os._exit(0)
    os.wait()
"""


def test_tensors_of_an_arena_lie_side_by_side() -> None:
    """Each begins at a multiple of 256 bytes; what does not fit lies elsewhere."""
    arena = HostArena(2 * aligned_nbytes(100 * 4), is_pinned=False)
    first, second = arena.take(100, torch.float32), arena.take(100, torch.float32)
    assert second.data_ptr() - first.data_ptr() == 512
    # The arena is rounded up to a huge page.
    rest = [arena.take(100_000, torch.int16) for _ in range(12)]
    for number, tensor in enumerate([first, second, *rest]):
        tensor.fill_(number)
    for number, tensor in enumerate([first, second, *rest]):
        assert (tensor == number).all()
    storages = {t.untyped_storage().data_ptr() for t in [first, second, *rest]}
    assert len(storages) > 1, "some did not fit"


def test_no_bytes_are_an_empty_tensor() -> None:
    """A rank may hold nothing; memory made in inference mode is written outside of it."""
    assert host_bytes(0, is_pinned=False).numel() == 0
    with torch.inference_mode():
        memory = host_bytes(8, is_pinned=False)
    memory.fill_(1)
    assert not memory.is_inference()


def _mapping_flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping around an address; none where it tells none."""
    smaps = Path("/proc/self/smaps")
    is_inside = False
    for line in smaps.read_text().splitlines() if smaps.exists() else []:
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_memory_that_lives_long_asks_for_huge_pages() -> None:
    """The kernel has noted it of the mapping (hg), and not of one that did not ask."""
    memory = host_bytes(1, is_pinned=False)
    flags = _mapping_flags(memory.data_ptr())
    if not flags:
        pytest.skip("the kernel shows no flags of mappings")
    assert "hg" in flags
    other = torch.frombuffer(mmap.mmap(-1, memory.nbytes), dtype=torch.uint8)
    assert "hg" not in _mapping_flags(other.data_ptr())


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> StandInCudart:
    """Pin by a stand-in."""
    return stand_in(monkeypatch)


_BEFORE = ["touch", "register"]
_AFTER = ["synchronize", "unregister"]


@pytest.mark.parametrize("nbytes", [1, 3000, (5 << 21) + 256])
def test_pinned_memory_is_locked_exactly_and_given_back(cudart: StandInCudart, nbytes: int) -> None:
    """Locked once its pages are there, and until the last alias has gone, then unmapped."""
    memory = host_bytes(nbytes, is_pinned=True)
    address = memory.data_ptr()
    assert memory.nbytes == nbytes and cudart.live == {address: nbytes}
    alias = memory[-1:].view(torch.int8)
    del memory
    assert cudart.calls == _BEFORE and is_mapped(address)
    alias.fill_(3)
    del alias
    assert cudart.calls == _BEFORE + _AFTER and not is_mapped(address) and not cudart.live


def test_a_slab_is_locked_at_once(cudart: StandInCudart) -> None:
    """One call for all tensors of an arena; none for an arena of no bytes."""
    arena = HostArena(2 * aligned_nbytes(100 * 4), is_pinned=True)
    taken = [arena.take(100, torch.float32) for _ in range(2)]
    assert list(cudart.live.values()) == [1024] and arena.pinned_nbytes == 1024
    del arena
    assert cudart.calls == _BEFORE, "tensors lie in it"
    taken.clear()
    assert cudart.calls == _BEFORE + _AFTER
    assert HostArena(0, is_pinned=True).pinned_nbytes == 0
    assert HostArena(512, is_pinned=False).pinned_nbytes == 0
    assert cudart.calls == _BEFORE + _AFTER


def test_memory_that_cannot_be_locked_is_an_error(
    cudart: StandInCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how many bytes, and how to do without; nothing is left mapped."""
    cudart.code, addresses = 2, list[int]()
    register = cudart.cudaHostRegister
    monkeypatch.setattr(
        cudart, "cudaHostRegister", lambda *a: (addresses.append(a[0]), register(*a))[1]
    )
    with pytest.raises(
        RuntimeError, match=r"4,096 bytes.*out of memory \(2\).*pin_cpu_params=False"
    ):
        host_bytes(4096, is_pinned=True)
    assert cudart.calls == _BEFORE
    assert addresses and not is_mapped(addresses[0])


def test_a_forked_process_leaves_pinned_memory_alone(cudart: StandInCudart) -> None:
    """It has no copy of the pages, and neither unlocks them nor unmaps what lies there."""
    memory = host_bytes(1 << 21, is_pinned=True)
    address = memory.data_ptr()
    flags = _mapping_flags(address)
    assert not flags or {"dc", "hg"} <= set(flags)
    child = os.fork()
    if child == 0:
        is_inherited = is_mapped(address)
        # Something else may lie there by now.
        other = mmap.mmap(-1, 1 << 21) if is_inherited else _map_at(address, 1 << 21)
        del memory
        os._exit(is_inherited or not is_mapped(address) or cudart.calls != _BEFORE or not other)
    assert os.waitpid(child, 0)[1] == 0
    assert cudart.live == {address: 1 << 21}


@pytest.mark.gpu
def test_cuda_takes_the_memory_for_pinned() -> None:
    """Its copies run beside the host and carry all bytes, also the last ones."""
    memory = host_bytes((3 << 21) + 5, is_pinned=True)
    assert memory.is_pinned() and memory[-1:].is_pinned()
    there = torch.arange(memory.numel(), device="cuda").to(torch.uint8)
    with torch.cuda.stream(torch.cuda.Stream()):
        there.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        memory.copy_(there, non_blocking=True)
        back = memory.to("cuda", non_blocking=True)
        # Freed while copies are under way, which must end first.
        address = memory.data_ptr()
        del memory
        assert not is_mapped(address)
        assert torch.equal(back, there)


def _map_at(address: int, nbytes: int) -> int:
    """Map memory where there is none; return its address."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_size_t
    numbers = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    libc.mmap.argtypes = (*numbers, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    return int(libc.mmap(address, nbytes, mmap.PROT_READ, flags, -1, 0))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept_for_the_next_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each block faults in afresh; the environment's settings win."""
    pages_of_all, pages_of_largest = (mebibytes << 8 for mebibytes in (sum(range(1, 25)), 24))
    printed = subprocess.run(
        [sys.executable, "-c", _FAULTS, megafsdp.__path__[0]],
        env={k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    (answer, faults), (answer_kept, faults_kept) = map(str.split, printed)
    assert answer == "False" and int(faults) > 0.9 * pages_of_all
    assert answer_kept == "True" and int(faults_kept) < 2 * pages_of_largest
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    assert not host_memory.keep_freed_memory()

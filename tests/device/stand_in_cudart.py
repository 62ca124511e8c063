"""A stand-in for what pinning calls of CUDA: it notes the calls, and looks at the memory."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megafsdp.device import host_memory, host_threads


def is_mapped(address: int) -> bool:
    """Return whether this process has memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, stop = line.split()[0].split("-")
        if int(first, 16) <= address < int(stop, 16):
            return True
    return False


@dataclass
class StandInCudart:
    """Registers memory in a table.

    Attributes:
        calls: Names of the calls in order: touch, register, synchronize, unregister.
        live: Bytes registered, by address.
        code: What the next registrations return; 0 is success.
    """

    calls: list[str] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    code: int = 0

    def touch(self, memory: torch.Tensor, device: torch.device) -> None:
        """Zero memory; note it where it is made for the GPU."""
        if device == torch.device("cuda", 0):
            self.calls.append("touch")
        host_threads.zero_by_threads(memory, torch.device("cpu"))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """Note a range that must be readable, and zero."""
        self.calls.append("register")
        assert ctypes.string_at(address, nbytes) == bytes(nbytes) and flags == 0
        if self.code == 0:
            self.live[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        """Forget a range that must still be mapped."""
        self.calls.append("unregister")
        assert is_mapped(address), "CUDA would still copy from and to it"
        del self.live[address]
        return 0

    def check_error(self, code: int) -> None:
        """Raise as torch does."""
        if code:
            raise RuntimeError(f"out of memory ({code})")

    def synchronize(self, device: torch.device) -> None:
        """Note that copies were waited for."""
        self.calls.append("synchronize")


def stand_in(patch: pytest.MonkeyPatch) -> StandInCudart:
    """Pin host memory, for any device, by a stand-in."""
    cudart = StandInCudart()
    patch.setattr(torch.cuda, "cudart", lambda: cudart)
    patch.setattr(torch.cuda, "check_error", cudart.check_error)
    patch.setattr(torch.cuda, "synchronize", cudart.synchronize)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(host_memory, "zero_by_threads", cudart.touch)
    return cudart

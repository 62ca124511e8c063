"""The memory of a unit's buffers on the device and on the host, and the ledgers that count it.

The offload policy decides what lies where. The code that takes memory names its category.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megafsdp.device.host_memory import HostArena, aligned_nbytes, can_be_pinned, host_bytes
from megafsdp.device.memory import ByteLedger
from megafsdp.fsdp.params.policy import OffloadPolicy


@dataclass(frozen=True)
class HostMemory:
    """Memory for a main weight and its states on the host.

    Attributes:
        arena: Memory for the group's main weight and states.
        ledger: Counts their bytes, apart from the device's.
    """

    arena: HostArena
    ledger: ByteLedger

    def take_apart(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor that is freed independently, such as a gradient."""
        # Not from the arena, whose parts are never given back.
        if not self.arena.is_pinned:
            nbytes = numel * dtype.itemsize
            return host_bytes(nbytes, is_pinned=False)[:nbytes].view(dtype)
        # Locking pages may take longer than a step: torch's allocator keeps them for reuse.
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)


@dataclass(frozen=True)
class UnitMemory:
    """Memory for the buffers of a unit's groups.

    Attributes:
        ledger: Counts bytes on the device.
        host_ledger: Counts bytes on the host.
        offload: What lies on the host.
    """

    ledger: ByteLedger = field(default_factory=ByteLedger)
    host_ledger: ByteLedger = field(default_factory=ByteLedger)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)

    def host_memory(
        self, numel: int, dtypes: set[torch.dtype], device: torch.device
    ) -> HostMemory | None:
        """Return memory for one buffer of each dtype; None if parameters live on the device."""
        if not self.offload.params:
            return None
        nbytes = sum(aligned_nbytes(numel * dtype.itemsize) for dtype in dtypes)
        is_pinned = self.offload.pin_memory and can_be_pinned(device)
        return HostMemory(HostArena(nbytes, is_pinned=is_pinned), self.host_ledger)

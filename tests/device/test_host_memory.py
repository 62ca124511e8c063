"""Host memory is handed out aligned, without overlap, and never runs out."""

from __future__ import annotations

import torch

from megafsdp.device.host_memory import HostArena, aligned_nbytes, host_bytes


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

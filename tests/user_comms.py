"""Collectives as a user of ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` writes them.

The classes have the form that torch defines, and count what they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class _Counted:
    """Memory of the allocator's, and a list of calls.

    Attributes:
        sizes: The numels of allocations.
        calls: The numel and the dtype of each input.
        fails: Whether the next call raises; it is cleared then.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.calls: list[tuple[int, torch.dtype]] = []
        self.fails = False

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory, with NaN in it where the dtype has NaN."""
        (numel,) = size
        self.sizes.append(numel)
        memory = torch.empty(*size, dtype=dtype, device=device)
        return memory.fill_(torch.nan) if dtype.is_floating_point else memory.fill_(0xA5)

    def _note(self, input_tensor: torch.Tensor) -> None:
        if self.fails:
            self.fails = False
            raise ArithmeticError("the user's link is down")
        self.calls.append((input_tensor.numel(), input_tensor.dtype))


class UserAllGather(_Counted):
    """An all-gather as a user may write it."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather by one broadcast a rank."""
        self._note(input_tensor)
        parts = output_tensor.chunk(group.size())
        assert parts[group.rank()].data_ptr() == input_tensor.data_ptr(), "in place, as in torch"
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)
        assert not async_op
        return None


class UserReduceScatter(_Counted):
    """A reduce-scatter as a user may write it, with its parameters in an order of its own."""

    def __call__(
        self,
        input_tensor: torch.Tensor,
        output_tensor: torch.Tensor,
        op: object,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum in fp64, and overwrite the input; torch may ask for a mean."""
        self._note(input_tensor)
        total = input_tensor.to(torch.float64, copy=True)
        dist.all_reduce(total, group=group)
        input_tensor.fill_(torch.nan)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        else:
            assert op == dist.ReduceOp.SUM
        output_tensor.copy_(total.chunk(group.size())[group.rank()])
        return None


def give(net: torch.nn.Module, gather: object, scatter: object) -> None:
    """Set objects for the collectives of all units, or None for the default."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)

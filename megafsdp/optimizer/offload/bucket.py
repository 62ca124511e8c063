"""What one offloaded parameter group has on the host, and its gradients' way there.

A *bucket* is what this rank holds of a parameter group. Its main weight and moments lie in a slab
of the host; this file adds the host's gradient, the cast that is copied back, and, for steps that
may have to be undone, a second slab: such a step reads one and writes the other, and to take it
means to let the two change places.

::

    slab      weight  exp_avg  exp_avg_sq   <- what parameters and states show
    spare     weight  exp_avg  exp_avg_sq   <- what a step ahead has written
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import local_tensor, wrap_like
from megafsdp.device.host_copies import CopyLink, Transfer
from megafsdp.device.host_memory import HostArena, aligned_nbytes
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.optimizer.adam.plan import Found
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers
from megafsdp.optimizer.kernels.square_sum import remember_square_sum
from megafsdp.optimizer.states.flat import FlatStates

_WEIGHT = "weight"


class Bucket:
    """Host memory of one offloaded parameter group besides its main weight and states.

    Args:
        states: The group's moments; none if another optimizer has them.
        link: Between the group's device and the host.
        position: Of the group in forward.
        ledger: Counts the bytes of a second slab.
        is_grad_pinned: Whether the host's gradients are pinned.
        is_param_pinned: Whether what is copied to the device is pinned.
    """

    def __init__(
        self,
        states: FlatStates,
        link: CopyLink,
        *,
        position: int,
        ledger: ByteLedger,
        is_grad_pinned: bool,
        is_param_pinned: bool,
    ) -> None:
        self.states, self.link, self.position = states, link, position
        self._ledger, self._is_param_pinned = ledger, is_param_pinned
        group = states.group
        numel, dtypes = group.main_weight.flat.numel(), group.dtypes
        self.grad = _host_tensor(numel, dtypes.grad, is_pinned=is_grad_pinned)
        self.grad_squares = _host_tensor(1, torch.float64, is_pinned=is_grad_pinned)
        self.copy_out: torch.Tensor | None = None
        if dtypes.compute != dtypes.main:
            self.copy_out = _host_tensor(numel, dtypes.compute, is_pinned=is_param_pinned)
        self.copy: GradientCopy | None = None
        self.uploaded: Transfer | None = None
        self._spare: dict[str, DBuffer] = {}
        # Of the shown slab and of the spare: made once, since thousands are slow to make.
        self._views: dict[str, list[list[torch.Tensor]]] = {}

    @property
    def group(self) -> ParameterGroup:
        """Return the parameter group."""
        return self.states.group

    @property
    def nbytes(self) -> int:
        """Return the bytes of the gradient and the cast."""
        return self.grad.nbytes + (0 if self.copy_out is None else self.copy_out.nbytes)

    def copy_grads(self, grads: torch.Tensor, *, has_norm: bool = False) -> GradientCopy:
        """Issue the copy of a main gradient, 1-D like the bucket, unless it was issued before."""
        if self.copy is None or not self.copy.is_of(grads):
            return self.copy_pieces([(0, grads)], has_norm=has_norm)
        return self.copy

    def copy_pieces(
        self, pieces: Sequence[tuple[int, torch.Tensor]], *, has_norm: bool = False
    ) -> GradientCopy:
        """Issue the copy of gradients, 1-D, that begin at these places in the bucket."""
        self.let_go_of_grads()
        self.copy = GradientCopy(self, pieces, has_norm=has_norm)
        return self.copy

    def let_go_of_grads(self) -> None:
        """Let main gradients be written: by this thread, or by what it queues from here on."""
        if self.copy is not None:
            self.copy.let_go()
            self.copy = None

    def forget_grads(self) -> None:
        """Let main gradients be freed once they are read; returns at once."""
        if self.copy is not None and self.copy.transfer.is_done:
            self.let_go_of_grads()

    def wait_for_upload(self) -> None:
        """Return when the cast may be written again."""
        if self.uploaded is not None:
            self.uploaded.wait()

    def _shown(self) -> dict[str, DBuffer]:
        return {_WEIGHT: self.group.main_weight, **self.states.buffers}

    def buffers(self) -> AdamBuffers:
        """Return what a step reads and writes in place."""
        flats = {name: buffer.flat for name, buffer in self._shown().items()}
        return AdamBuffers(grad=self.grad, copy_out=self.copy_out, **flats)

    def buffers_aside(self) -> AdamBuffers:
        """Return what a step reads, and the spare slab, made at the first call, that it writes."""
        shown = self._shown()
        if not self._spare:
            self._spare = self._new_spare(shown)
        flats = {name: buffer.flat for name, buffer in shown.items()}
        flats |= {f"new_{name}": buffer.flat for name, buffer in self._spare.items()}
        return AdamBuffers(grad=self.grad, copy_out=self.copy_out, **flats)

    def _new_spare(self, shown: Mapping[str, DBuffer]) -> dict[str, DBuffer]:
        nbytes = sum(aligned_nbytes(buffer.flat.nbytes) for buffer in shown.values())
        # Its pages are first touched by the threads of the step that writes them.
        arena = HostArena(nbytes, is_pinned=self._is_param_pinned)
        spare = {
            name: DBuffer(
                buffer.layout,
                buffer.residence,
                shard=buffer.shard,
                dtype=buffer.flat.dtype,
                device=buffer.flat.device,
                ledger=self._ledger,
                category=Category.MAIN_WEIGHT if name == _WEIGHT else Category.OPTIMIZER_STATE,
                memory=arena.take(buffer.flat.numel(), buffer.flat.dtype),
            )
            for name, buffer in shown.items()
        }
        for buffer in spare.values():
            buffer.zero_gaps()
        return spare

    def exchange(self, states_by_parameter: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Show what lies in the spare slab, and keep the other as spare; copies nothing.

        Args:
            states_by_parameter: What the optimizer shows as states, in the flat buffers.
        """
        if not self._views:
            for name, buffer in self._shown().items():
                self._views[name] = [self.group.views_of(b) for b in (buffer, self._spare[name])]
        for views in self._views.values():
            views.reverse()
        shown = {name: views for name, (views, _) in self._views.items()}
        self.group.exchange_main_weight(self._spare[_WEIGHT], shown[_WEIGHT])
        self.states.exchange(self._spare, shown, states_by_parameter)

    def onload(self, states_by_parameter: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Bring the main weight and states back to the device; the bucket is of no more use.

        Args:
            states_by_parameter: As for :meth:`exchange`.
        """
        group = self.group
        group.gradients.main_grad.listener = None
        self.let_go_of_grads()
        group.onload_main_weight()
        there = {
            name: group.new_state_buffer(buffer.flat.dtype)
            for name, buffer in self.states.buffers.items()
        }
        for name, buffer in there.items():
            buffer.flat.copy_(self.states.buffers[name].flat)
        shown = {name: group.views_of(buffer) for name, buffer in there.items()}
        self.states.exchange(there, shown, states_by_parameter)


def _host_tensor(numel: int, dtype: torch.dtype, *, is_pinned: bool) -> torch.Tensor:
    arena = HostArena(aligned_nbytes(numel * dtype.itemsize), is_pinned=is_pinned)
    return arena.take(numel, dtype)


class GradientCopy:
    """A bucket's gradients on their way to the host.

    Args:
        bucket: Where they go.
        pieces: Tensors with gradients, 1-D, and where they begin in the bucket.
        has_norm: Send the norm of all pieces with them.

    The copy begins after what this thread has queued on the device.
    """

    def __init__(
        self, bucket: Bucket, pieces: Sequence[tuple[int, torch.Tensor]], *, has_norm: bool = False
    ) -> None:
        self._bucket = bucket
        copies = [(bucket.grad[at : at + grads.numel()], grads) for at, grads in pieces]
        if has_norm:
            # The norm of all gradients is made of the same sums.
            squares = torch.stack([remember_square_sum(grads) for _, grads in pieces])
            copies.append((bucket.grad_squares, squares.sum().view(1)))
        bucket.link.fence()
        self.transfer = bucket.link.to_host(copies)
        # The memory must not be used again before it was read.
        self._kept = [source for _, source in copies]
        self._sources = [(weakref.ref(grads), grads._version) for _, grads in pieces]

    def is_of(self, grads: torch.Tensor) -> bool:
        """Tell whether it was made of this tensor alone, which has not changed since."""
        if len(self._sources) != 1:
            return False
        ((source, version),) = self._sources
        return source() is grads and grads._version == version

    def wait(self) -> None:
        """Wait until the gradients are there; from any thread."""
        self.transfer.wait()
        self._kept = []

    @property
    def norm(self) -> float:
        """Return the norm that was sent with them, once they are there."""
        return math.sqrt(self._bucket.grad_squares.item())

    def let_go(self) -> None:
        """Let the gradients be written: by this thread, or by what it queues from here on."""
        self.transfer.order()
        self._kept = []


def left_on_device(found: Sequence[Found], buckets: Collection[FlatStates]) -> list[Found]:
    """Return what no bucket steps, with gradients where their parameters are."""
    return [
        Found(
            [entry for entry in part.flat if entry[0] not in buckets],
            [(parameter, _beside_weight(parameter, grad)) for parameter, grad in part.singles],
        )
        for part in found
    ]


def _beside_weight(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient where its parameter's main weight is."""
    owner = group_of(parameter)
    if owner is None or owner.host_memory is None:
        return grad
    return wrap_like(parameter, local_tensor(grad).to(owner.main_weight.flat.device))

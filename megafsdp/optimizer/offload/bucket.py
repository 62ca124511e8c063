"""The host memory of one offloaded parameter group, and the copy of its gradients.

A *bucket* is this rank's part of a parameter group. Its main weight and moments lie in a slab on
the host, and parameters and states are views of them; this file adds the host's gradient and the
cast that is copied back::

    slab       weight  exp_avg  exp_avg_sq
    grad       copied from the main gradient on the device
    copy_out   cast of the weight, copied to the device; none if the dtypes are equal

placement.py decides which buckets there are; their steps are in bucket_step.py.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import local_tensor, wrap_like
from megafsdp.device.host_copies import CopyLink, Transfer
from megafsdp.device.host_memory import HostArena, aligned_nbytes
from megafsdp.device.torch_private import version_of
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.optimizer.adam.plan import FoundGrads
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers
from megafsdp.optimizer.kernels.square_sum import remember_square_sum
from megafsdp.optimizer.states.flat import FlatStates

WEIGHT = "weight"


class Bucket:
    """Host memory of one offloaded parameter group beside its main weight and states.

    Args:
        states: The group's moments; none if another optimizer has them.
        link: The link between the group's device and the host.
        position: Position of the group in forward order.
        is_grad_pinned: Whether the host's gradients are pinned.
        is_param_pinned: Whether the memory that is copied to the device is pinned.
    """

    def __init__(
        self,
        states: FlatStates,
        link: CopyLink,
        *,
        position: int,
        is_grad_pinned: bool,
        is_param_pinned: bool,
    ) -> None:
        self.states, self.link, self.position = states, link, position
        self.is_param_pinned = is_param_pinned
        group = states.group
        numel, dtypes = group.main_weight.flat.numel(), group.dtypes
        has_cast = dtypes.compute != dtypes.main
        grads = HostArena(
            aligned_nbytes(numel * dtypes.grad.itemsize) + aligned_nbytes(torch.float64.itemsize),
            is_pinned=is_grad_pinned,
        )
        cast = HostArena(
            aligned_nbytes(numel * dtypes.compute.itemsize) if has_cast else 0,
            is_pinned=is_param_pinned,
        )
        self.pinned_nbytes = grads.pinned_nbytes + cast.pinned_nbytes
        self.grad = grads.take(numel, dtypes.grad)
        self.grad_squares = grads.take(1, torch.float64)
        self.copy_out = cast.take(numel, dtypes.compute) if has_cast else None
        # The copy for the last or the coming step; a copy of the same grads is not issued twice.
        self.copy: GradientCopy | None = None
        # The upload in flight; it reads copy_out until it is done.
        self.uploaded: Transfer | None = None

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
        # It may have been issued in backward, and is reused unless the gradients have changed.
        # Changes of replicated gradients, which are plain DTensors, cannot be noticed.
        if self.group.axes.is_sharded and self.copy is not None and self.copy.is_of(grads):
            return self.copy
        return self.copy_pieces([(0, grads)], has_norm=has_norm)

    def copy_pieces(
        self, pieces: Sequence[tuple[int, torch.Tensor]], *, has_norm: bool = False
    ) -> GradientCopy:
        """Issue the copy of 1-D gradients, each given with its first element in the bucket."""
        self.release_grads()
        self.copy = GradientCopy(self, pieces, has_norm=has_norm)
        return self.copy

    def release_grads(self) -> None:
        """Order the copy before work that this thread queues later, which may write gradients."""
        if self.copy is not None:
            self.copy.release()
            self.copy = None

    def release_read_grads(self) -> None:
        """Release main gradients if the copy has read them; does not wait."""
        if self.copy is not None and self.copy.transfer.is_done:
            self.release_grads()

    def wait_for_upload(self) -> None:
        """Wait until the cast may be written again."""
        if self.uploaded is not None:
            self.uploaded.wait()

    def shown(self) -> dict[str, DBuffer]:
        """Return the main weight and moments by name; parameters and states are views of them."""
        return {WEIGHT: self.group.main_weight, **self.states.buffers}

    def buffers(self) -> AdamBuffers:
        """Return the buffers that a step reads and writes in place."""
        flats = {name: buffer.flat for name, buffer in self.shown().items()}
        return AdamBuffers(grad=self.grad, copy_out=self.copy_out, **flats)

    def onload(self, states_by_parameter: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Bring the main weight and states back to the device; afterwards, drop the bucket.

        Args:
            states_by_parameter: The optimizer's ``state``, with views of the flat buffers.
        """
        group = self.group
        # From here on the reducer must not begin steps of this bucket.
        group.gradients.main_grad.listener = None
        self.release_grads()
        group.onload_main_weight()
        there = {
            name: group.new_state_buffer(buffer.flat.dtype)
            for name, buffer in self.states.buffers.items()
        }
        # The caller has waited for the host: nothing writes the old buffers any more.
        for name, buffer in there.items():
            buffer.flat.copy_(self.states.buffers[name].flat)
        shown = {name: group.views_of(buffer) for name, buffer in there.items()}
        self.states.exchange(there, shown, states_by_parameter)


class EarlyStarter(Protocol):
    """An optimizer that may begin a step in backward."""

    def begin_ahead(self, bucket: Bucket, grads: torch.Tensor) -> None:
        """Begin work for the coming step."""

    def cancel_early_step(self, bucket: Bucket) -> None:
        """Cancel the work that was begun."""


class BucketListener:
    """Notify the optimizer of events of one bucket's gradients and main weight.

    Args:
        optimizer: The optimizer.
        bucket: The bucket.
    """

    def __init__(self, optimizer: EarlyStarter, bucket: Bucket) -> None:
        # Weak: the parameter group refers to self, and the model must not keep the optimizer alive.
        self._optimizer, self._bucket = weakref.ref(optimizer), weakref.ref(bucket)

    def grads_are_final(self, grads: torch.Tensor) -> None:
        """Begin the step of the bucket."""
        optimizer, bucket = self._optimizer(), self._bucket()
        if optimizer is not None and bucket is not None:
            optimizer.begin_ahead(bucket, grads)

    def grads_will_change(self) -> None:
        """Cancel the step, and release the gradients that it would have read."""
        self.cancel()
        bucket = self._bucket()
        if bucket is not None:
            bucket.release_grads()

    def cancel(self) -> None:
        """Cancel the work that was begun, before others read or write the main weight."""
        optimizer, bucket = self._optimizer(), self._bucket()
        if optimizer is not None and bucket is not None:
            optimizer.cancel_early_step(bucket)


class GradientCopy:
    """The copy of a bucket's gradients to the host.

    Args:
        bucket: The target.
        pieces: 1-D tensors with gradients, each with its first element in the bucket.
        has_norm: Send the norm of all pieces with them.

    The copy begins after the work that this thread has queued on the device.
    """

    def __init__(
        self, bucket: Bucket, pieces: Sequence[tuple[int, torch.Tensor]], *, has_norm: bool = False
    ) -> None:
        self._bucket = bucket
        copies = [(bucket.grad[at : at + grads.numel()], grads) for at, grads in pieces]
        if has_norm:
            # The norm of all gradients reuses these sums, so each gradient is read once.
            squares = torch.stack([remember_square_sum(grads) for _, grads in pieces])
            copies.append((bucket.grad_squares, squares.sum().view(1)))
        # The copies run on a stream of their own, after the work that this thread has queued.
        bucket.link.fence()
        self.transfer = bucket.link.to_host(copies)
        # Keep them: the copy stream reads them, but the allocator only knows their own stream.
        self._kept = [source for _, source in copies]
        # To recognise the gradients later; weak, since a user may drop unread ones.
        self._sources = [(weakref.ref(grads), version_of(grads)) for _, grads in pieces]

    def is_of(self, grads: torch.Tensor) -> bool:
        """Return whether it copies only this tensor, which is unchanged since."""
        if len(self._sources) != 1:
            return False
        ((source, version),) = self._sources
        return source() is grads and version_of(grads) == version

    def wait(self) -> None:
        """Wait until the gradients have arrived; from any thread."""
        self.transfer.wait()
        self._kept = []

    @property
    def norm(self) -> float:
        """Return the norm that was sent with the gradients, after they have arrived."""
        return math.sqrt(self._bucket.grad_squares.item())

    def release(self) -> None:
        """Order the copy before work that this thread queues later, which may write gradients."""
        self.transfer.order()
        self._kept = []


def left_on_device(
    found: Sequence[FoundGrads], buckets: Collection[FlatStates]
) -> list[FoundGrads]:
    """Return the parameters that no bucket steps, with their gradients moved to their devices."""
    return [
        FoundGrads(
            [entry for entry in part.flat if entry[0] not in buckets],
            [(parameter, _beside_weight(parameter, grad)) for parameter, grad in part.singles],
        )
        for part in found
    ]


def _beside_weight(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient on the device of its parameter's main weight."""
    owner = group_of(parameter)
    # The main weight may be on the host while a gradient that a user made is on the device.
    if owner is None or owner.host_memory is None:
        return grad
    return wrap_like(parameter, local_tensor(grad).to(owner.main_weight.flat.device))

"""Gradients of parameters on a model axis: each rank's addend, and their sum over the axis.

If the axis cuts a parameter, each rank computes the gradient of its own part. If all ranks of the
axis have the parameter, its layer decides: the gradient is equal on all ranks, or each rank's is an
addend from its share of the activations (under sequence parallelism: norms, biases of row-parallel
layers). The addends of all such parameters of a group are summed in one all-reduce, before the
group's reduction over the data axes reads the packed gradients::

    tp 0  [ norm 0 | bias 0 ] --+                            +--> [ norm | bias ]  packed, tp 0
                                +-- one all-reduce over tp --+
    tp 1  [ norm 1 | bias 1 ] --+                            +--> [ norm | bias ]  packed, tp 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.fsdp.params.model_parts import ModelPlacement
from megafsdp.mesh.torch_private import local_of


class ModelGradients:
    """Takes this rank's addends from the gradients of one group, and sums them over a model axis.

    Args:
        mesh: The model axis; None if parameters are DTensors without one.
        placements: How the axis places each parameter of the group.
    """

    def __init__(self, mesh: DeviceMesh | None, placements: Sequence[ModelPlacement]) -> None:
        self._group: dist.ProcessGroup | None = None if mesh is None else mesh.get_group()
        self._placements = placements
        self._summed = [i for i, placement in enumerate(placements) if placement.is_summed]

    @property
    def has_sums(self) -> bool:
        """Return whether :meth:`sum_over_axis` sums anything; alike on all ranks."""
        return bool(self._summed) and self._group is not None and self._group.size() > 1

    def addend(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend for a parameter, in the shape of its part.

        Local, unless torch's layers leave the gradient in another placement than the parameter's:
        then a collective over the model axis, which FSDP2 issues too.

        Args:
            index: Index of the parameter.
            grad: Its gradient, as autograd left it.
        """
        if not isinstance(grad, DTensor):
            return grad
        wanted = self._placements[index]
        assert wanted.form is not None, "its parameter is a DTensor"
        placements, once = list(grad.placements), []
        for axis, placement in enumerate(grad.placements):
            if axis == wanted.form.model_axis and not wanted.is_summed:
                placements[axis] = wanted.form.placements[axis]
            elif placement != Partial():
                placements[axis] = Replicate()
                once.append(axis)
        if tuple(placements) != grad.placements:
            grad = grad.redistribute(placements=placements)
        local = _settled(grad)
        # All ranks of these axes have the whole gradient, which counts once: the first adds it.
        is_first = not any(grad.device_mesh.get_local_rank(axis) for axis in once)
        return local if is_first else torch.zeros_like(local)

    def sum_over_axis(self, packed: DBuffer, dtype: torch.dtype, label: str) -> None:
        """Replace addends in a packed buffer by their sums over the axis; one all-reduce.

        During the call it allocates a buffer of their size. It is queued on the current stream.

        Args:
            packed: The group's partial gradients.
            dtype: Dtype of the sum.
            label: FQN of the unit, for counters and profilers.
        """
        # This is the same on all ranks and in each backward, whatever gradients autograd left.
        if not self.has_sums:
            return
        addends = [packed.tensor(index) for index in self._summed]
        with torch.no_grad():
            together = torch.cat(addends).to(dtype)
            assert self._group is not None, "it has sums"
            all_reduce(together, group=self._group, label=label)
            torch._foreach_copy_(addends, list(together.split([a.numel() for a in addends])))


def _settled(grad: DTensor) -> torch.Tensor:
    """Return the local tensor of a gradient, after any collective that still writes it."""
    local = local_of(grad)
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()

"""Where the elements of some gradients lie on this rank, in as few flat tensors as there are.

A gradient may be sharded, replicated or plain. What is sharded counts on each rank that holds a
part, what is replicated counts once: :class:`GradParts` says over which ranks a sum over elements
is completed. Where all gradients of a flat main gradient are there, the buffer stands for them; its
gaps hold zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.errors import expected
from megafsdp.fsdp.params.gradient_reducer import place_of_grad


@dataclass(frozen=True, slots=True)
class GradParts:
    """Gradients divided among the same ranks.

    Attributes:
        group: The ranks; None if each rank has all elements.
        tensors: This rank's elements, in tensors of any shape; none is empty. They alias the
            gradients.
        gaps: Views of those elements in them that are no gradient's; they hold zeros and must.
    """

    group: dist.ProcessGroup | None
    tensors: list[torch.Tensor]
    gaps: list[torch.Tensor]


def parts_of(grads: Iterable[torch.Tensor], *, joins_buffers: bool = True) -> list[GradParts]:
    """Find the parts of gradients, the same number of them on all ranks; local.

    Args:
        grads: The gradients, each once.
        joins_buffers: Let a flat buffer with its gaps stand for its gradients.

    Raises:
        NotImplementedError: A DTensor is sharded over several axes, or partial.
    """
    flat: dict[DBuffer, dict[int, torch.Tensor]] = {}
    singles: list[torch.Tensor] = []
    for grad in grads:
        place = place_of_grad(grad) if joins_buffers else None
        known = None if place is None else flat.setdefault(place[0], {})
        if place is None or known is None or place[1] in known:
            singles.append(grad)
        else:
            known[place[1]] = grad
    parts: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    gaps: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    groups = _Groups()
    for buffer, by_index in flat.items():
        first, *others = by_index.values()
        if 1 + len(others) < len(buffer.layout.slots):
            singles += [first, *others]
        else:
            parts.setdefault(groups.of(first), []).append(buffer.flat)
            gaps.setdefault(groups.of(first), []).extend(buffer.gaps)
    for grad in singles:
        parts.setdefault(groups.of(grad), []).append(local_tensor(grad))
    return [
        GradParts(group, [t for t in tensors if t.numel()], gaps.get(group, []))
        for group, tensors in parts.items()
    ]


class _Groups:
    """Looks up process groups; gradients lie in few ways on few meshes, and a lookup is slow."""

    def __init__(self) -> None:
        self._known: dict[object, dist.ProcessGroup | None] = {}

    def of(self, grad: torch.Tensor) -> dist.ProcessGroup | None:
        if not isinstance(grad, DTensor):
            return None
        way = (type(grad), id(grad.device_mesh), grad.placements)
        if way not in self._known:
            self._known[way] = _dividing_ranks(grad)
        return self._known[way]


def _dividing_ranks(grad: DTensor) -> dist.ProcessGroup | None:
    if isinstance(grad, UnevenDTensor):
        return grad.dividing_ranks
    sharded = [axis for axis, p in enumerate(grad.placements) if not p.is_replicate()]
    if not sharded:
        return None
    if len(sharded) > 1 or grad.placements[sharded[0]].is_partial():
        raise NotImplementedError(
            expected(
                "gradients sharded over one mesh axis",
                f"placements {grad.placements}",
                where="the norm of gradients",
                mend="Use torch.nn.utils.clip_grad_norm_ for these parameters",
            )
        )
    return grad.device_mesh.get_group(sharded[0])

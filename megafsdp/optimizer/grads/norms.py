"""Norms of gradients, and counts of their zeros.

A gradient may be sharded, a part of a tensor-parallel one, replicated or plain. Every element
counts once: sums go over the ranks that together have one copy of the model, and an element that
several of them have counts on the first one. So the ranks of a model axis have the same norm, bit
by bit, and clipping keeps their replicated parameters equal. :class:`GradParts` groups gradients by
these ranks, in few tensors: if all gradients of a flat buffer exist, the buffer stands for them.

Sums are exact to fp32: squares are added in fp64, other powers in pieces short enough for fp32.
Gradients are only read here, after addends have been summed; clip.py scales them.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor, wrap_like
from megafsdp.errors import expected
from megafsdp.fsdp.params.main_gradient import FlatGradient
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.mesh.dtensor import cut_dim, group_of_axes
from megafsdp.optimizer.kernels.square_sum import has_square_sum_kernel, known_square_sums

# Short pieces, whose sums are added in fp64: one fp32 sum over 50 M elements is wrong by 4e-3.
_PIECE_NUMEL = 1 << 16

# Models have thousands of parameters: map() with it is much faster than a loop.
_GRAD = operator.attrgetter("grad")


def grads_of(parameters: Iterable[torch.Tensor], attribute: str = "grad") -> list[torch.Tensor]:
    """Return the existing gradients of parameters, in order; local but for :func:`summed_grad`.

    A parameter from :func:`megafsdp.local_parameters` yields the gradient of each parameter of its
    group: its own gradient is a plain tensor, which does not show that it is sharded.

    Args:
        parameters: The parameters, each once.
        attribute: Name of their attribute with the gradient.
    """
    parameters = list(parameters)
    grads = read_grads(parameters, attribute)
    found: list[torch.Tensor] = []
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is None:
            continue
        # The parameters of a group are DTensors: a plain tensor with a group is a local parameter.
        kind = _class_of(parameter)
        owner = group_of(parameter) if kind is torch.Tensor else None
        if owner is None:
            found.append(summed_grad(parameter, grad, attribute) if kind is DTensor else grad)
        elif attribute == "grad":
            found += [g for p in owner.parameters if (g := p.sharded.grad) is not None]
        else:
            found += _rows_of(owner, grad)
    return found


def read_grads(parameters: list[torch.Tensor], attribute: str) -> list[torch.Tensor | None]:
    """Return the value of an attribute of each parameter, or None; local."""
    if attribute == "grad":
        return list(map(_GRAD, parameters))
    return [getattr(parameter, attribute, None) for parameter in parameters]


def summed_grad(
    parameter: torch.Tensor, grad: torch.Tensor, attribute: str = "grad"
) -> torch.Tensor:
    """Return a gradient placed like its parameter; collective if it is placed otherwise.

    In a model that only tensor parallelism has cut, each rank may have an addend of the gradient of
    a replicated parameter, as of a norm over a part of the sequence. torch's optimizers sum such
    gradients implicitly; our kernels see only the rank's own elements. The sum replaces the addend,
    so that it is made once. Gradients of units are summed in backward already.
    """
    if _class_of(parameter) is not DTensor or not isinstance(grad, DTensor):
        return grad
    assert isinstance(parameter, DTensor), "its class says so"
    if grad.placements == parameter.placements:
        return grad
    summed = grad.redistribute(parameter.device_mesh, parameter.placements)
    setattr(parameter, attribute, summed)
    return summed


def _rows_of(owner: ParameterGroup, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return each parameter's rows of a tensor with the layout of the group's main weight."""
    main, found = owner.main_weight, []
    for index, parameter in enumerate(owner.parameters):
        place = main.tensor(index)
        start = int(place.storage_offset() - main.flat.storage_offset())
        rows = flat[start : start + place.numel()].view_as(local_tensor(parameter.sharded))
        found.append(wrap_like(parameter.sharded, rows))
    return found


@torch.no_grad()
def total_norm(grads: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients taken as one vector.

    Collective: one small all-reduce for each process group among the gradients, which may be
    sharded, replicated or plain; called by all ranks alike.

    Args:
        grads: The gradients, each once.
        norm_type: Order of the norm, positive; ``math.inf`` for the largest absolute value.

    Returns:
        A 0-dim fp32 tensor, equal on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive; or some gradients are divided among fewer ranks
            than others, so that each rank would leave some out.
    """
    return norms_of_parts([parts_of(grads)], norm_type, device_of(grads))[0]


@torch.no_grad()
def param_group_norms(optimizer: Optimizer, norm_type: float = 2.0) -> torch.Tensor:
    """Return the gradient norm of each of an optimizer's parameter groups, for logging.

    Collective: one small all-reduce for each process group among the gradients, whatever the number
    of parameter groups; called by all ranks alike.

    Args:
        optimizer: Any optimizer, before its ``zero_grad()``.
        norm_type: As for :func:`total_norm`.

    Returns:
        ``(parameter groups,)`` fp32, equal on all ranks; 0 for a group without gradients.
    """
    grads = [grads_of(group["params"]) for group in optimizer.param_groups]
    device = device_of([grad for own in grads for grad in own])
    return norms_of_parts([parts_of(own) for own in grads], norm_type, device)


@torch.no_grad()
def num_zero_grads(parameters: nn.Module | Iterable[torch.Tensor]) -> torch.Tensor:
    """Return how many elements of all gradients are zero, for logging.

    Each element of a sharded or replicated gradient counts once. Parameters without a gradient do
    not count. Collective as :func:`total_norm`.

    Returns:
        A 0-dim int64 tensor, equal on all ranks.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    grads = grads_of(parameters)
    total = torch.zeros((), dtype=torch.int64, device=device_of(grads))
    # Without joining: the gaps of a flat buffer are zeros that belong to no gradient.
    parts = parts_of(grads, joins_buffers=False)
    # A rank without counted elements must enter the all-reduce below too.
    for group in dict.fromkeys(part.group for part in parts):
        counted = [t for part in parts if part.group is group for t in part.counted]
        zeros = (tensor.numel() - tensor.count_nonzero() for tensor in counted)
        own = sum((count.to(total.device) for count in zeros), total * 0)
        if group is not None:
            all_reduce(own, group=group, label="zero gradients")
        total += own
    return total


@dataclass(frozen=True, slots=True)
class GradParts:
    """Gradients divided among the same ranks.

    Attributes:
        group: The ranks; None if each rank has all elements, and sums them by itself.
        tensors: This rank's elements, in tensors of any shape; none is empty. They alias the
            gradients.
        gaps: Views of the elements in them that belong to no gradient; they are and must stay zero.
        counts: Whether the elements count on this rank; if not, they count on another rank.
    """

    group: dist.ProcessGroup | None
    tensors: list[torch.Tensor]
    gaps: list[torch.Tensor]
    counts: bool

    @property
    def counted(self) -> list[torch.Tensor]:
        """Return the tensors whose elements count on this rank."""
        return self.tensors if self.counts else []


def parts_of(grads: Iterable[torch.Tensor], *, joins_buffers: bool = True) -> list[GradParts]:
    """Divide gradients into parts; groups and their order are the same on all ranks; local.

    Args:
        grads: The gradients, each once.
        joins_buffers: Let a flat buffer, including its gaps, stand for its gradients.

    Raises:
        NotImplementedError: A DTensor is partial.
    """
    # By buffer and index: a gradient given twice counts twice, the second time by itself.
    flat: dict[DBuffer, dict[int, torch.Tensor]] = {}
    singles: list[torch.Tensor] = []
    for grad in grads:
        if not (joins_buffers and isinstance(grad, FlatGradient)):
            singles.append(grad)
            continue
        known = flat.setdefault(grad.buffer, {})
        if grad.index in known:
            singles.append(grad)
        else:
            known[grad.index] = grad
    kinds = {buffer: _one_of_each_kind(by_index) for buffer, by_index in flat.items()}
    samples = [*itertools.chain.from_iterable(kinds.values()), *singles]
    ways = _Ways(samples)
    # Ordered here, alike on all ranks: which buffers are split up below differs between ranks.
    found = {way: GradParts(way.group, [], [], way.counts) for way in map(ways.of, samples)}
    for buffer, by_index in flat.items():
        way, *others = map(ways.of, kinds[buffer])
        # If gradients are missing, or some count on another rank, the buffer has elements that must
        # not count.
        if len(by_index) < len(buffer.layout.slots) or any(other != way for other in others):
            singles += by_index.values()
        else:
            found[way].tensors.append(buffer.flat)
            # The caller must zero them again after it has scaled the buffer by NaN.
            found[way].gaps.extend(buffer.gaps)
    for grad in singles:
        if (local := local_tensor(grad)).numel():
            found[ways.of(grad)].tensors.append(local)
    return list(found.values())


def _one_of_each_kind(grads: dict[int, Any]) -> list[torch.Tensor]:
    """Return a gradient that a model axis cuts and one that it repeats, if the buffer has both."""
    first = next(iter(grads.values()))
    # Most buffers have data axes only; looking at each gradient would take noticeable time.
    if _class_of(first) is UnevenDTensor:
        may_differ = first.uneven_layout.num_model_axes > 0
    else:
        may_differ = len(set(map(type, grads.values()))) > 1
    if not may_differ:
        return [first]
    kinds = {
        isinstance(grad, UnevenDTensor) and grad.uneven_layout.part.dim is not None: grad
        for grad in grads.values()
    }
    return list(kinds.values())


def _class_of(grad: torch.Tensor) -> type:
    """Return the class of a gradient among those that this file tells apart."""
    return _known_class(type(grad))


# Cached, as torch's check whether something is a DTensor runs in Python.
@functools.cache
def _known_class(cls: type[torch.Tensor]) -> type:
    return next(base for base in (UnevenDTensor, DTensor, torch.Tensor) if issubclass(cls, base))


class _Way(NamedTuple):
    """How to sum gradients: the ranks that do so together, and whether this rank's count."""

    group: dist.ProcessGroup | None
    counts: bool
    # How many sets of such ranks there are, each with other experts under the same names.
    shares: int = 1


_LOCAL = _Way(None, counts=True)


class _Ways:
    """Look up the way of gradients, computing each way once: they are few and slow to find.

    Args:
        grads: Gradients of each way, in the same order on all ranks.
    """

    def __init__(self, grads: Sequence[torch.Tensor]) -> None:
        keys = [self._key(grad) for grad in grads]
        by_key: dict[object, _Way] = {None: _LOCAL}
        for key, grad in zip(keys, grads, strict=True):
            if key not in by_key:
                assert isinstance(grad, DTensor), "a plain gradient is known to be local"
                by_key[key] = _way_of(grad)
        # Dense parameters and experts have different meshes over the same ranks: use one group.
        groups: dict[frozenset[int], dist.ProcessGroup] = {}
        for key, way in by_key.items():
            if way.group is not None and way.shares == 1:
                by_key[key] = way._replace(group=groups.setdefault(_ranks_of(way.group), way.group))
        _refuse_parts_of_ranks(groups)
        for key, way in by_key.items():
            if way.shares > 1:
                by_key[key] = way._replace(group=_group_of_all_shares(way, groups))
        # If some gradients are divided, count replicated ones on one rank: ranks that each summed
        # them locally could differ in the last bit.
        group = next(iter(groups.values()), None)
        for key, way in by_key.items():
            if key is not None and way.group is None and group is not None:
                by_key[key] = _Way(group, counts=group.rank() == 0)
        self._by_key = by_key
        # Making a key is the slowest part here, so do it once for each of these gradients.
        self._by_id = {id(grad): by_key[key] for key, grad in zip(keys, grads, strict=True)}

    @staticmethod
    def _key(grad: Any) -> object:
        cls = _class_of(grad)
        if cls is torch.Tensor:
            return None
        # By equality: units may have equal meshes that are different objects.
        if cls is DTensor:
            return grad.device_mesh, grad.placements, _shares_of(grad)
        # Not the placements: column- and row-parallel weights are summed in the same way.
        layout = grad.uneven_layout
        axes = layout.num_shards, layout.num_model_axes, layout.part.dim is None
        return grad.device_mesh, *axes, _shares_of(grad)

    def of(self, grad: torch.Tensor) -> _Way:
        way = self._by_id.get(id(grad))
        return self._by_key[self._key(grad)] if way is None else way


def _refuse_parts_of_ranks(groups: Iterable[frozenset[int]]) -> None:
    """Raise if some gradients are divided among fewer ranks than others.

    Ranks have other parameters then, and each would see only its own in the norm. One of another
    part of the model, such as a stage of a pipeline, is on other ranks altogether.
    """
    for few, many in itertools.permutations(groups, 2):
        if few < many:
            raise ValueError(
                expected(
                    f"gradients divided among ranks {sorted(many)}",
                    f"some of a unit on ranks {sorted(few)}, where other ranks have others",
                    where="the norm of gradients",
                    hint="Make those parameters DTensors over the axis that tells them apart, "
                    "before fully_shard(); or take total_norm() of each kind, add up squares over "
                    "that axis, and scale gradients by clip_grads_with_norm_()",
                )
            )


def _group_of_all_shares(way: _Way, groups: Mapping[frozenset[int], Any]) -> dist.ProcessGroup:
    """Return the group of the ranks that together have all experts of a layer.

    It is that of the other parameters' gradients, which all these ranks have in common.

    Raises:
        ValueError: No other gradients are divided among these ranks.
    """
    few = frozenset() if way.group is None else _ranks_of(way.group)
    for many, group in groups.items():
        if few <= many and len(many) == way.shares * len(few):
            return group
    raise ValueError(
        expected(
            f"gradients divided among all ranks of {way.shares} sets with other experts each",
            f"ranks {sorted(map(sorted, groups))}, and experts on ranks {sorted(few)}",
            where="the norm of gradients",
            hint="Take the norm of experts together with that of other parameters, divided by "
            "strategy='optim' or more",
        )
    )


def _ranks_of(group: dist.ProcessGroup) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group))


def _shares_of(grad: DTensor) -> int:
    return grad.shares if isinstance(grad, FlatGradient) else 1


def _way_of(grad: DTensor) -> _Way:
    shares = _shares_of(grad)
    if isinstance(grad, UnevenDTensor):
        return _Way(grad.copy_group, grad.is_counted, shares)
    mesh = grad.device_mesh
    cut = [axis for axis, placement in enumerate(grad.placements) if cut_dim(placement) is not None]
    has_group = len(cut) < 2 or mesh.mesh_dim_names is not None
    if not has_group or any(placement.is_partial() for placement in grad.placements):
        raise NotImplementedError(
            expected(
                "gradients that are replicated or sharded, over several axes of a mesh with names",
                f"placements {grad.placements}",
                where="the norm of gradients",
                hint="Give the mesh names, or use torch.nn.utils.clip_grad_norm_ for these",
            )
        )
    return _Way(group_of_axes(mesh, cut) if cut else None, counts=True, shares=shares)


def device_of(grads: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of gradients; the CPU if there are none."""
    return grads[0].device if grads else torch.device("cpu")


def norms_of_parts(
    vectors: Sequence[Sequence[GradParts]], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the norm of each vector, which is given in parts, ``(vectors,)`` fp32; collective.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    # Not "<= 0", which is false for NaN.
    if not norm_type > 0:
        raise ValueError(
            expected(
                "a positive order",
                norm_type,
                where="the norm_type of clip_grad_norm_()",
                hint="Use 2.0, or math.inf for the largest absolute value",
            )
        )
    is_max = norm_type == math.inf
    # One collective for each group, in the order of the first gradient, which all ranks share.
    groups = dict.fromkeys(part.group for parts in vectors for part in parts)
    total = torch.zeros(len(vectors), dtype=torch.float64, device=device)
    for group in groups:
        own = torch.zeros_like(total)
        for i, parts in enumerate(vectors):
            tensors = [t for part in parts if part.group is group for t in part.counted]
            for near in by_device(tensors):
                power = _local_power(near, norm_type).to(device)
                own[i] = torch.maximum(own[i], power) if is_max else own[i] + power
        if group is not None and is_max:
            # As bits, of which NaN's are the largest: a backend's float maximum may lose NaN.
            bits = own.masked_fill_(own.isnan(), math.nan).view(torch.int64)
            all_reduce(bits, op="max", group=group, label="grad norm")
        elif group is not None:
            all_reduce(own, op="sum", group=group, label="grad norm")
        total = torch.maximum(total, own) if is_max else total + own
    return (total if is_max else total.pow(1.0 / norm_type)).float()


def by_device(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device: parameters of some units may be on the host."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())


def _local_power(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return this rank's sum of p-th powers, or its largest absolute value, in fp64."""
    if norm_type == 2.0 and all(map(has_square_sum_kernel, tensors)):
        # The kernels add in fp64, in an order fixed by position: always the same bits.
        return known_square_sums(tensors).sum()
    # float(): torch returns a norm in the dtype of its input, and fp16 would overflow.
    pieces = [piece for t in tensors for piece in t.reshape(-1).float().split(_PIECE_NUMEL)]
    norms = torch.stack(torch._foreach_norm(pieces, norm_type)).double()
    return norms.max() if norm_type == math.inf else norms.pow(norm_type).sum()

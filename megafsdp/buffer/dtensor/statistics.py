"""Sums, means, extremes, norms and deviations of unevenly sharded tensors.

A statistic of this rank's rows is computed at once, without a collective, so one rank may call it
alone. The result is a DTensor; calling its ``full_tensor()`` on all ranks combines their values.
Within an optimizer's step, which all ranks run alike, the values are combined at once: optimizers
read them by ``.item()`` and change them in place.

=========================================  ================================================
statistic                                  placement of the result
=========================================  ================================================
sum, mean, any, all, count_nonzero         ``Partial``: values are added (all: multiplied)
norm of order p                            torch's kin of ``Partial``: p-th powers are added
max, min, amax, amin, norm of order inf    :class:`ExtremePartial`, which keeps NaN
var, std                                   :class:`SpreadDTensor`, which has three moments
=========================================  ================================================

Ranks without rows take the neutral value. Reductions that keep the dimension of rows are not built:
one value per row would be cut like the rows, which no placement can express. op_rules.py decides
which operations come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from megafsdp.buffer.comm.collectives import all_gather_equal
from megafsdp.buffer.dtensor.cures import stepping_optimizer
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.device.torch_private import OpOverload, schema_of, without_torch_function
from megafsdp.errors import expected
from megafsdp.mesh.dtensor import cut_dim, group_of_axes
from megafsdp.mesh.torch_private import (
    DTensorSpec,
    TensorMeta,
    local_of,
    make_dtensor,
    norm_placement,
    spec_of,
)

_SUMS = {"sum": "sum", "mean": "sum", "count_nonzero": "sum", "any": "sum", "all": "product"}
_EXTREMES = {"max": "max", "amax": "max", "min": "min", "amin": "min"}
_NORMS = frozenset({"norm", "linalg_vector_norm", "_foreach_norm"})
_SPREADS = frozenset({"var", "std"})
# Names of operators; the functions and methods have the same names.
STATISTICS = frozenset(_SUMS) | frozenset(_EXTREMES) | _NORMS | _SPREADS
# Elements of the piece of rows that is converted to double at a time.
_PIECE_NUMEL = 1 << 20
# Allowed on a SpreadDTensor before full_tensor(): reading its shape, and autograd's own calls.
_ALLOWED = frozenset({"__get__", "__set__", "size", "dim", "numel", "stride", "requires_grad_"})


class ExtremePartial(Partial):
    """A largest or smallest value of each rank's own rows; NaN on one rank makes the result NaN.

    A library's maximum drops or keeps NaN depending on the order of the ranks.
    """

    def _reduce_value(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        values = _gather(tensor, mesh.get_group(mesh_dim), mesh, str(self.reduce_op))
        return values.amax(0) if self.reduce_op == "max" else values.amin(0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExtremePartial) and self.reduce_op == other.reduce_op

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.reduce_op))


class SpreadDTensor(DTensor):
    """A variance or standard deviation whose moments are still to be combined over ranks.

    Its local tensor is the statistic of this rank's rows. Squared deviations do not add up over
    ranks, because their means differ. So each rank keeps count, mean and sum of squared deviations;
    :meth:`full_tensor` combines these in double.
    """

    _moments: torch.Tensor
    _finish: Callable[[torch.Tensor], torch.Tensor]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the statistic of the whole tensor; collective over the ranks that divide it."""
        mesh, placements = self.device_mesh, self.placements
        group = group_of_axes(mesh, [i for i, p in enumerate(placements) if p.is_partial()])
        moments = _gather(self._moments, group, mesh, "moments")
        return self._finish(_combine(moments.to(self.device)))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: object,
    ) -> DTensor:
        """Return the statistic of the whole tensor, replicated; collective.

        Raises:
            NotImplementedError: Other placements are wanted.
        """
        if not placements or not all(p.is_replicate() for p in placements):
            _refuse_before_full_tensor("redistribute() to other placements than Replicate()")
        every = (Replicate(),) * self.device_mesh.ndim
        return DTensor.from_local(self.full_tensor(), self.device_mesh, every, run_check=False)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse operations: on the local value their results would differ between ranks."""
        name = getattr(func, "__name__", "")
        if name not in _ALLOWED:
            _refuse_before_full_tensor(f"'{name}'")
        with without_torch_function():
            return func(*args, **(kwargs or {}))


def _refuse_before_full_tensor(got: str) -> None:
    raise NotImplementedError(
        expected(
            "full_tensor() first",
            got,
            where="the variance or standard deviation of an unevenly sharded tensor",
            hint="Call full_tensor() on all ranks, and go on with its result",
        )
    )


def reduce_rows(
    func: OpOverload, name: str, tensor: DTensor, layout: UnevenLayout, bound: dict[str, Any]
) -> DTensor | None:
    """Compute a statistic of this rank's rows; local, but collective in an optimizer's step.

    Args:
        func: The operator.
        name: Its name, one of ``STATISTICS``.
        tensor: The sharded tensor.
        layout: How it is cut.
        bound: The operator's other arguments by name.

    Returns:
        The statistic, combined over ranks in a step, else still to be; None if it is not supported.
    """
    found = _reduce_own_rows(func, name, tensor, layout, bound)
    is_watched = tensor.requires_grad and torch.is_grad_enabled()
    if found is None or is_watched or stepping_optimizer() is None:
        return found
    return found.redistribute(placements=[Replicate()] * found.device_mesh.ndim)


def _reduce_own_rows(
    func: OpOverload, name: str, tensor: DTensor, layout: UnevenLayout, bound: dict[str, Any]
) -> DTensor | None:
    ndim, rows = len(layout.shape), local_of(tensor)
    dims = _dims_of(bound.get("dim"), ndim)
    is_whole = len(dims) == ndim
    has_rows_of_tensor = ndim > 0 and tuple(rows.shape[1:]) == layout.shape[1:]
    # max over a dimension also returns indices, which would count from this rank's first row.
    if "out" in bound or len(schema_of(func).returns) > 1:
        return None
    # A stack may be cut within a matrix, so that the local tensor has other columns than the whole;
    # a model axis may cut columns too.
    if not is_whole and (0 not in dims or not has_rows_of_tensor):
        return None
    keeps_dims = bool(bound.get("keepdim"))
    shape = [
        1 if d in dims else n for d, n in enumerate(layout.shape) if keeps_dims or d not in dims
    ]
    if is_whole:
        # Flatten: the local tensor may have other dimensions than the whole.
        rows, bound = rows.reshape(-1), dict(bound)
        if bound.get("dim") is not None:
            bound["dim"] = 0 if isinstance(bound["dim"], int) else [0]
        dims = [0]
    if name in _SPREADS:
        return _spread(name, tensor, rows, dims, shape, bound)
    placement, neutral = _placement_of(name, bound, rows.dtype)
    if placement is None:
        return None
    num_rows, is_empty = len(rows), rows.numel() == 0 and math.prod(layout.shape) > 0
    if is_empty and neutral is not None:
        rows = rows.new_full((1, *rows.shape[1:]), neutral)
    value = func(rows, **bound)
    if name == "mean":
        # Weight by the share of rows: the mean of the ranks' means is not the mean of the tensor.
        all_rows = math.prod(layout.shape) if is_whole else layout.shape[0]
        value = value * (num_rows / max(all_rows, 1))
    return _wrap(DTensor, tensor, value.reshape(shape), placement)


def arguments_of(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments after the first, by name."""
    names = [argument.name for argument in schema_of(func).arguments]
    return {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}


def _dims_of(dim: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Return the dimensions that are reduced: the given ones, or all."""
    given = [dim] if isinstance(dim, int) else list(dim or [])
    # torch accepts 0 and -1 for a tensor without dimensions.
    return sorted({d % ndim for d in given}) if given and ndim else list(range(ndim))


def _placement_of(
    name: str, bound: dict[str, Any], dtype: torch.dtype
) -> tuple[Partial | None, float | bool | None]:
    """Return how a statistic is combined over ranks, and an element that does not change it."""
    if name in _EXTREMES:
        op = _EXTREMES[name]
        return ExtremePartial(op), _limit(dtype, is_lowest=op == "max")
    if name not in _NORMS:
        return Partial(_SUMS[name]), 0 if name == "mean" else None
    order = bound.get("ord", bound.get("p", 2))
    order = 2.0 if order is None else float(order)
    if order == math.inf:
        return ExtremePartial("max"), 0
    if order == -math.inf:
        return ExtremePartial("min"), math.inf
    # A norm of negative order is undefined on an empty shard.
    if order <= 0:
        return (Partial("sum"), None) if order == 0 else (None, None)
    return norm_placement(order), None


def _limit(dtype: torch.dtype, *, is_lowest: bool) -> float | bool:
    if dtype == torch.bool:
        return not is_lowest
    if dtype.is_floating_point:
        return -math.inf if is_lowest else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if is_lowest else limits.max


def _wrap(cls: type[DTensor], source: DTensor, value: torch.Tensor, placement: Partial) -> DTensor:
    """Wrap a statistic of this rank's rows; it is replicated where the source is."""
    spec = spec_of(source)
    placements = tuple(p if cut_dim(p) is None else placement for p in spec.placements)
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    return make_dtensor(cls, value, DTensorSpec(spec.mesh, placements, tensor_meta=meta))


def _spread(
    name: str,
    source: DTensor,
    rows: torch.Tensor,
    dims: list[int],
    shape: list[int],
    bound: dict[str, Any],
) -> DTensor | None:
    if not rows.dtype.is_floating_point:
        return None
    unbiased, correction = bound.get("unbiased", True), bound.get("correction")
    divisor_offset = float(unbiased if correction is None else correction)

    def finish(moments: torch.Tensor) -> torch.Tensor:
        # As in torch, zero degrees of freedom give NaN or infinity.
        variance = moments[2] / (moments[0] - divisor_offset).clamp(min=0)
        value = variance.sqrt() if name == "std" else variance
        return value.reshape(shape).to(rows.dtype)

    moments = _moments(rows, dims)
    result = _wrap(SpreadDTensor, source, finish(moments), Partial())
    assert isinstance(result, SpreadDTensor), "it was made of that class"
    result._moments, result._finish = moments, finish
    return result


def _moments(rows: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Return count, mean and sum of squared deviations over dimensions, ``(3, ...)`` fp64."""
    # Convert in pieces: all rows in double would take twice the shard's memory.
    num_rows = max(_PIECE_NUMEL // max(math.prod(rows.shape[1:]), 1), 1)
    found = []
    for piece in rows.detach().split(num_rows) if len(rows) else ():
        variance, mean = torch.var_mean(piece.double(), dims, correction=0)
        count = float(math.prod(piece.shape[d] for d in dims))
        found.append(torch.stack([torch.full_like(mean, count), mean, variance * count]))
    if found:
        return _combine(torch.stack(found))
    left = [n for d, n in enumerate(rows.shape) if d not in dims]
    return torch.zeros((3, *left), dtype=torch.float64, device=rows.device)


def _combine(moments: torch.Tensor) -> torch.Tensor:
    """Return the moments of all parts together from ``(parts, 3, ...)``.

    Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983).
    """
    counts, means, squares = moments.unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum(0)])


def _gather(
    value: torch.Tensor, group: dist.ProcessGroup, mesh: DeviceMesh, label: str
) -> torch.Tensor:
    """Return all ranks' values of equal shape, stacked; collective."""
    # Gather bytes: gloo gathers no bool. A value of offloaded rows is on the host: move it.
    sent = value.to(mesh.device_type).contiguous().reshape(-1).view(torch.uint8)
    received = all_gather_equal(sent, group=group, label=label)
    return received.view(value.dtype).view(-1, *value.shape).to(value.device)

"""Annotations: what a layer declares about its parameters.

A layer declares facts that no other package can find out: which dimension tensor parallelism cuts,
whether the parameter is an expert's and which one's, which logical tensors are fused in it, and
whether it is the matrix of a linear map.
``megafsdp.fsdp`` copies the annotation from the original parameter to the sharded one, and
``megafsdp.checkpoint`` reads it, so neither matches parameters by name. These are only
declarations; nothing here moves data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.errors import expected
from megafsdp.mesh.fused_parts import FusedParts

_ATTRIBUTE = "_megafsdp_annotation"


@dataclass(frozen=True, slots=True)
class ExpertRange:
    """Which experts of a layer this rank has.

    Example: with 8 experts on 4 expert-parallel ranks, rank 1 has ``ExpertRange(2, 2, 8)``. Its
    stack of shape (2, N, K) is rows 2 and 3 of the layer's (8, N, K). If each expert has its own
    parameters, its ``experts.0.linear_fc1.weight`` is the layer's ``experts.2.linear_fc1.weight``;
    ``name_component=-3`` says where the index stands.

    Attributes:
        first: Index in the layer of this rank's first expert.
        count: Number of experts on this rank.
        total: Number of experts in the layer.
        name_component: Which component of the parameter's name, counted from the end, is the index
            on this rank; the last one may also end in it, as ``weight0``. None for a stack of
            experts along dim 0.
        ranks: Global ranks that have the same experts, for a parameter that is not sharded; None
            means this rank alone, or all ranks if it has all experts. For a sharded parameter its
            mesh says it.
    """

    first: int
    count: int
    total: int
    name_component: int | None = None
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check that the declaration is consistent.

        Raises:
            ValueError: The range exceeds the layer, or the position is not counted from the end.
        """
        is_inside = self.first >= 0 and self.count > 0 and self.first + self.count <= self.total
        if not is_inside or (self.name_component is not None and self.name_component >= 0):
            raise ValueError(
                expected(
                    "a range inside the layer and a negative position in the name",
                    f"experts {self.first} to {self.first + self.count - 1} of {self.total}, "
                    f"name_component {self.name_component}",
                    where="ExpertRange",
                    hint="Give (first, count, total), and -1 for the last component of the name",
                )
            )


@dataclass(frozen=True, slots=True)
class ParameterAnnotation:
    """Facts about one parameter.

    Attributes:
        tp_dim: Dimension that tensor parallelism cuts; None means replicated over tp.
        is_expert: True if the parameter belongs to one of several experts.
        fused: Logical tensors inside the parameter; None means it is one logical tensor.
        experts: Which experts of the layer it has; None means that all ranks have the same.
        sums_over_tp: True if each rank of tp computes only an addend of the gradient, as for a norm
            whose ranks have different parts of the sequence.
        weight_mesh: Ranks over which a quantization recipe's maxima of the parameter are
            combined; None means the ranks that divide it, on data axes and a model axis.
        is_linear_weight: True if the layer uses it only in matrix products, as
            ``F.linear(x, weight)`` or grouped by expert, so that a recipe may quantize it.
    """

    tp_dim: int | None = None
    is_expert: bool = False
    fused: FusedParts | None = None
    experts: ExpertRange | None = None
    sums_over_tp: bool = False
    weight_mesh: DeviceMesh | None = None
    is_linear_weight: bool = False


def annotate(
    parameter: torch.Tensor,
    *,
    tp_dim: int | None = None,
    is_expert: bool = False,
    fused: FusedParts | None = None,
    experts: ExpertRange | None = None,
    sums_over_tp: bool = False,
    weight_mesh: DeviceMesh | None = None,
    is_linear_weight: bool = False,
) -> None:
    """Write an annotation on a parameter, replacing an earlier one.

    Args:
        parameter: The parameter, as the layer created it.
        tp_dim: Dimension that tensor parallelism cuts.
        is_expert: True if the parameter belongs to one of several experts.
        fused: Logical tensors inside the parameter.
        experts: Which experts of the layer it has; implies ``is_expert``.
        sums_over_tp: True if the gradient is a sum over the ranks of tp.
        weight_mesh: Ranks over which a recipe's maxima are combined.
        is_linear_weight: True if it is used only in matrix products.

    Raises:
        ValueError: The parts do not add up to the parameter's size along their dimension.
    """
    if fused is not None and (
        fused.dim >= parameter.ndim or parameter.shape[fused.dim] != fused.extent
    ):
        raise ValueError(
            expected(
                f"a parameter of extent {fused.extent} along dim {fused.dim}",
                f"shape {tuple(parameter.shape)}",
                where=f"the fused parts {fused.names}",
                hint="Declare sizes that add up to the parameter's extent",
            )
        )
    is_expert = is_expert or experts is not None
    annotation = ParameterAnnotation(
        tp_dim, is_expert, fused, experts, sums_over_tp, weight_mesh, is_linear_weight
    )
    set_annotation(parameter, annotation)


def set_annotation(parameter: torch.Tensor, annotation: ParameterAnnotation) -> None:
    """Write an annotation as it is: that of a part may have sizes of the whole parameter."""
    setattr(parameter, _ATTRIBUTE, annotation)


def copy_annotation(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a parameter's annotation, if it has one, to the tensor that replaces it."""
    if hasattr(source, _ATTRIBUTE):
        set_annotation(target, annotation_of(source))


def annotation_of(parameter: torch.Tensor) -> ParameterAnnotation:
    """Return a parameter's annotation, or the empty one if its layer declared nothing."""
    return getattr(parameter, _ATTRIBUTE, ParameterAnnotation())

"""What a layer declares about its parameter, beside its values.

A layer writes facts that no other room could know: which dimension tensor parallelism cuts, whether
the parameter is an expert's, and which logical tensors are fused in it. ``megafsdp.fsdp`` carries
the annotation from the original parameter to its sharded one, and ``megafsdp.checkpoint`` reads it,
so neither matches parameters by name. This file holds declarations only; it moves no data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafsdp.errors import expected

_ATTRIBUTE = "_megafsdp_annotation"


@dataclass(frozen=True, slots=True)
class FusedParts:
    """Logical tensors laid one after another along one dimension of a fused parameter.

    Example: a SwiGLU ``linear_fc1`` of shape (2I, H) is ``FusedParts(("gate", "up"), (I, I))``; an
    attention ``linear_qkv`` whose rows repeat [q heads; k; v] for each of 2 query groups is
    ``FusedParts(("query", "key", "value"), (hpg * hd, hd, hd), num_groups=2)``.

    Attributes:
        names: One name a part.
        sizes: Extent of each part along ``dim``, within one group.
        dim: The dimension along which the parts lie.
        num_groups: How often the sequence of parts repeats along ``dim``.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    num_groups: int = 1

    def __post_init__(self) -> None:
        """Check the declaration against itself.

        Raises:
            ValueError: Names and sizes differ in number, a size is not positive, or a name repeats.
        """
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ValueError(
                expected(
                    "one distinct name for each part size",
                    f"names {self.names} and sizes {self.sizes}",
                    where="FusedParts",
                    mend="Give as many names as sizes, each once",
                )
            )
        if min(self.sizes, default=0) < 1 or self.num_groups < 1:
            raise ValueError(
                expected(
                    "positive part sizes and a positive number of groups",
                    f"sizes {self.sizes}, num_groups {self.num_groups}",
                    where="FusedParts",
                    mend="Leave out parts that have no rows",
                )
            )

    @property
    def extent(self) -> int:
        """Return the size of the fused parameter along ``dim``."""
        return sum(self.sizes) * self.num_groups


@dataclass(frozen=True, slots=True)
class ParameterAnnotation:
    """Facts about one parameter.

    Attributes:
        tp_dim: Dimension that tensor parallelism cuts; None means replicated over tp.
        is_expert: True if the parameter belongs to one of several experts.
        fused: Logical tensors inside the parameter; None means it is one logical tensor.
    """

    tp_dim: int | None = None
    is_expert: bool = False
    fused: FusedParts | None = None


def annotate(
    parameter: torch.Tensor,
    *,
    tp_dim: int | None = None,
    is_expert: bool = False,
    fused: FusedParts | None = None,
) -> None:
    """Write an annotation on a parameter, replacing an earlier one.

    Args:
        parameter: The parameter, as the layer created it.
        tp_dim: Dimension that tensor parallelism cuts.
        is_expert: True if the parameter belongs to one of several experts.
        fused: Logical tensors inside the parameter.

    Raises:
        ValueError: The parts do not add up to the parameter's extent along their dimension.
    """
    if fused is not None and (
        fused.dim >= parameter.ndim or parameter.shape[fused.dim] != fused.extent
    ):
        raise ValueError(
            expected(
                f"a parameter of extent {fused.extent} along dim {fused.dim}",
                f"shape {tuple(parameter.shape)}",
                where=f"the fused parts {fused.names}",
                mend="Declare sizes that add up to the parameter's extent",
            )
        )
    setattr(parameter, _ATTRIBUTE, ParameterAnnotation(tp_dim, is_expert, fused))


def annotation_of(parameter: torch.Tensor) -> ParameterAnnotation:
    """Return a parameter's annotation, or the empty one if its layer declared nothing."""
    return getattr(parameter, _ATTRIBUTE, ParameterAnnotation())

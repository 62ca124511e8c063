"""What layers declare on parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafsdp.mesh.annotation import (
    ExpertRange,
    FusedParts,
    ParameterAnnotation,
    annotate,
    annotation_of,
    copy_annotation,
)


def test_annotation_is_read_back() -> None:
    """Every declared fact comes back."""
    parameter = nn.Parameter(torch.zeros(10, 4))
    fused = FusedParts(("gate", "up"), (5, 5))
    annotate(parameter, tp_dim=0, is_expert=True, fused=fused)
    assert annotation_of(parameter) == ParameterAnnotation(tp_dim=0, is_expert=True, fused=fused)


def test_undeclared_parameter_has_the_empty_annotation() -> None:
    """Nothing declared means replicated, dense, one logical tensor."""
    assert annotation_of(torch.zeros(2)) == ParameterAnnotation(None, False, None)


def test_later_annotation_replaces_the_earlier() -> None:
    """A layer's last word counts as a whole."""
    parameter = nn.Parameter(torch.zeros(4))
    annotate(parameter, tp_dim=0)
    annotate(parameter, is_expert=True)
    assert annotation_of(parameter) == ParameterAnnotation(is_expert=True)


def test_annotation_leaves_values_and_grad_alone() -> None:
    """Declaring is not computing."""
    parameter = nn.Parameter(torch.ones(4))
    annotate(parameter, tp_dim=0)
    assert parameter._version == 0
    assert parameter.requires_grad


@pytest.mark.parametrize(
    ("names", "sizes", "num_groups"),
    [
        (("q", "k"), (4,), 1),
        (("q", "q"), (4, 4), 1),
        (("q", "k"), (4, 0), 1),
        (("q",), (4,), 0),
        ((), (), 1),
    ],
)
def test_wrong_parts_are_refused(
    names: tuple[str, ...], sizes: tuple[int, ...], num_groups: int
) -> None:
    """Names and sizes go together, each once and positive."""
    with pytest.raises(ValueError, match="FusedParts"):
        FusedParts(names, sizes, num_groups=num_groups)


def test_extent_counts_every_group() -> None:
    """[q q k v] repeated for 3 query groups."""
    assert FusedParts(("q", "k", "v"), (8, 4, 4), num_groups=3).extent == 48


@pytest.mark.parametrize(("shape", "dim"), [((47, 2), 0), ((2, 47), 1), ((48,), 1)])
def test_parts_must_add_up_to_the_parameter(shape: tuple[int, ...], dim: int) -> None:
    """Parts that leave rows over, or name a dimension that is not there, are refused."""
    fused = FusedParts(("q", "k", "v"), (8, 4, 4), dim=dim, num_groups=3)
    with pytest.raises(ValueError, match=f"extent 48 along dim {dim}"):
        annotate(torch.zeros(shape), fused=fused)


def test_parts_may_lie_along_another_dimension() -> None:
    """Conv1D weights are fused along their columns."""
    parameter = torch.zeros(2, 48)
    annotate(parameter, fused=FusedParts(("q", "k", "v"), (16, 16, 16), dim=1))
    assert annotation_of(parameter).fused.dim == 1


@pytest.mark.parametrize(
    "stored_as",
    [
        ("{module}.{parameter}_w",),
        ("{module}.{parameter}_w", "{module}.{parameter}_w"),
        ("{module}.{parameter}_w", "{module}.{parameter}_w", "{module}.{parameter}_v"),
        ("{module}.{parameter}", "{module}.{parameter}_v"),
        ("{name}_w", "{name}_v"),
        ("{module}.{parameter}_w", ""),
        ("{module}.{parameter_w", "{module}.{parameter}_v"),
    ],
)
def test_templates_must_name_each_part(stored_as: tuple[str, ...]) -> None:
    """As many as parts, distinct, of the two known fields, none of them the whole's name."""
    with pytest.raises(ValueError, match="stored_as"):
        FusedParts(("gate", "up"), (5, 5), stored_as=stored_as)
    FusedParts(("gate", "up"), (5, 5), stored_as=("{module}.{parameter}_w", "up.{parameter}"))


@pytest.mark.parametrize(
    ("first", "count", "total", "component"),
    [(-1, 2, 4, None), (3, 2, 4, None), (0, 0, 4, None), (0, 2, 4, 0), (0, 2, 4, 1)],
)
def test_ranges_lie_inside_the_layer(
    first: int, count: int, total: int, component: int | None
) -> None:
    """Experts of no layer, and positions counted from the front of a name, are refused."""
    with pytest.raises(ValueError, match="ExpertRange"):
        ExpertRange(first, count, total, component)
    assert ExpertRange(2, 2, 4, -3).name_component == -3


def test_a_range_of_experts_makes_the_parameter_an_experts() -> None:
    """The general fact follows from the particular one; both can be handed on."""
    parameter, other = torch.zeros(2, 3), torch.zeros(2, 3)
    annotate(parameter, experts=ExpertRange(2, 2, 4))
    assert annotation_of(parameter).is_expert
    copy_annotation(parameter, other)
    assert annotation_of(other) == annotation_of(parameter)
    copy_annotation(torch.zeros(1), parameter)
    assert annotation_of(other) == annotation_of(parameter)

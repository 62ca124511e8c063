"""What layers declare about parameters that our engine has not cut.

torch's ``fully_shard`` drops the attributes that a layer set on its parameters. And if tensor
parallelism cuts a fused parameter, with or without FSDP2, the DTensor has the parts of each rank
one after another. That is not the order of the whole, which our engine keeps:

    whole                        [gate gate; up up]
    DTensor, tp 2, FSDP2 or not  [gate; up; gate; up]

So checkpoints ask the layers each time before parameters are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.checkpoint.format.manifest import Manifest
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import ParameterAnnotation, annotation_of
from megafsdp.mesh.fused_parts import FusedParts

_ATTRIBUTE = "_megafsdp_declared_parts"


@runtime_checkable
class _Declares(Protocol):
    """A layer of megafsdp.parallel."""

    # Recognized by attribute names alone: this package does not import the layers.
    declarations: Mapping[str, ParameterAnnotation]
    tp_mesh: DeviceMesh | None


class DeclaredParts(NamedTuple):
    """The logical tensors inside a parameter, and their order in memory.

    Attributes:
        fused: The parts of the whole; None if it is one logical tensor.
        num_ranks: Number of ranks whose parts follow one another in the parameter; 1 means the
            order of the whole.
    """

    fused: FusedParts | None
    num_ranks: int = 1


def declare_parts(model: nn.Module) -> None:
    """Set on parameters that our engine has not cut the parts that their layers declare; local."""
    for module in model.modules():
        if not isinstance(module, _Declares):
            continue
        for attribute, declared in module.declarations.items():
            parameter = module._parameters.get(attribute)
            if declared.fused is not None and _is_of_others(parameter):
                setattr(parameter, _ATTRIBUTE, _parts_of(declared, declared.fused, module.tp_mesh))


def declared_parts(parameter: torch.Tensor) -> DeclaredParts:
    """Return the parts of a parameter; call :func:`declare_parts` on its model first."""
    # Our engine copies attributes to the parameters that it makes, whose order differs.
    found = getattr(parameter, _ATTRIBUTE, None) if _is_of_others(parameter) else None
    return DeclaredParts(annotation_of(parameter).fused) if found is None else found


def require_whole_order(model: nn.Module, manifest: Manifest, *, where: str) -> None:
    """Refuse a checkpoint of unknown order if a parameter is not in the order of the whole; local.

    Raises:
        CheckpointError: An earlier release wrote the checkpoint.
    """
    if manifest.has_whole_order:
        return
    declare_parts(model)
    for name, parameter in model.named_parameters():
        if declared_parts(parameter).num_ranks > 1:
            raise CheckpointError.expected(
                f"a checkpoint that says in which order it has the parts of '{name}'",
                "one of an earlier release",
                where=where,
                hint="If megafsdp.fully_shard had cut the saved model, load it into such a one and "
                "save anew; else load it with that release",
            )


def _is_of_others(parameter: torch.Tensor | None) -> bool:
    return isinstance(parameter, DTensor) and not isinstance(parameter, UnevenDTensor)


def _parts_of(
    declared: ParameterAnnotation, fused: FusedParts, tp_mesh: DeviceMesh | None
) -> DeclaredParts:
    # If parts repeat in groups, each rank has whole groups, so the order is that of the whole.
    is_cut = tp_mesh is not None and declared.tp_dim == fused.dim and fused.num_groups == 1
    return DeclaredParts(fused, tp_mesh.size() if is_cut and tp_mesh is not None else 1)

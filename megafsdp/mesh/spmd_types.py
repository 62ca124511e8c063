"""Parameters that are plain tensors, whose parts the package ``spmd_types`` has written on them.

Layers that compute on plain parts can say so by this package's types, one for each axis of a mesh.
A full mesh (mesh/spmd.py) then takes them in place of DTensors; torch's ``fully_shard`` does so
from 2.15 on::

    type on tp      part of a rank      gradients of the ranks of tp
    S(dim)          cut along dim       each of its own part
    R               whole               addends of one sum
    I               whole               equal

On a data axis a parameter is R, or has no type. The package is no dependency: where it is not
imported, no parameter has such a type.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from megafsdp.errors import expected
from megafsdp.mesh.model_part import ModelPart, part_of, whole_part
from megafsdp.mesh.spmd import SpmdMesh


def imported_package() -> Any:
    """Return the package, if this process has imported it; otherwise None."""
    return sys.modules.get("spmd_types")


def is_typed(parameter: torch.Tensor) -> bool:
    """Return whether a plain parameter has types of the package."""
    spmd = imported_package()
    return spmd is not None and bool(spmd.get_local_type(parameter))


def check_untyped(name: str, parameter: torch.Tensor) -> None:
    """Check that a parameter of a unit without a full mesh has no types, which would be lost.

    Raises:
        ValueError: It has some.
    """
    if is_typed(parameter):
        raise ValueError(
            expected(
                "a full mesh for parameters with types",
                "data axes alone",
                where=f"the spmd_types of '{name}', in fully_shard()",
                hint="Give mesh= all axes and dp_mesh_dims= the names of the data axes",
            )
        )


def typed_part(name: str, parameter: torch.Tensor, mesh: SpmdMesh) -> tuple[ModelPart, bool]:
    """Return this rank's part of a typed parameter, and whether its gradient is an addend; local.

    Args:
        name: Its FQN, for messages.
        parameter: This rank's part of it.
        mesh: The axes.

    Raises:
        ValueError: It is not R on the data axes, has no type on the model axis or one that no
            parameter can have, or has a type on an axis of other ranks.
    """
    spmd = imported_package()
    shape, model = tuple(parameter.shape), mesh.model
    model_axis = None if model is None else spmd.MeshAxis.of(model.get_group())
    types, spec = dict(spmd.get_local_type(parameter)), spmd.get_partition_spec(parameter)
    # The specification says which dimensions are cut where the type only says that ranks differ.
    for dim, axes in enumerate(spec or ()):
        cutting = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        types |= dict.fromkeys(cutting, spmd.S(dim))
    own = types.pop(model_axis, spmd.R if model is None or model.size() == 1 else None)
    if any(each is not spmd.R for each in types.values()):
        raise _wrong(name, "R on all data axes", f"{types}")
    if model is None or model_axis is None:
        return whole_part(shape), False
    num_ranks, rank = model.size(), model.get_local_rank()
    if own is spmd.R or own is spmd.I:
        return part_of(shape, None, num_ranks, rank), own is spmd.R
    if not isinstance(own, spmd.Shard):
        axis_name = mesh.axis_name(mesh.model_axis or 0)
        raise _wrong(name, f"R, I or S(dim) on '{axis_name}'", f"{own}")
    whole = (*shape[: own.dim], shape[own.dim] * num_ranks, *shape[own.dim + 1 :])
    return part_of(whole, own.dim, num_ranks, rank), False


def complete_types(parameter: torch.Tensor, mesh: SpmdMesh) -> None:
    """Make a typed parameter R on data axes on which it has no type, for the package's checks.

    Args:
        parameter: A parameter that :func:`typed_part` has accepted.
        mesh: The axes.
    """
    spmd = imported_package()
    types = spmd.get_local_type(parameter)
    # The checks may know the data axes as one, and then no other axis of the same ranks.
    if math.prod(axis.size() for axis in types) == mesh.mesh.size():
        return
    axes = spmd.current_mesh() or [
        spmd.MeshAxis.of(mesh.mesh.get_group(axis)) for axis in mesh.data_axes
    ]
    spmd.assert_type(parameter, {axis: spmd.R for axis in axes if axis not in types})


def _wrong(name: str, wanted: str, got: str) -> ValueError:
    return ValueError(
        expected(
            wanted,
            got,
            where=f"the spmd_types of '{name}', with dp_mesh_dims",
            hint="Call spmd_types.assert_type() on it for each axis that is no data axis",
        )
    )

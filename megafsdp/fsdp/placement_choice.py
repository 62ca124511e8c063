"""What ``shard_placement_fn`` chooses for each parameter: a dimension, and a mesh of its own.

As in torch, the function returns None, a ``Shard``, or a ``ShardPlacementResult``, whose
``mesh_info`` names another data-parallel mesh. Experts need that: their ranks are fewer, as each
rank has some experts of every layer::

    mesh (dp 4)                    router, norms, attention       rows cut over 4 ranks
    mesh_info.mesh (efsdp 2)       stacks of experts, cut by ep   rows cut over the 2 ranks that
                                                                  have the same experts

What the function returns is read here or refused, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megafsdp.errors import expected
from megafsdp.fsdp.division import UnitMeshes
from megafsdp.fsdp.grouping import FoundParameter
from megafsdp.fsdp.keywords import PlacementFunction
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.spmd import spmd_mesh_of


def choose_meshes(
    found: Sequence[FoundParameter],
    placement_fn: PlacementFunction | None,
    meshes: UnitMeshes,
) -> UnitMeshes:
    """Say which parameters are divided over the mesh of experts, and return the unit's meshes.

    Local, except that it may make the group of a mesh over several axes on first use.

    Args:
        found: The unit's parameters, in which the results are written.
        placement_fn: The user's function; None divides what is annotated as experts' over
            ``meshes.experts``.
        meshes: The meshes that the user gave.

    Raises:
        NotImplementedError: A placement cuts rows apart, or parameters name several other meshes.
    """
    # Of the keyword: a mesh that the function names is for the parameters that it names it for.
    is_given = meshes.experts is not None
    for item in found:
        item.is_expert = is_given and annotation_of(item.parameter).is_expert
        placement: Any = None if placement_fn is None else placement_fn(item.parameter)
        info = getattr(placement, "mesh_info", None)
        _check_dim(item, placement if info is None else placement.placement, meshes)
        if info is None:
            continue
        # torch keeps the full mesh beside the data axes that it has found in it.
        spmd = spmd_mesh_of(getattr(info, "spmd_mesh", None), info.dp_mesh_dims)
        data = info.mesh if spmd is None else spmd.data
        item.is_expert = not meshes.is_default(data, spmd)
        if not item.is_expert:
            continue
        if meshes.experts is None:
            meshes = replace(meshes, experts=data, experts_spmd=spmd)
        elif meshes.experts != data:
            raise NotImplementedError(
                expected(
                    f"one mesh beside that of the unit, {meshes.experts}",
                    f"{data} too",
                    where=f"shard_placement_fn for '{item.record.name}'",
                    hint="Give parameters of a third mesh to a fully_shard() of their own",
                )
            )
    return meshes


def _check_dim(item: FoundParameter, placement: object, meshes: UnitMeshes) -> None:
    """Check that a placement cuts between rows, which flat buffers do without padding.

    Placements of any class with a ``dim`` count: torch has several, and users their own.
    """
    ndim = item.parameter.ndim
    dim = getattr(placement, "dim", None)
    # Rows of a stack (E, N, K) are those of its matrices: they are cut on both first dimensions.
    dims = range(2 if ndim == 3 and not meshes.is_even else 1)
    if placement is None or (dim is not None and (dim if dim >= 0 else dim + ndim) in dims):
        return
    # Local rows of another dimension would not be one range of a flat buffer.
    raise NotImplementedError(
        expected(
            " or ".join(f"Shard({each})" for each in dims),
            placement,
            where=f"shard_placement_fn for '{item.record.name}'",
            hint="Return None: rows of flat buffers are cut on dimension 0, and rows of stacks "
            "anywhere",
        )
    )

"""A model of parallel layers onto the meshes of a job, in one call before ``fully_shard``."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from megafsdp.errors import expected
from megafsdp.mesh.parallel_dims import Meshes
from megafsdp.parallel.layer import ParallelModule, set_mesh_below

M = TypeVar("M", bound=nn.Module)


def parallelize(model: M, meshes: Meshes) -> M:
    """Cut the layers of a model by the tensor-parallel mesh; a no-op where there is none.

    Parameters of other modules stay plain: every rank of tp has them whole, and they must compute
    the same on each. Local; call it after construction and before ``fully_shard``.

    Args:
        model: A module with layers of :mod:`megafsdp.parallel` at any depth, on the meta device or
            with values, which every rank of tp must have alike.
        meshes: What ``ParallelDims.build()`` returns.

    Returns:
        ``model``.

    Raises:
        ValueError: The model has no such layer, or a size cannot be cut by the degree.
        RuntimeError: The layers have been cut or sharded before.
    """
    if meshes.tp is None:
        return model
    if not any(isinstance(module, ParallelModule) for module in model.modules()):
        raise ValueError(
            expected(
                "a model with layers of megafsdp.parallel",
                f"{type(model).__name__} without any",
                where="parallelize()",
                hint="Build the model of these layers, or give fully_shard() a model that torch's "
                "parallelize_module() has cut",
            )
        )
    set_mesh_below(model, meshes.tp, None)
    return model

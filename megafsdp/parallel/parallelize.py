"""Put a model of parallel layers onto the meshes of a job, in one call before ``fully_shard``."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from megafsdp.errors import expected
from megafsdp.mesh.parallel_dims import Meshes
from megafsdp.parallel.layer import ParallelModule, set_mesh_below

M = TypeVar("M", bound=nn.Module)


def parallelize(model: M, meshes: Meshes) -> M:
    """Cut layers by tp and stacks of experts by ep, and have layers share out sequences over cp.

    A no-op without these meshes.

    Each rank of ``meshes.ep`` gets an equal number of each layer's experts. Tensor parallelism cuts
    none of them: ``fully_shard(..., expert_mesh=meshes.experts)`` divides them over the ranks of tp
    too, which have different tokens. Parameters of other modules stay plain: every rank of tp has
    them whole, and these modules must compute the same on each. Context parallelism cuts no
    parameter and no input: models of :mod:`megafsdp.models` take whole sequences and compute with
    their own part; modules of another model find the ranks in ``cp_group``. Local; call it after
    construction and before ``fully_shard``. Either everything is changed or the call raises.

    Args:
        model: A module with layers of :mod:`megafsdp.parallel` at any depth, on the meta device or
            with values, which every rank must have alike.
        meshes: What ``ParallelDims.build()`` returns.

    Returns:
        ``model``.

    Raises:
        ValueError: The model has no such layer, or no experts for ep; a size cannot be cut by the
            degree, or heads of linear attention by tp x cp; or the ranks of tp have the same
            tokens, so that experts would count each of them several times.
        RuntimeError: The layers have been cut or sharded before.
    """
    if meshes.tp is None and meshes.ep is None and meshes.cp is None:
        return model
    layers = [module for module in model.modules() if isinstance(module, ParallelModule)]
    if not layers:
        raise ValueError(
            expected(
                "a model with layers of megafsdp.parallel",
                f"{type(model).__name__} without any",
                where="parallelize()",
                hint="Build the model of these layers, or give fully_shard() a model that torch's "
                "parallelize_module() has cut",
            )
        )
    experts = [layer for layer in layers if _has_experts(layer)]
    _check_experts(experts, meshes, type(model).__name__)
    if meshes.cp is not None:
        degree = meshes.cp.size() * (1 if meshes.tp is None else meshes.tp.size())
        for layer in layers:
            if layer.shares_heads_over_cp:
                layer.check_degree(degree)
    set_mesh_below(model, meshes.tp, None, ep_mesh=meshes.ep, experts=experts)
    for layer in layers:
        layer.cp_mesh = meshes.cp
    return model


def _has_experts(layer: ParallelModule) -> bool:
    return any(declared.is_expert for declared in layer.declarations.values())


def _check_experts(experts: list[ParallelModule], meshes: Meshes, name: str) -> None:
    if meshes.ep is not None and not experts:
        raise ValueError(
            expected(
                "a model with stacks of experts",
                f"{name} without any",
                where=f"parallelize(), {meshes.ep.size()} ranks of ep",
                hint="Leave expert parallelism out",
            )
        )
    degree = 1 if meshes.ep is None else meshes.ep.size()
    for layer in experts:
        for attribute, parameter in layer.named_parameters(recurse=False):
            if parameter.shape[0] % degree:
                raise ValueError(
                    expected(
                        f"an expert-parallel degree that divides {parameter.shape[0]} experts",
                        degree,
                        where=f"parallelize(), '{attribute}' of {layer}",
                        hint="Choose a degree that divides the number of experts",
                    )
                )
            if meshes.tp is not None and not layer.declarations[attribute].sums_over_tp:
                raise ValueError(
                    expected(
                        "experts with sequence parallelism",
                        f"{meshes.tp.size()} ranks of tp with the same tokens",
                        where=f"parallelize(), '{attribute}' of {layer}",
                        hint="Cut the sequence and make the layer with sequence_parallel=True: the "
                        "experts' gradients would count each token once a rank",
                    )
                )

"""Parameters as Megatron-core's layers have them, made DTensors over the axis that cuts them.

Megatron-core's layers keep this rank's part of a weight as a plain parameter. Attributes say how
tensor parallelism has cut it::

    tensor_model_parallel  True for a part of a weight
    partition_dim          the dimension that is cut
    sequence_parallel      True for a copy of which each rank computes an addend of the gradient

The engine learns parts from DTensors, so each parameter becomes one with the parameter's own memory
as its local tensor. The layers still compute with plain tensors. This file issues no collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megafsdp.errors import expected
from megafsdp.fsdp.params.model_parts import COMPUTES_ON_PART
from megafsdp.mesh.annotation import (
    ExpertRange,
    ParameterAnnotation,
    annotation_of,
    set_annotation,
)
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.mesh.torch_private import wrap_part

# Norms of single heads, of which a rank has some: it computes an addend of the gradient with or
# without sequence parallelism. Megatron-core too knows these norms by their names.
_NORMS_OF_HEADS = ("q_layernorm", "k_layernorm")


def declare_experts(module: nn.Module) -> None:
    """Annotate the parameters of this rank's experts with their indices in the layer; local.

    A layer of Megatron-core's has ``num_local_experts`` and ``ep_group``, and numbers its own
    experts from 0: ``local_experts.0.linear_fc1.weight``, or ``linear_fc1.weight0`` if it computes
    all of them at once.

    Raises:
        NotImplementedError: A parameter has columns of several experts.
    """
    layers = {name: layer for name, layer in module.named_modules() if _has_experts(layer)}
    for prefix, layer in layers.items():
        if any(_has_experts(inner) for inner in layer.modules() if inner is not layer):
            continue  # A layer with the router of the one within it.
        count, group = layer.num_local_experts, layer.ep_group
        for name, parameter in layer.named_parameters():
            known, components = annotation_of(parameter), name.split(".")
            is_matrix_of_all = len(components) == 1
            if is_matrix_of_all and group.size() > 1:
                raise _columns_of_experts(f"{prefix}.{name}".lstrip("."))
            if is_matrix_of_all or known.experts is not None or isinstance(parameter, DTensor):
                continue
            at = next((i for i, one in enumerate(components) if one.isdecimal()), -1)
            experts = ExpertRange(
                group.rank() * count,
                count,
                group.size() * count,
                at if at < 0 else at - len(components),
            )
            is_expert = known.is_expert or group.size() > 1
            set_annotation(parameter, replace(known, is_expert=is_expert, experts=experts))


def _has_experts(layer: nn.Module) -> bool:
    group = getattr(layer, "ep_group", None)
    return hasattr(layer, "num_local_experts") and isinstance(group, dist.ProcessGroup)


def _columns_of_experts(name: str) -> NotImplementedError:
    return NotImplementedError(
        expected(
            "a parameter of one expert",
            "one with columns of all experts of this rank",
            where=f"'{name}' in fully_shard_model()",
            hint="Use layers with a weight for each expert, such as SequentialMLP",
        )
    )


@dataclass
class _Plain:
    """A plain parameter, and where modules have it.

    Attributes:
        name: Its first FQN.
        parameter: The parameter.
        mesh: The axis that cuts it or has copies of it; None or one rank for neither.
        is_norm_of_heads: Whether it belongs to a norm of single heads.
        owners: The modules that have it, with attribute names.
    """

    name: str
    parameter: nn.Parameter
    mesh: DeviceMesh | None
    is_norm_of_heads: bool
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def is_part(self) -> bool:
        """Return whether Megatron-core says that it is a part of a weight."""
        return bool(getattr(self.parameter, "tensor_model_parallel", False))

    @property
    def is_beside_dtensors(self) -> bool:
        """Return whether a layer that has it also has DTensors."""
        siblings = (p for owner, _ in self.owners for p in owner._parameters.values())
        return any(isinstance(parameter, DTensor) for parameter in siblings)


@contextlib.contextmanager
def parts_as_dtensors(
    module: nn.Module, tp_mesh: DeviceMesh | None, expert_tp_mesh: DeviceMesh | None
) -> Iterator[None]:
    """Put DTensors in place of plain parameters; local, and undone if the context raises.

    Copies become replicated DTensors, which count once in norms and checkpoints. Plain copies in
    layers that have DTensors, as of torch's ``parallelize_module``, stay plain.

    Args:
        module: The model, whose experts are annotated.
        tp_mesh: The axis of tensor parallelism; None or one rank cuts nothing.
        expert_tp_mesh: The axis that cuts matrices of single experts; likewise.

    Raises:
        ValueError: A part does not say which dimension is cut.
        NotImplementedError: A layer has parts and DTensors, or a part has columns of several
            experts.
    """
    found = _plain_parameters(module, tp_mesh, expert_tp_mesh)
    facts = [_facts_of(plain) for plain in found]
    places = []
    for plain, known in zip(found, facts, strict=True):
        # A layer that declares a cut, but was given no mesh, is refused by the engine.
        is_copy = known.tp_dim is None and not plain.is_beside_dtensors
        if plain.mesh is not None and plain.mesh.size() > 1 and (plain.is_part or is_copy):
            made = _as_dtensor(plain.parameter, known, plain.mesh)
            places += [(owner, name, plain.parameter, made) for owner, name in plain.owners]
        else:
            set_annotation(plain.parameter, known)
    for owner, name, _, made in places:
        owner._parameters[name] = made
        setattr(owner, COMPUTES_ON_PART, True)
    try:
        yield
    except BaseException:
        for owner, name, original, made in places:
            if owner._parameters.get(name) is made:
                owner._parameters[name] = original
        raise


def _plain_parameters(
    module: nn.Module, tp_mesh: DeviceMesh | None, expert_tp_mesh: DeviceMesh | None
) -> list[_Plain]:
    found: dict[int, _Plain] = {}
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in found:
                is_expert = annotation_of(parameter).is_expert
                name = f"{prefix}.{attribute}".lstrip(".")
                mesh = expert_tp_mesh if is_expert else tp_mesh
                around, _, own = prefix.rpartition(".")
                # In latent attention norms of these names are of what all ranks have.
                is_norm_of_heads = own in _NORMS_OF_HEADS and hasattr(
                    module.get_submodule(around), "linear_qkv"
                )
                found[id(parameter)] = _Plain(name, parameter, mesh, is_norm_of_heads)
            found[id(parameter)].owners.append((owner, attribute))
    return list(found.values())


def _facts_of(plain: _Plain) -> ParameterAnnotation:
    """Return what is known of a parameter, with sizes of the whole weight."""
    parameter, known = plain.parameter, annotation_of(plain.parameter)
    num_ranks = 1 if plain.mesh is None else plain.mesh.size()
    if not plain.is_part:
        is_addend = plain.is_norm_of_heads or getattr(parameter, "sequence_parallel", False)
        return replace(known, sums_over_tp=known.sums_over_tp or is_addend)
    dim, fused = getattr(parameter, "partition_dim", -1), known.fused
    if num_ranks == 1:
        return known
    if dim not in range(parameter.ndim):
        raise ValueError(
            expected(
                "the dimension that is cut, as partition_dim of the parameter",
                repr(dim),
                where=f"'{plain.name}' with tensor_model_parallel, in fully_shard_model()",
                hint="Set partition_dim; if tensors are fused in the parameter, say by "
                "annotate(parameter, fused=...) which",
            )
        )
    if hasattr(plain.owners[0][0], "num_local_experts"):
        raise _columns_of_experts(plain.name)
    if plain.is_beside_dtensors:
        raise NotImplementedError(
            expected(
                "a layer of Megatron-core's parts alone",
                "DTensors beside them",
                where=f"'{plain.name}' with tensor_model_parallel, in fully_shard_model()",
                hint="Make all of its parameters DTensors",
            )
        )
    if fused is not None and fused.dim == dim:
        fused = _of_all_ranks(fused, num_ranks)
    return replace(known, tp_dim=dim, fused=fused)


def _of_all_ranks(fused: FusedParts, num_ranks: int) -> FusedParts:
    """Return the fused parts of a weight, of which each rank has as much as is given."""
    if fused.num_groups > 1:
        return replace(fused, num_groups=fused.num_groups * num_ranks)
    return replace(fused, sizes=tuple(size * num_ranks for size in fused.sizes))


def _as_dtensor(
    parameter: nn.Parameter, known: ParameterAnnotation, mesh: DeviceMesh
) -> nn.Parameter:
    """Return a DTensor parameter whose local tensor aliases a parameter, with its attributes."""
    dim, shape = known.tp_dim, list(parameter.shape)
    if dim is not None:
        shape[dim] *= mesh.size()
    placement = Replicate() if dim is None else Shard(dim)
    wrapped = wrap_part(parameter.detach(), mesh, (placement,), tuple(shape))
    made = nn.Parameter(wrapped, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    set_annotation(made, known)
    return made

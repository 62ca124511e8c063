"""The tensors that Megatron-core's layers fuse in one parameter, and where they are cut.

A gated MLP, linear attention and a state-space layer each compute several tensors by one product.
Tensor parallelism cuts each tensor by itself, so the parts of two ranks one after another are not
the weight. Parameters are annotated here with their tensors, of this rank's sizes. Attributes of a
parameter say it::

    partition_stride  2 for [gate; up]
    partition_sizes   the rows of each tensor

or else the layer, which is known by its own attributes, as Megatron-core is not imported. Names are
those of NVIDIA's checkpoints::

    linear_fc1 of a gated MLP  gate, up
    in_proj of GatedDeltaNet   query, key, value, z, beta, alpha    conv1d: query, key, value
    in_proj of MambaMixer      z, x, B, C, dt                       conv1d: x, B, C

Source: Megatron-core 0.13 to 0.16 and its main branch, ``sharded_state_dict`` of these layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp.errors import expected
from megafsdp.mesh.annotation import annotate, annotation_of, set_annotation
from megafsdp.mesh.fused_parts import FusedParts, gate_and_up


def declare_fused(module: nn.Module, num_tp_ranks: int) -> None:
    """Annotate the parameters in which layers fuse tensors; local.

    Parameters that are annotated with fused tensors already, and DTensors, stay as they are.

    Args:
        module: The model, whose experts are annotated.
        num_tp_ranks: How many ranks cut its weights.

    Raises:
        NotImplementedError: A layer with a recurrent state is cut, and sizes are not known.
    """
    for name, layer in module.named_modules():
        if _is_gated_mlp(layer):
            _declare_gated(layer)
        elif _is_recurrent(layer):
            _declare_recurrent(name, layer, num_tp_ranks)
    for parameter in module.parameters():
        _declare(parameter, _by_attributes(parameter))


def _declare(parameter: nn.Parameter, fused: FusedParts | None) -> None:
    known = annotation_of(parameter)
    if fused is not None and known.fused is None and not isinstance(parameter, DTensor):
        annotate(parameter, fused=fused)  # Checks the sizes.
        set_annotation(parameter, replace(known, fused=fused))


def _by_attributes(parameter: nn.Parameter) -> FusedParts | None:
    dim = getattr(parameter, "partition_dim", -1)
    if dim not in range(parameter.ndim):
        return None
    sizes = [size for size in getattr(parameter, "partition_sizes", None) or () if size]
    if sizes:
        return FusedParts(tuple(f"part{i}" for i in range(len(sizes))), tuple(sizes), dim)
    if getattr(parameter, "partition_stride", 1) == 2:
        return gate_and_up(parameter.shape[dim] // 2, dim=dim)
    return None


def _is_part(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _is_gated_mlp(layer: nn.Module) -> bool:
    config = getattr(layer, "config", None)
    is_gated = getattr(config, "gated_linear_unit", False)
    return isinstance(getattr(layer, "linear_fc1", None), nn.Module) and bool(is_gated)


def _declare_gated(layer: Any) -> None:
    """Declare [gate; up], which grouped experts and earlier releases do not say by a stride."""
    is_interleaved = getattr(layer.config, "moe_mlp_glu_interleave_size", None) is not None
    for name, parameter in layer.linear_fc1.named_parameters(recurse=False):
        # Blocks of gate and up in turn are cut like one tensor.
        is_one_tensor = is_interleaved and annotation_of(parameter).experts is not None
        # ``weight0`` is that of the first of several experts.
        is_stack = parameter.ndim > (2 if name.startswith("weight") else 1)
        if name.rstrip("0123456789") in ("weight", "bias") and not (is_one_tensor or is_stack):
            _declare(parameter, gate_and_up(parameter.shape[0] // 2))


def _is_recurrent(layer: nn.Module) -> bool:
    """Return whether a layer has a state that decays by ``A_log``, and Megatron-core's marks."""
    decay = getattr(layer, "A_log", None)
    is_marked = isinstance(decay, nn.Parameter) and _is_part(decay)
    return is_marked and isinstance(getattr(layer, "in_proj", None), nn.Module)


def _declare_recurrent(name: str, layer: Any, num_tp_ranks: int) -> None:
    for component, parameter, tensors in _parts_of(layer):
        if getattr(parameter, "partition_dim", -1) < 0:
            parameter.partition_dim = 0  # type: ignore[attr-defined]  # Left out up to 0.16.
        if tensors:
            stored_as = tuple("{module}.{parameter}." + tensor for tensor in tensors)
            sizes = tuple(tensors.values())
            _declare(parameter, FusedParts(tuple(tensors), sizes, stored_as=stored_as))
        elif tensors is not None and num_tp_ranks > 1:
            _check_sizes(parameter, f"{name}.{component}")
    if isinstance(getattr(layer, "out_norm", None), nn.Module):
        # It norms single heads, of which each rank has some.
        for parameter in layer.out_norm.parameters():
            set_annotation(parameter, replace(annotation_of(parameter), sums_over_tp=True))
    # A state-space layer gives its parameters to an object that serves context parallelism.
    for value in tuple(vars(layer).values()):
        _share_parameters(layer, value)


def _parts_of(layer: Any) -> Iterator[tuple[str, nn.Parameter, Mapping[str, int] | None]]:
    """Yield names and parts of weights, with the tensors of those that fuse some.

    The tensors are {} where they are not known, and None for a parameter that fuses none.
    """
    rows, channels = _tensors_of(layer)
    tensors_of: dict[str, Mapping[str, int]] = {"in_proj": rows, "conv1d": channels}
    for name, parameter in layer.named_parameters():
        owner, _, attribute = name.rpartition(".")
        # The main branch has the convolution's parameters in the layer itself.
        is_own_convolution = not owner and attribute.startswith("conv1d_")
        if _is_part(parameter) and owner in ("", "in_proj", "conv1d", "norm"):
            yield name, parameter, tensors_of.get("conv1d" if is_own_convolution else owner)


def _tensors_of(layer: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the rows of ``in_proj`` and the channels of the convolution on this rank by tensor.

    Both are empty for a layer that is not known.
    """
    if hasattr(layer, "qk_dim"):
        num_ranks = layer.tp_size
        keys, values = layer.qk_dim // num_ranks, layer.v_dim // num_ranks
        channels = {"query": keys, "key": keys, "value": values}
        heads = layer.num_value_heads // num_ranks
        rows = {**channels, "z": values, "beta": heads, "alpha": heads}
        # Variants of the main branch have other tensors.
        if hasattr(layer, "in_proj_split_names"):
            sizes = layer.in_proj_split_sections
            rows = dict(zip(layer.in_proj_split_names, sizes, strict=True))
        return rows, channels
    if hasattr(layer, "d_inner_local_tp") and not hasattr(layer, "num_householder"):
        states = layer.ngroups_local_tp * layer.d_state
        channels = {"x": layer.d_inner_local_tp, "B": states, "C": states}
        return {"z": channels["x"], **channels, "dt": layer.nheads_local_tp}, channels
    return {}, {}


def _check_sizes(parameter: nn.Parameter, name: str) -> None:
    is_known = annotation_of(parameter).fused is not None
    if not is_known and not getattr(parameter, "partition_sizes", None):
        raise NotImplementedError(
            expected(
                "a layer whose fused tensors are known",
                "one with parameters that the layer's attributes do not explain",
                where=f"'{name}' in fully_shard_model()",
                hint="Say which tensors are fused by annotate(parameter, fused=FusedParts(...)), "
                "with this rank's sizes",
            )
        )


class _ReadsParameters:
    """Reads parameters of a layer from the layer, where sharding replaces them."""

    _layer: nn.Module
    _names: Mapping[str, str]

    def __getattr__(self, attribute: str) -> Any:
        """Return a parameter that was an attribute of this object, as the layer has it."""
        if attribute in vars(self).get("_names", {}):
            return getattr(self._layer, self._names[attribute])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")


def _share_parameters(layer: nn.Module, holder: Any) -> None:
    """Let an object read those of its attributes from a layer that are the layer's parameters."""
    name_of = {id(parameter): name for name, parameter in layer._parameters.items()}
    attributes = vars(holder) if hasattr(holder, "__dict__") else {}
    names = {key: name_of[id(value)] for key, value in attributes.items() if id(value) in name_of}
    if not names:
        return
    for attribute in names:
        delattr(holder, attribute)
    holder._layer, holder._names = layer, names
    holder.__class__ = type(type(holder).__name__, (_ReadsParameters, type(holder)), {})

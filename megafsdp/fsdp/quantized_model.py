"""Quantize the parameters of a plain model, or of one that torch's ``fully_shard`` has sharded.

``quantize_`` replaces the tensors inside parameters, but keeps the parameters, their meshes and
placements. All ranks check the same global shapes before they change or exchange anything.
Afterwards only ``requantize_``, on all ranks, or FusedAdam set values. Models of megafsdp's own
``fully_shard`` keep fp32 parameters and take a recipe in their policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.uneven import local_object
from megafsdp.device.torch_private import is_replaceable, replace_tensor
from megafsdp.errors import expected, listed
from megafsdp.fsdp.params.policy import check_names
from megafsdp.fsdp.policy_names import matching_names
from megafsdp.fsdp.runtime.torch_fsdp import (
    encode_main_weights,
    quantized_parameters,
    require_main_weight,
    shard_of,
)
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.fsdp.weight_sync import watch_optimizer_steps
from megafsdp.mesh.annotation import ParameterAnnotation, annotation_of
from megafsdp.mesh.dtensor import cut_dim
from megafsdp.mesh.torch_private import (
    TorchShard,
    check_before_torch_shards,
    set_local,
    torch_shards,
)
from megafsdp.quantize.delayed import DelayedState
from megafsdp.quantize.formats import WeightFormat
from megafsdp.quantize.main_weight import MainWeight
from megafsdp.quantize.recipes import RECIPE_NAMES, QuantizationRecipe, recipe_of
from megafsdp.quantize.shard import QuantizedShard, new_shard
from megafsdp.quantize.tiles import SOURCE_DTYPES

_WHERE = "megafsdp.quantize_()"
_VALUES = "the values of megafsdp.requantize_()"


@runtime_checkable
class _Declares(Protocol):
    """A layer of megafsdp.parallel, which keeps its declarations itself.

    torch's ``fully_shard`` drops the annotations that the layer wrote on its parameters.
    """

    # Recognised by attribute names: this package does not import the layers.
    declarations: Mapping[str, ParameterAnnotation]
    weight_mesh: DeviceMesh | None


@dataclass(frozen=True, slots=True)
class _Found:
    """A parameter that is to be quantized.

    Attributes:
        name: Its FQN.
        parameter: The parameter.
        cut: How torch has cut it; None if it has not.
        weight_mesh: Ranks over which its layer asks to combine maxima.
    """

    name: str
    parameter: nn.Parameter
    cut: TorchShard | None
    weight_mesh: DeviceMesh | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the data axis divides: this rank's part on the model axes."""
        return tuple(local_object(self.parameter).shape) if self.cut is None else self.cut.shape

    @property
    def chunk(self) -> int:
        """Return the length of dimension 0 on each rank; only the last ranks may have less."""
        return -(-self.shape[0] // (1 if self.cut is None else self.cut.num_ranks))


def quantize_(
    model: nn.Module,
    recipe: str | QuantizationRecipe,
    keep_unquantized: tuple[str, ...] = (),
) -> nn.Module:
    """Quantize the weights of a model's linear layers in place.

    These are the weights of ``nn.Linear`` and those that layers of ``megafsdp.parallel`` declare,
    if the recipe's format takes their shape. Call it after torch's ``fully_shard`` if that is used,
    and before the first forward. The fp32 values are kept as main weights, which
    :class:`~megafsdp.FusedAdam` steps: other optimizers raise. Collective if the format has scales
    that the ranks dividing a parameter share: one all-reduce over these ranks.

    Args:
        model: A plain module on its device, or one that torch's ``fully_shard`` has sharded.
        recipe: A name of ``RECIPE_NAMES``, or a recipe.
        keep_unquantized: FQNs of parameters or of modules above them, patterns (``fnmatch``) of
            either, or classes of modules, that stay as they are.

    Returns:
        The model.

    Raises:
        ValueError: There is no such recipe, a name matches nothing, no weight can be quantized, or
            a rank would have part of a tile or no rows; on all ranks, before anything is changed.
        RuntimeError: The model is quantized already, has run its first forward, is sharded by
            megafsdp, or other code refers to its parameters, such as DistributedDataParallel.
    """
    recipe = recipe_of(recipe)
    check_names(keep_unquantized, "keep_unquantized", where=_WHERE)
    cuts = torch_shards(model)
    _check_model(model, cuts)
    found = list(_eligible(model, recipe, keep_unquantized, cuts))
    if not found:
        raise ValueError(
            expected(
                f"weights of linear layers that '{recipe.name}' takes",
                "none",
                where=_WHERE,
                hint="Look at shapes and keep_unquantized: rows and columns must be multiples of "
                f"{recipe.weight.multiple}",
            )
        )
    # Check all before the first is changed, by what all ranks know: no rank is left waiting.
    for each in found:
        _check_cut(each, recipe)
    _check_references(found)
    _quantize(found, recipe)
    # The hooks refuse the first step of another optimizer, before its moments change.
    watch_optimizer_steps()
    check_before_torch_shards(_refuse_quantized)
    return model


@torch.no_grad()
def requantize_(model: nn.Module, values: Mapping[str, torch.Tensor] | None = None) -> None:
    """Set the values of quantized parameters: main weights, scales and codes.

    Collective as :func:`quantize_`; all ranks give the same names. An optimizer continues from
    these values with its present moments.

    Args:
        model: A model that was given to :func:`quantize_`.
        values: Tensors by FQN, of any floating-point dtype: DTensors like the parameters, or full
            plain tensors of parameters that no model axis cuts. The other parameters (without
            ``values``, all) are quantized anew from their main weights, which may have been edited.

    Raises:
        ValueError: A name is not of a quantized parameter, or a tensor has another shape or
            placement, or a dtype that is not floating-point; nothing is changed.
    """
    parameters = quantized_parameters(model)
    shards = {name: s for name, p in parameters.items() if (s := shard_of(p)) is not None}
    rows = {}
    for name, given in (values or {}).items():
        if name not in parameters:
            raise ValueError(
                expected(
                    "names of quantized parameters, "
                    + (listed(sorted(parameters)) or "of which the model shows none"),
                    f"'{name}'",
                    where=_VALUES,
                    hint="Copy into other parameters directly"
                    if parameters
                    else "Call megafsdp.quantize_() first, and requantize_() while no parameter is "
                    "gathered, as after model.reshard()",
                )
            )
        rows[name] = _own_rows(name, parameters[name], given)
    # Write only now, after every tensor was checked. The writes are counted, so that the values
    # are known to be newer than codes that were loaded before.
    for name, own in rows.items():
        require_main_weight(shards[name]).values.copy_(own)
    encode_main_weights(list(shards.values()))


def _own_rows(name: str, parameter: nn.Parameter, given: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of values for a parameter; all ranks refuse alike."""
    own = local_object(parameter)
    is_cut = isinstance(parameter, DTensor)
    if not given.is_floating_point():
        raise ValueError(
            expected(
                "values of a floating-point dtype",
                given.dtype,
                where=f"'{name}' in {_VALUES}",
                hint="Pass decoded values, not codes",
            )
        )
    if isinstance(given, DTensor) and isinstance(parameter, DTensor):
        is_alike = given.device_mesh == parameter.device_mesh
        if is_alike and (given.placements, given.shape) == (parameter.placements, parameter.shape):
            return local_object(given).detach()
    elif not isinstance(given, DTensor) and given.shape == parameter.shape:
        placed = isinstance(parameter, DTensor) and [cut_dim(p) for p in parameter.placements]
        if not placed:
            return given
        # Replicas, then one axis that cuts rows: there is no model axis.
        if placed[-1] == 0 and all(dim is None for dim in placed[:-1]):
            assert isinstance(own, QuantizedShard), "the parameter is quantized"
            first = require_main_weight(own).first_row
            return given[first : first + own.shape[0]]
    raise ValueError(
        expected(
            f"a DTensor like the parameter, of shape {tuple(parameter.shape)}"
            + ("" if not is_cut else ", or a plain tensor of the whole that no model axis cuts"),
            f"{type(given).__name__} of shape {tuple(given.shape)}",
            where=f"'{name}' in {_VALUES}",
            hint="Make it by torch.distributed.tensor.distribute_tensor()",
        )
    )


def _check_model(model: nn.Module, cuts: Mapping[nn.Parameter, TorchShard]) -> None:
    quantized = quantized_parameters(model)
    if units_below([model]):
        what, got = "a plain model, or one of torch's fully_shard()", "units of megafsdp"
        hint = "Give fully_shard() MixedPrecisionPolicy(recipe=...) instead"
    elif quantized:
        what, got = "a model that is not quantized", f"'{next(iter(quantized))}', which is"
        hint = "Set values by megafsdp.requantize_(model, values)"
    # torch keeps the tensor that it gathered first, so its class cannot change later.
    elif any(cut.has_begun for cut in cuts.values()):
        what, got = "a call before the first forward", "a model whose forward has run"
        hint = "Call quantize_() right after fully_shard()"
    else:
        return
    raise RuntimeError(expected(what, got, where=_WHERE, hint=hint))


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield FQN, owner, attribute and parameter; a tied parameter under each of its names."""
    for path, module in model.named_modules(remove_duplicate=True):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{path}.{attribute}".lstrip("."), module, attribute, parameter


def _weight_meshes(model: nn.Module) -> dict[int, DeviceMesh | None]:
    return {
        id(parameter): module.weight_mesh
        for _, module, _, parameter in _owners(model)
        if isinstance(module, _Declares)
    }


def _eligible(
    model: nn.Module,
    recipe: QuantizationRecipe,
    keep: tuple[str, ...],
    cuts: Mapping[nn.Parameter, TorchShard],
) -> Iterator[_Found]:
    """Yield the parameters that the recipe quantizes, each once.

    Raises:
        ValueError: A name of ``keep`` matches nothing.
    """
    idle, kept = set(keep), set[int]()
    names: dict[nn.Parameter, str] = {}
    for name, module, attribute, parameter in _owners(model):
        matching = matching_names(name, module, keep)
        idle -= matching
        # Every owner of a tied weight counts: an embedding reads rows of it.
        if matching or not _is_linear_weight(module, attribute, parameter):
            kept.add(id(parameter))
        names.setdefault(parameter, name)
    if idle:
        raise ValueError(
            expected(
                "names of parameters, modules or classes of the model",
                listed(sorted(idle)),
                where=f"keep_unquantized of {_WHERE}",
                hint=f"Names are FQNs, such as '{next(iter(names.values()), '')}', or patterns",
            )
        )
    # Keep the order of the module tree, which ranks share: maxima are combined in this order.
    meshes = _weight_meshes(model)
    for parameter, name in names.items():
        each = _Found(name, parameter, cuts.get(parameter), meshes.get(id(parameter)))
        if id(parameter) not in kept and recipe.weight.reason_against(each.shape) is None:
            yield each


def _is_linear_weight(module: nn.Module, attribute: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, nn.Linear):
        return attribute == "weight"
    if isinstance(module, _Declares) and attribute in module.declarations:
        return module.declarations[attribute].is_linear_weight
    return annotation_of(parameter).is_linear_weight


def _check_cut(each: _Found, recipe: QuantizationRecipe) -> None:
    """Check, from what all ranks know, that each rank has whole tiles of a parameter.

    Raises:
        ValueError: A rank has not, or the parameter's dtype or device cannot be quantized.
    """
    form, cut, shape = recipe.weight, each.cut, each.shape
    num_ranks = 1 if cut is None else cut.num_ranks
    multiple = form.cut_multiple(shape)
    assert multiple is not None, "rows can be cut"
    # If the ranks share a scale, any number of rows will do, but each rank needs some to learn it.
    has_own_scales = len(shape) == 3 or form.tile is not None
    what = hint = ""
    if each.parameter.dtype not in SOURCE_DTYPES or each.parameter.is_meta:
        what, hint = "values of fp32, bf16 or fp16", "Cast and initialise the model first"
        got = f"{each.parameter.dtype} on {each.parameter.device}"
    elif cut is not None and (cut.is_on_host or cut.has_inner_mesh or cut.dim != 0):
        what, got = (
            "rows on the device, on one mesh",
            "an offload_policy, another placement or mesh",
        )
        hint = "Call torch's fully_shard() without them, with reshard_after_forward True or False"
    elif has_own_scales and num_ranks > 1 and shape[0] % (num_ranks * multiple):
        unit = "matrices" if len(shape) == 3 else "rows"
        what = f"{unit} that are a multiple of {num_ranks * multiple}, {multiple} for each rank"
        got, hint = f"{shape[0]} on {num_ranks} ranks", _hint_of_rows(form, shape)
    elif (num_ranks - 1) * each.chunk >= shape[0]:
        what, got = "rows for each rank", f"{shape[0]} on {num_ranks} ranks"
        hint = "Name the weight in keep_unquantized, or divide it among fewer ranks"
    elif form.has_shared_scale(shape) and not _has_all_ranks(each):
        what, got = "a weight_mesh with all ranks that divide rows", f"{each.weight_mesh}"
        hint = "Give set_device_mesh() another weight_mesh, or none"
    if what:
        where = f"'{each.name}' of shape {shape} in {_WHERE} with '{recipe.name}'"
        raise ValueError(expected(what, got, where=where, hint=hint))


def _check_references(found: Sequence[_Found]) -> None:
    """Check that plain parameters can be replaced: no other code may refer to them."""
    plain = [each for each in found if not isinstance(each.parameter, DTensor)]
    name = next((each.name for each in plain if not is_replaceable(each.parameter)), None)
    if name is not None:
        raise RuntimeError(
            expected(
                "parameters that nothing but modules and optimizers refers to",
                "others, as DistributedDataParallel, graphs of outputs and weak references are",
                where=f"'{name}' in {_WHERE}",
                hint="Quantize before DistributedDataParallel(model, init_sync=False), on ranks "
                "of equal weights, and drop outputs of earlier forwards",
            )
        )


def _has_all_ranks(each: _Found) -> bool:
    """Return whether the weight_mesh, if given, has all ranks that divide the parameter."""
    if each.weight_mesh is None or each.cut is None or each.cut.num_ranks == 1:
        return True
    assert each.cut.group is not None, "several ranks are a group"
    dividing = dist.get_process_group_ranks(each.cut.group)
    return set(dividing) <= set(each.weight_mesh.mesh.flatten().tolist())


def _hint_of_rows(form: WeightFormat, shape: tuple[int, ...]) -> str:
    if len(shape) == 3:
        return "Name the stack in keep_unquantized, or divide it among fewer ranks"
    free = [name for name in RECIPE_NAMES if recipe_of(name).weight.tile is None]
    return (
        f"Use a recipe of one scale a weight, {' or '.join(free)}, fewer ranks, megafsdp's own "
        "fully_shard(), or keep_unquantized"
    )


def _main_weight(each: _Found, recipe: QuantizationRecipe, values: torch.Tensor) -> MainWeight:
    """Return the main weight of a parameter: its rows, their place, and the ranks of its scales."""
    form, is_stack = recipe.weight, len(each.shape) == 3
    is_shared = form.has_shared_scale(each.shape)
    groups: list[dist.ProcessGroup] = []
    # Replicas have the same values, hence the same maxima: they need not combine them.
    if is_shared and each.weight_mesh is not None:
        if each.weight_mesh.size() > 1:
            groups.append(each.weight_mesh.get_group())
    elif is_shared or form.is_per_tensor:
        if not is_stack:
            groups += _data_groups(each)
        # Axes may cut rows or columns of a stack's matrices; one that cuts dim 0 leaves them whole.
        groups += [
            axis.group
            for axis in _model_axes(each)
            if axis.dim is not None and not (is_stack and axis.dim == 0)
        ]
    # Inputs and gradients of replicas differ, yet all must continue from one checkpoint: combine
    # their histories.
    everyone = [*_data_groups(each), *_replicas(each), *(a.group for a in _model_axes(each))]
    recorded = everyone if recipe.history and recipe.input is not None else []
    first = 0 if each.cut is None else each.cut.rank * each.chunk
    shape, offset = each.shape, first
    if not is_shared:
        # A rank's own tiles or matrices form a grid by themselves.
        shape, offset = tuple(values.shape), 0
    elif not form.is_per_tensor:
        shape, offset = _joined_parts(each, first)
    return MainWeight(
        values,
        shape,
        offset,
        tuple(groups),
        first_row=first,
        recorded_groups=tuple(_not_combined(recorded, groups)),
    )


def _joined_parts(each: _Found, first: int) -> tuple[tuple[int, ...], int]:
    """Return the shape of all parts of a matrix stacked as rows, and this rank's first row in it.

    The tiles of all parts are then tiles of one matrix, whichever dimension the model axes cut.
    """
    rows, cols = each.shape
    # Number the parts alike on all ranks: the last axis varies fastest.
    num_parts, part = 1, 0
    for axis in _model_axes(each):
        if axis.dim is not None:
            num_parts, part = num_parts * axis.size, part * axis.size + axis.rank
    return (num_parts * rows, cols), part * rows + first


def _scale_shape(
    each: _Found, form: WeightFormat, groups: Sequence[dist.ProcessGroup]
) -> tuple[int, ...]:
    """Return the shape that shares one scale, including the parts whose maxima are combined."""
    if not form.has_shared_scale(each.shape):
        return ()
    shape = list(each.shape)
    # A layer's weight_mesh may leave out an axis; parts along it then have scales of their own.
    for axis in _model_axes(each):
        if axis.dim is not None and not list(_not_combined([axis.group], groups)):
            shape[axis.dim] *= axis.size
    return tuple(shape)


@dataclass(frozen=True, slots=True)
class _ModelAxis:
    """A model axis of several ranks, on which a parameter lies.

    Attributes:
        group: The process group of the axis.
        size: The number of its ranks.
        rank: This rank's number on it.
        dim: The dimension of the parameter that it cuts; None if all ranks have the same values.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    dim: int | None


def _model_axes(each: _Found) -> list[_ModelAxis]:
    cut = each.cut
    mesh, placements = (None, ()) if cut is None else (cut.model_mesh, cut.model_placements)
    # Without torch's fully_shard the parameter itself lies on the model axes alone.
    if cut is None and isinstance(each.parameter, DTensor):
        mesh, placements = each.parameter.device_mesh, each.parameter.placements
    if mesh is None:
        return []
    return [
        _ModelAxis(
            mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), cut_dim(placement)
        )
        for axis, placement in enumerate(placements)
        if mesh.size(axis) > 1
    ]


def _data_groups(each: _Found) -> list[dist.ProcessGroup]:
    """Return the ranks that have other rows of a parameter."""
    cut = each.cut
    return [] if cut is None or cut.group is None or cut.num_ranks == 1 else [cut.group]


def _replicas(each: _Found) -> list[dist.ProcessGroup]:
    """Return the data ranks that have the same rows."""
    replicas = None if each.cut is None else each.cut.replicas
    return [] if replicas is None or replicas.size() == 1 else [replicas]


def _not_combined(
    wanted: Sequence[dist.ProcessGroup], groups: Sequence[dist.ProcessGroup]
) -> Iterator[dist.ProcessGroup]:
    """Yield the wanted groups that lie in none of the groups that already combine maxima."""
    # Compare ranks: a flattened mesh has its own group for the ranks of several axes.
    combined = [set(dist.get_process_group_ranks(group)) for group in groups]
    for group in wanted:
        ranks = set(dist.get_process_group_ranks(group))
        if not any(ranks <= others for others in combined):
            yield group


# Tensors made in inference mode do not count writes, but parameters must.
@torch.inference_mode(mode=False)
@torch.no_grad()
def _quantize(found: list[_Found], recipe: QuantizationRecipe) -> None:
    """Encode all parameters into new buffers, then put these in their place; collective."""
    shards = []
    for each in found:
        rows = local_object(each.parameter).detach()
        # Copy: a view would keep alive the padded shard that torch frees at the first forward.
        values = rows.to(torch.float32, copy=True).contiguous()
        state = None
        if recipe.history:
            num_matrices = rows.shape[0] if rows.ndim == 3 else 1
            state = DelayedState(recipe.history, num_matrices=num_matrices, device=rows.device)
        main = _main_weight(each, recipe, values)
        shard = new_shard(
            rows.shape,
            recipe,
            dtype=each.parameter.dtype,
            device=rows.device,
            state=state,
            fqn=each.name,
            main=main,
            scale_shape=_scale_shape(each, recipe.weight, main.groups),
        )
        shards.append(shard)
    # The buffers are new, so a collective that fails leaves the model as it was.
    encode_main_weights(shards, has_recorded=False)
    for each, shard in zip(found, shards, strict=True):
        # torch looks for gather hooks again at the first forward.
        if isinstance(each.parameter, DTensor):
            set_local(each.parameter, shard)
        else:
            replace_tensor(each.parameter, nn.Parameter(shard, each.parameter.requires_grad))


def _refuse_quantized(module: nn.Module) -> None:
    """Raise if torch is to shard quantized parameters: it would lose their fp32 values."""
    name = next(iter(quantized_parameters(module)), None)
    if name is not None:
        raise RuntimeError(
            expected(
                "torch's fully_shard() before megafsdp.quantize_()",
                f"'{name}', which is quantized",
                where=f"fully_shard() of {type(module).__name__}",
                hint="Shard the model first, then quantize it",
            )
        )

"""Find the modules that become units, the parameters of each unit, and their groups.

A unit owns the parameters below its modules that no unit below it owns. They are grouped by dtypes,
by whether they require a gradient, by the meshes that divide them, and by whether they can be cut
at all: parameters without dimensions or elements, and plain integers, are whole on every rank.
Parameters that ``MixedPrecisionPolicy.keep_fp32`` names compute in fp32 and have groups of their
own; so have those that ``param_dtype_override_fn`` leaves in their own dtype, and weights that a
recipe quantizes.

What would make the engine wrong later is refused here, before anything is changed. Buffers are laid
out by :class:`~megafsdp.fsdp.params.parameter_group.ParameterGroup`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megafsdp.buffer.comm.agreement import rank_and_world_size
from megafsdp.buffer.comm.collectives import backends
from megafsdp.buffer.dtensor.uneven import local_object
from megafsdp.device.torch_private import num_gradient_hooks
from megafsdp.errors import expected
from megafsdp.fsdp.division import Division
from megafsdp.fsdp.eligible import check_quantization, quantization_of
from megafsdp.fsdp.params.group_buffers import GroupDtypes
from megafsdp.fsdp.params.managed_parameter import ManagedParameter
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.packed import check_devices, is_packed
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy, Quantization, Strategy
from megafsdp.fsdp.params.unit_ledger import UnitMemory
from megafsdp.fsdp.params.wrapped import is_wrapped
from megafsdp.fsdp.policy_names import UnitNames
from megafsdp.fsdp.runtime.guards import is_ignored_at, refuse_gradient
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.torch_private import is_arriving

_LOGGER = logging.getLogger("megafsdp.fsdp")
# Set on full parameters: the name of the unit that owns the sharded form, and the FQN in it.
_OWNER_ATTRIBUTE = "_megafsdp_owner"


@dataclass(frozen=True)
class GroupKey:
    """The properties that the parameters of one group have in common.

    Attributes:
        dtypes: Dtypes of the group's buffers.
        requires_grad: Whether they get gradients.
        is_whole: Whether they are whole on every rank, whatever the strategy.
        is_expert: Whether they are divided over the mesh of experts.
        model_mesh: The model axis that also cuts or repeats them; None without one.
        weight_mesh: Ranks that combine a recipe's maxima of them; None for the ranks that divide
            them.
        quantization: How their compute weights are quantized; None for a cast.
    """

    dtypes: GroupDtypes
    requires_grad: bool
    is_whole: bool
    is_expert: bool
    model_mesh: DeviceMesh | None
    weight_mesh: DeviceMesh | None
    quantization: Quantization | None


@dataclass
class FoundParameter:
    """A parameter that a unit will own.

    Attributes:
        parameter: The parameter as the user made it.
        record: The engine's record of it.
        compute_dtype: The dtype of its compute weight if the policy chose one for it: fp32 if
            ``keep_fp32`` names it, by any of the names of a tie.
        is_kept_unquantized: Whether ``keep_unquantized`` names it.
        is_expert: Whether it is divided over the mesh of experts.
    """

    parameter: nn.Parameter
    record: ManagedParameter
    compute_dtype: torch.dtype | None = None
    is_kept_unquantized: bool = False
    is_expert: bool = False


def find_units(
    model: nn.Module, fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None
) -> list[nn.Module]:
    """Return the modules below a model that are of some classes, in the order of ``modules()``.

    Args:
        model: The model to search. It is never in the result, but its class may be the only one
            that is named.
        fsdp_unit_modules: As for ``fully_shard_model``.

    Raises:
        TypeError: One class or name is given instead of a list.
        ValueError: No class is named, or neither the model nor a module below it is of a named
            class.
    """
    wanted = fsdp_unit_modules
    # One string would be taken for the names of its characters.
    if isinstance(wanted, str | type):
        raise TypeError(
            expected(
                "a list of classes or of their names",
                repr(wanted),
                where=f"fully_shard_model() on {type(model).__name__}",
                hint=f"Write [{wanted!r}]" if isinstance(wanted, str) else "Put it into a list",
            )
        )
    if wanted is None:
        wanted = sorted(getattr(model, "_no_split_modules", None) or ())
    # The model itself becomes the root, whatever its class.
    units = [m for m in model.modules() if m is not model and _is_one_of(m, wanted)]
    if not units and not _is_one_of(model, wanted):
        present = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(
            expected(
                "classes of the model or of modules below it",
                f"{[str(cls) for cls in wanted]}",
                where=f"fully_shard_model() on {type(model).__name__}",
                hint=f"Name classes among {present}",
            )
        )
    return units


def _is_one_of(module: nn.Module, wanted: Sequence[type[nn.Module] | str]) -> bool:
    # Compare base classes too: a module that is a unit already has a generated class.
    for cls in type(module).__mro__:
        names = {cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}"}
        if any(cls is each or each in names for each in wanted):
            return True
    return False


def leave_out_tied(
    model: nn.Module, units: Sequence[nn.Module], ignored: Iterable[nn.Parameter]
) -> list[nn.Module]:
    """Return the units that have no parameter tied to one outside of them; log the others.

    The parameters of those left out belong to the unit around them: a tied parameter has one main
    weight, so all its users must be in one unit.

    Args:
        model: The root.
        units: Modules below it, none of them a unit yet.
        ignored: Parameters to leave alone.
    """
    kept, reasons = list(units), []
    ignored_ids = _ids_of(ignored)
    while tied := _tied_outside(model, kept, ignored_ids):
        kept = [unit for unit in kept if unit not in tied]
        reasons += [f"{type(unit).__name__} ({names})" for unit, names in tied.items()]
    # All ranks have the same model, and one line is enough.
    if reasons and rank_and_world_size()[0] == 0:
        _LOGGER.warning(
            "Not made units, because parameters are tied to others outside of them: %s. The unit "
            "around gathers them with its own parameters",
            "; ".join(reasons),
        )
    return kept


def _tied_outside(
    model: nn.Module, units: Sequence[nn.Module], ignored_ids: set[int]
) -> dict[nn.Module, str]:
    """Return the units with a parameter that is also outside of them, and the names of the tie."""
    chosen = set(units)
    below = {unit: set(unit.modules()) for unit in units}
    fqns = {module: name for name, module in model.named_modules()}
    # For each parameter, by id: the units that would own it, with its FQN there.
    owners: dict[int, dict[nn.Module, str]] = {}
    for unit in (model, *units):
        inner = [m for m in unit.modules() if m in chosen and m is not unit]
        owned_below = set().union(*(below[m] for m in inner))
        for module in unit.modules():
            if module in owned_below:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in ignored_ids and group_of(parameter) is None:
                    fqn = f"{fqns[module]}.{name}".lstrip(".")
                    owners.setdefault(id(parameter), {}).setdefault(unit, fqn)
    tied: dict[nn.Module, str] = {}
    for names in owners.values():
        for unit in chosen.intersection(names):
            outside = [name for other, name in names.items() if other not in below[unit]]
            if outside:
                tied[unit] = f"'{names[unit]}' is '{outside[0]}'"
    return tied


def _ids_of(ignored: Iterable[object]) -> set[int]:
    """Return the ids of ignored parameters: comparing tensors compares their elements.

    Raises:
        TypeError: One is no parameter: a name would ignore nothing.
    """
    parameters = list(ignored)
    for each in parameters:
        if not isinstance(each, torch.Tensor):
            raise TypeError(
                expected(
                    "parameters",
                    repr(each),
                    where="ignored_params of fully_shard()",
                    hint="Give the parameters themselves, such as {model.embedding.weight}",
                )
            )
    return {id(parameter) for parameter in parameters}


def find_parameters(
    modules: Sequence[nn.Module], ignored: Iterable[nn.Parameter], policy: MixedPrecisionPolicy
) -> list[FoundParameter]:
    """Return the parameters below the modules that no unit owns or ignores, in module order.

    Args:
        modules: Modules of one unit.
        ignored: Parameters to leave alone.
        policy: Names the parameters that compute in fp32, and those that stay unquantized.

    Raises:
        TypeError: Something else than a parameter is ignored.
        ValueError: A parameter belongs to another unit already (it is tied across units, or an
            outer unit was made first), or has gradient hooks that its sharded form would not have,
            or the policy's function chose a dtype that it may not.
            Or a name in the policy matches only parameters of inner units, which have another
            policy.
        NotImplementedError: A parameter is of a subclass (other than DTensor, frozen ones that are
            packed, and wrappers of a plain tensor), complex, or floating-point of 8 bits, or of a
            module that ``torch.jit`` has compiled.
    """
    ignored_ids = _ids_of(ignored)
    owned_below = {id(g) for unit in units_below(modules).values() for g in unit.groups}
    found: dict[int, FoundParameter] = {}
    fp32_names = UnitNames("keep_fp32", policy)
    unquantized_names = UnitNames("keep_unquantized", policy)
    for root in modules:
        for prefix, module in root.named_modules():
            for attribute, parameter in module._parameters.items():
                # As in torch, what an inner unit ignores is nothing to this one.
                is_ignored = id(parameter) in ignored_ids or is_ignored_at(module, attribute)
                if parameter is None or is_ignored:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                group = group_of(parameter)
                if group is not None:
                    _check_owner(name, root, group, is_below=id(group) in owned_below)
                    if parameter.is_floating_point() and group.dtypes.compute != torch.float32:
                        fp32_names.miss(name, module)
                    if group.quantization is not None:
                        unquantized_names.miss(name, module)
                    continue
                # A tied parameter is found again under each of its names: one record, all owners.
                if id(parameter) not in found:
                    _check_module(name, module)
                    found[id(parameter)] = _found(name, parameter, policy)
                item = found[id(parameter)]
                if fp32_names.apply(name, module):
                    item.compute_dtype = torch.float32
                item.is_kept_unquantized |= unquantized_names.apply(name, module)
                item.record.owners.append((weakref.ref(module), attribute))
    _keep_ties(modules, found)
    fp32_names.check()
    unquantized_names.check()
    return list(found.values())


def _keep_ties(modules: Sequence[nn.Module], found: Mapping[int, FoundParameter]) -> None:
    """Note the places where an inner unit ignores a parameter that is also found outside of it."""
    for module in dict.fromkeys(m for root in modules for m in root.modules()):
        for attribute, parameter in module._parameters.items():
            item = found.get(id(parameter))
            if item is not None and is_ignored_at(module, attribute):
                item.record.owners.append((weakref.ref(module), attribute))


def _found(name: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> FoundParameter:
    _check(name, parameter)
    item = FoundParameter(parameter, ManagedParameter(name, [], parameter.shape))
    if parameter.is_floating_point() and not is_packed(parameter):
        item.compute_dtype = policy.overridden_dtype(parameter, name)
    return item


def group_parameters(
    found: Sequence[FoundParameter], policy: MixedPrecisionPolicy
) -> dict[GroupKey, list[FoundParameter]]:
    """Divide found parameters into groups, in order of their first parameters."""
    groups: dict[GroupKey, list[FoundParameter]] = {}
    for item in found:
        parameter, part = item.parameter, item.record.model.part
        # Whole if it has no rows to cut. The last rank of the model axis has the smallest part:
        # all ranks look at that one, or their groups and collectives would differ.
        is_whole = parameter.ndim == 0 or part.of_rank(part.num_ranks - 1).local_numel == 0
        has_bits = is_packed(parameter)
        if parameter.is_floating_point() and not has_bits:
            grad = policy.grad_dtype(parameter.dtype)
            dtypes = GroupDtypes(
                compute=policy.compute_dtype(parameter.dtype, named=item.compute_dtype),
                main=policy.main_dtype(parameter.dtype),
                grad=grad,
                reduce=policy.reduce_dtype or grad,
            )
        else:
            # Neither integers nor packed bits, of which a cast would change the NaN, have a
            # gradient to reduce: all four dtypes are the parameter's own.
            dtypes = GroupDtypes(*[parameter.dtype] * 4)
            is_whole |= not has_bits
        key = GroupKey(
            dtypes,
            parameter.requires_grad,
            is_whole,
            item.is_expert,
            item.record.model.mesh,
            annotation_of(parameter).weight_mesh,
            quantization_of(item, policy),
        )
        groups.setdefault(key, []).append(item)
    return groups


def build_groups(
    found: Sequence[FoundParameter],
    policy: MixedPrecisionPolicy,
    division: Division,
    memory: UnitMemory,
) -> list[ParameterGroup]:
    """Make the parameter groups of a unit; local, except to make process groups on first use.

    Raises:
        ValueError: A ``weight_mesh`` lacks ranks that divide its parameters, weights to quantize
            are of a dtype that no format takes, or packed weights are not on the mesh's device.
        NotImplementedError: Weights to quantize are to live on the host.
    """
    check_devices({item.record.name: item.parameter for item in found}, division.mesh.device_type)
    check_quantization(found, policy, memory.offload)
    groups = group_parameters(found, policy)
    axes = [_axes_of(key, items[0].record.name, division) for key, items in groups.items()]
    for own_axes, items in zip(axes, groups.values(), strict=True):
        for item in items:
            item.record.is_cut_evenly = division.is_even and own_axes.num_shards > 1
    return [
        ParameterGroup(
            [item.parameter for item in items],
            [item.record for item in items],
            axes=own_axes,
            dtypes=key.dtypes,
            memory=memory,
            # A whole group is never gathered: its buffers are those of a replica.
            strategy=Strategy.NO_SHARD if key.is_whole else division.strategy,
            gradient_scale=division.gradient_scale,
            quantization=key.quantization,
        )
        for own_axes, (key, items) in zip(axes, groups.items(), strict=True)
    ]


def _axes_of(key: GroupKey, name: str, division: Division) -> DataParallelAxes:
    axes = division.axes(is_whole=key.is_whole, is_expert=key.is_expert, model_mesh=key.model_mesh)
    if key.weight_mesh is None:
        return axes
    dividing = dist.get_process_group_ranks(axes.shard_group) if axes.is_sharded else []
    missing = set(dividing).difference(key.weight_mesh.mesh.flatten().tolist())
    # If ranks encoded rows of one tensor with different scales, the gathered codes would be wrong.
    if missing:
        raise ValueError(
            expected(
                "a weight_mesh with all ranks that divide the parameter",
                f"{key.weight_mesh}, without ranks {sorted(missing)}",
                where=f"'{name}' in fully_shard()",
                hint="Give set_device_mesh() the data mesh, or one that contains it, or none",
            )
        )
    return axes.with_maxima_over(key.weight_mesh)


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move the buffers below modules to the device of the mesh, as parameters are; local.

    The tensors stay the same objects. Not moved are buffers on the meta device, DTensors, and all
    buffers if the mesh is of meta devices. Buffers of modules with ignored parameters are moved.
    """
    for module in modules if device.type != "meta" else ():
        for buffer in module.buffers():
            if not (buffer.is_meta or isinstance(buffer, DTensor) or buffer.device == device):
                buffer.data = buffer.to(device)


def claim(found: Sequence[FoundParameter], unit_name: str) -> None:
    """Mark original and full parameters as owned, so that other code recognises them."""
    for item in found:
        # Mark the unsharded one too: within summon_full_params() model.parameters() returns it.
        for parameter in (item.parameter, item.record.unsharded):
            setattr(parameter, _OWNER_ATTRIBUTE, (unit_name, item.record.name))
        if item.parameter.requires_grad:
            item.parameter.register_hook(partial(refuse_gradient, item.record.name, unit_name))


def is_replaced(parameter: torch.Tensor) -> bool:
    """Return whether ``fully_shard`` has replaced this full parameter by a sharded one."""
    return hasattr(parameter, _OWNER_ATTRIBUTE)


def _check_owner(name: str, root: nn.Module, group: ParameterGroup, *, is_below: bool) -> None:
    # An outer unit was made first and owns the parameter, which can have only one owner.
    if not is_below:
        raise ValueError(
            expected(
                f"parameters of {type(root).__name__} that no unit outside of it owns",
                f"'{name}', which unit '{group.label}' owns",
                where="fully_shard()",
                hint="Call fully_shard() on inner units first, on the root last",
            )
        )


def _check_module(name: str, module: nn.Module) -> None:
    # It takes no hooks, and reads other parameters than those that are put into it.
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError(
            expected(
                "parameters of Python modules",
                f"'{name}', of a module that torch.jit has compiled",
                where="fully_shard()",
                hint="Shard the module that was compiled, with torch.compile() for speed; or name "
                "its parameters in ignored_params",
            )
        )


def _check(name: str, parameter: nn.Parameter) -> None:
    # A parameter tied across units would get two main weights, each with a part of the gradient.
    owner = getattr(parameter, _OWNER_ATTRIBUTE, None)
    if owner is not None:
        raise ValueError(
            expected(
                "parameters that belong to one unit",
                f"'{name}', which is also '{owner[1]}' of the unit {owner[0]}",
                where="fully_shard()",
                hint="Give the modules that share it to one call: fully_shard([first, second])",
            )
        )
    # Hooks would stay on the original, which autograd never reaches again.
    if num_gradient_hooks(parameter):
        raise ValueError(
            expected(
                "parameters without gradient hooks",
                f"a hook on '{name}'",
                where="fully_shard(), which replaces the parameter",
                hint="Call register_post_accumulate_grad_hook() after fully_shard()",
            )
        )
    # A parameter over a flat buffer has none of the subclass's operations.
    local = local_object(parameter)
    is_plain = type(local) in (nn.Parameter, torch.Tensor) or is_arriving(local)
    if not (is_plain or is_packed(parameter) or is_wrapped(parameter)):
        cls = type(local)
        hint = "Name it in ignored_params, which leaves it whole on every rank, or convert or "
        hint += "quantize after training"
        if nn.parameter.is_lazy(parameter):
            hint = "Run a forward of the lazy module first, which gives it a shape"
        raise NotImplementedError(
            expected(
                "parameters that are plain tensors",
                f"'{name}', a {cls.__module__}.{cls.__qualname__}",
                where="fully_shard()",
                hint=hint,
            )
        )
    # A real main weight drops imaginary parts; a compute weight of 8 bits would need scales.
    if parameter.is_complex() or (parameter.is_floating_point() and parameter.dtype.itemsize < 2):
        raise NotImplementedError(
            expected(
                "floating-point parameters of at least 16 bits, or frozen integers",
                f"'{name}' of {parameter.dtype}",
                where="fully_shard()",
                hint="Name it in ignored_params, or make it a buffer",
            )
        )


def device_type_of(found: Sequence[FoundParameter]) -> str:
    """Return the device type of a default mesh: that of all found parameters, or ``cpu``.

    Parameters on the meta device do not count; if all are there, CUDA is taken if it is available.
    If the default process group serves a single device type, as NCCL does, that type is taken, and
    parameters on the host are moved there.

    Raises:
        ValueError: The parameters are on several device types.
    """
    types = sorted({item.parameter.device.type for item in found if not item.parameter.is_meta})
    if len(types) > 1:
        raise ValueError(
            expected(
                "parameters on one device",
                f"{types}",
                where="fully_shard()",
                hint="Move the module to one device first",
            )
        )
    served = list(backends(dist.group.WORLD)) if dist.group.WORLD is not None else []
    if types and not (types == ["cpu"] and len(served) == 1):
        return types[0]
    if len(served) == 1:
        return served[0]
    # The mesh is made for the device that materialize() or a load will fill.
    return torch.device("cuda" if found and torch.cuda.is_available() else "cpu").type

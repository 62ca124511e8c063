"""Keep track of parameters and buffers that came on the meta device and have no values yet.

The sharded parameters of units lie in flat buffers from the start; a mark on each records whether
it has values. Buffers, and parameters outside of units, are replaced by tensors with memory. These
are full of NaN (bytes of 0x7F if the dtype has no NaN), so their content shows whether they were
written. Operations that need values are refused while any tensor has none.

Values come from :mod:`megafsdp.fsdp.materialize` and from loads, not from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafsdp.buffer.dtensor.uneven import local_tensor, wrap_like
from megafsdp.buffer.dtensor.unwritten import is_unwritten, mark_unwritten, mark_written
from megafsdp.device.memory import poison
from megafsdp.errors import expected, listed
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.fsdp.params.wrapped import rewrapped
from megafsdp.mesh.annotation import copy_annotation
from megafsdp.mesh.torch_private import attributes_of


def mark_initialized(
    groups: Iterable[ParameterGroup], parameters: Iterable[torch.Tensor] | None = None
) -> None:
    """Note that the given sharded parameters of groups, or all, have values; local."""
    # Compare ids: comparing DTensors compares their elements.
    given = None if parameters is None else {id(parameter) for parameter in parameters}
    for group in groups:
        for record in group.parameters:
            if given is None or id(record.sharded) in given:
                mark_written(record.sharded)


def device_of(groups: Sequence[ParameterGroup]) -> torch.device:
    """Return the device of groups of one model; torch's default device if there are none."""
    return groups[0].device if groups else torch.get_default_device()


def uninitialized_names(module: nn.Module) -> list[str]:
    """Return the FQNs of parameters and buffers without values below a module at rest; local."""
    parameters = list(module.named_parameters())
    groups = {group for _, p in parameters if (group := group_of(p)) is not None}
    # On a mesh of meta devices, a dry run, no tensor ever has values.
    if any(group.device.type == "meta" for group in groups):
        return []
    tensors = [*parameters, *module.named_buffers()]
    return [name for name, tensor in tensors if _is_without_values(tensor)]


def _is_without_values(tensor: torch.Tensor) -> bool:
    if group_of(tensor) is not None:
        return is_unwritten(tensor)
    # torch counts no write through .data, so look at the content of other tensors, too.
    return tensor.is_meta or (is_unwritten(tensor) and not is_filled(tensor))


def require_initialized(modules: Iterable[nn.Module], *, where: str) -> None:
    """Refuse parameters and buffers without values; local, alike on ranks with the same history.

    Args:
        modules: Modules, at rest, that must have values.
        where: The call that needs them, for the message.

    Raises:
        RuntimeError: A parameter or buffer has no values.
    """
    missing = [name for module in modules for name in uninitialized_names(module)]
    if missing:
        raise RuntimeError(
            expected(
                "initialised parameters and buffers",
                f"{quote(missing)} without values, as they came on the meta device",
                where=where,
                hint="Call megafsdp.materialize(model) first, or to_empty() and initialisers that "
                "write them, or load a checkpoint, or call megafsdp.load_full_state_dict()",
            )
        )


def quote(names: Sequence[str]) -> str:
    """Return names for a message, at most twenty of them."""
    return listed([f"'{name}'" for name in names])


@dataclass(frozen=True, eq=False)
class PlainTensor:
    """A buffer, or a parameter outside of units, and its place.

    Attributes:
        name: FQN within the model.
        module: The module that it is an attribute of.
        attribute: Its name there.
        original: The tensor that was found.
    """

    name: str
    module: nn.Module
    attribute: str
    original: torch.Tensor

    def give_memory(self, made: dict[int, torch.Tensor], device: torch.device) -> None:
        """Replace the meta tensor by an unfilled one, unless that was done already.

        Args:
            made: The replacements by the id of the meta tensor, which keep ties; extended here.
            device: The device for the memory.
        """
        # If not, an initialiser has replaced it, or a shared module is visited again.
        if getattr(self.module, self.attribute) is self.original:
            key = id(self.original)
            if key not in made:
                made[key] = _unfilled_like(self.original, device)
            setattr(self.module, self.attribute, made[key])

    def is_filled(self) -> bool:
        """Return whether the tensor that is now in its place was written."""
        tensor = getattr(self.module, self.attribute, None)
        if not isinstance(tensor, torch.Tensor):
            return True
        return not tensor.is_meta and is_filled(tensor)

    def restore(self, values: torch.Tensor | None = None) -> None:
        """Put back the tensor that was found, with values if they are given."""
        if values is not None:
            self.original.copy_(values)
        setattr(self.module, self.attribute, self.original)


def find_plain_tensors(model: nn.Module, *, is_meta: bool) -> dict[int, list[PlainTensor]]:
    """Return the tensors of no unit below a model, without values or with them, by module id."""
    found: dict[int, list[PlainTensor]] = {}
    for prefix, module in model.named_modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            # Sharded parameters of units have memory.
            if tensor is None or group_of(tensor) is not None:
                continue
            if _is_without_values(tensor) == is_meta:
                name = f"{prefix}.{attribute}" if prefix else attribute
                item = PlainTensor(name, module, attribute, tensor)
                found.setdefault(id(module), []).append(item)
    return found


def give_memory_to_meta_tensors(
    model: nn.Module, device: torch.device, *, is_wanted: Callable[[str], bool]
) -> None:
    """Replace the meta tensors with some names by unfilled ones, into which values are copied.

    Args:
        model: The module that contains them.
        device: The device for the memory.
        is_wanted: Returns whether to replace the tensor with an FQN in ``model``.
    """
    # One dict for all modules: tied tensors get one replacement.
    made: dict[int, torch.Tensor] = {}
    for items in find_plain_tensors(model, is_meta=True).values():
        for item in items:
            if is_wanted(item.name):
                item.give_memory(made, device)


def give_memory_as(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *, recurse: bool
) -> None:
    """Do what ``to_empty()`` does: give meta tensors memory without values; local.

    Sharded parameters have memory already; they only stop being shown as meta tensors.

    Args:
        module: The module on which ``_apply()`` was called.
        fn: Makes memory for a tensor on the device given to ``to_empty()``.
        recurse: Whether to include the modules below.
    """
    for parameter in module.parameters(recurse=recurse):
        if group_of(parameter) is not None and is_unwritten(parameter):
            mark_unwritten(parameter)
    made: dict[int, torch.Tensor] = {}
    for owner, items in find_plain_tensors(module, is_meta=True).items():
        for item in items if recurse or owner == id(module) else ():
            if item.original.is_meta:
                item.give_memory(made, fn(item.original).device)


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the attributes that users set on a tensor."""
    for name, value in attributes_of(source).items():
        # Our own attributes belong to one tensor: its group, and the place of its rows.
        if not name.startswith(("_megafsdp", "_uneven_layout")):
            setattr(target, name, value)


def is_filled(tensor: torch.Tensor) -> bool:
    """Return whether no NaN is left or, if the dtype has no NaN, any byte was written."""
    tensor = local_tensor(tensor)
    if tensor.numel() == 0:
        return True
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        return not bool(tensor.isnan().any())
    # Compare bytes: FP8 and integers have no NaN that could mark unwritten elements.
    untouched = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    poison(untouched)
    as_bytes = tensor.reshape(-1).contiguous().view(torch.uint8)
    return not torch.equal(as_bytes, untouched.view(torch.uint8))


def _unfilled_like(original: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A tensor made in inference mode could never be trained outside of it.
    with torch.inference_mode(False), torch.no_grad():
        given = local_tensor(original)
        made = torch.empty(given.numel(), dtype=original.dtype, device=device)
        poison(made)
        # The part of a rank of a model axis stays a DTensor.
        made = wrap_like(original, rewrapped(given, made.view(given.shape)))
        if isinstance(original, nn.Parameter):
            made = nn.Parameter(made, requires_grad=original.requires_grad)
    copy_attributes(original, made)
    copy_annotation(original, made)
    mark_unwritten(made)
    return made

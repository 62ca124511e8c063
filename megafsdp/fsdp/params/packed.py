"""Frozen parameters whose elements are bits, such as 4-bit codes that lie in a tensor of bf16.

Their class and attributes decode them, so the gathered parameter gets both; the bits themselves are
copied and gathered as they are. Which parameters :func:`~megafsdp.fully_shard` refuses is decided
in :mod:`megafsdp.fsdp.grouping`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from megafsdp.errors import expected, listed
from megafsdp.mesh.torch_private import attributes_of


def is_packed(parameter: nn.Parameter) -> bool:
    """Return whether a frozen parameter is of a subclass that decodes its elements; local.

    bitsandbytes has such a class for 4 bits. That for 8 bits does not count: its layers read copies
    that they have made of the whole weight.
    """
    cls, dtype = type(parameter), parameter.dtype
    if parameter.requires_grad or not issubclass(cls, nn.Parameter) or cls is nn.Parameter:
        return False
    # With operators or gathers of its own, its values may lie elsewhere than in its memory.
    has_memory = cls.__torch_dispatch__ is nn.Parameter.__torch_dispatch__
    has_memory &= not (hasattr(cls, "fsdp_pre_all_gather") or nn.parameter.is_lazy(parameter))
    return has_memory and (dtype.is_floating_point or not dtype.is_signed)


def keep_class_and_attributes(original: nn.Parameter, unsharded: nn.Parameter) -> None:
    """Give the parameter that forwards read the attributes of a user's; its class if packed."""
    if is_packed(original):
        unsharded.__class__ = type(original)  # type: ignore[assignment]
    # Those that a quantized weight has itself stay unchanged.
    for name, value in attributes_of(original).items():
        vars(unsharded).setdefault(name, value)


def check_devices(parameters: Mapping[str, nn.Parameter], device_type: str) -> None:
    """Check that the packed ones among parameters are where they will be read; local.

    Args:
        parameters: Parameters of one unit, by name.
        device_type: The device type of the mesh.

    Raises:
        ValueError: A packed parameter is elsewhere. A copy of its bits would leave its scales
            there, and bitsandbytes quantizes a weight when it moves it.
    """
    elsewhere = [
        f"'{name}' on {parameter.device}"
        for name, parameter in parameters.items()
        if is_packed(parameter) and parameter.device.type != device_type
    ]
    if elsewhere:
        raise ValueError(
            expected(
                f"packed weights on the device of the mesh, {device_type}",
                listed(elsewhere),
                where="fully_shard()",
                hint="Load or move the module there first: its layers move scales with weights",
            )
        )

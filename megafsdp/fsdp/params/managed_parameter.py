"""What is known of one parameter, and of the dtypes that those of one group share.

Records alone; where their bytes lie is the business of :mod:`megafsdp.fsdp.params.parameter_group`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of one group: compute weight, main weight, main gradient, and the sum over ranks."""

    compute: torch.dtype
    main: torch.dtype
    grad: torch.dtype
    reduce: torch.dtype


@dataclass(eq=False)
class ManagedParameter:
    """One parameter and its two faces.

    Attributes:
        name: FQN within the unit, for messages.
        owners: Modules that hold it, with the attribute names; several if it is tied.
        shape: Its full shape.
        dtype: The dtype in which it is initialised.
        is_initialized: False if it came without values and none were given since.
        sharded: The optimizer's face.
        unsharded: The face of forward and backward.
    """

    name: str
    owners: list[tuple[weakref.ref[nn.Module], str]]
    shape: torch.Size
    dtype: torch.dtype = field(init=False)
    is_initialized: bool = field(init=False, default=True)
    sharded: nn.Parameter = field(init=False)
    unsharded: nn.Parameter = field(init=False)

    def show(self, parameter: nn.Parameter) -> None:
        """Make the owners hold one of the two faces."""
        for reference, attribute in self.owners:
            module = reference()
            if module is not None:
                module._parameters[attribute] = parameter

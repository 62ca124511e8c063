"""One parameter of a unit in its two forms, and the places in modules where they are shown.

The forms are made once: the sharded one, which the optimizer sees, and the unsharded one, which
forward and backward see. A place is a module and the name of an attribute; a tied parameter has
several. To show a form is an assignment in the module's dictionary::

    at rest              module.weight -> sharded      this rank's rows, an uneven DTensor
    forward, backward    module.weight -> unsharded    a view of the gathered buffer
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megafsdp.buffer.dtensor.unwritten import is_unwritten
from megafsdp.buffer.layout import TensorSpec, row_numel_of
from megafsdp.fsdp.params.model_parts import ModelPlacement
from megafsdp.mesh.model_part import whole_part
from megafsdp.mesh.placement import Even


@dataclass(eq=False)
class ManagedParameter:
    """One parameter in its sharded and its unsharded form.

    Attributes:
        name: FQN within the unit, for messages.
        owners: Modules that own it, with the attribute names; several if it is tied.
        shape: Its full shape, with all parts of a model axis.
        model: Its placement on the model axis, with this rank's part.
        dtype: The dtype in which it is initialised.
        kept_because: Why a recipe leaves it unquantized; empty if quantized, or without a recipe.
        sharded: The form that the optimizer sees.
        unsharded: The form that forward and backward see.
        unfreezes: Whether ``unsharded`` has a hook that unfreezes it when a gradient arrives.
        is_cut_evenly: Whether its shards are the chunks of ``torch.chunk``.
    """

    name: str
    owners: list[tuple[weakref.ref[nn.Module], str]]
    shape: torch.Size
    model: ModelPlacement = field(init=False)
    dtype: torch.dtype = field(init=False)
    kept_because: str = field(init=False, default="")
    sharded: nn.Parameter = field(init=False)
    unsharded: nn.Parameter = field(init=False)
    unfreezes: bool = field(init=False, default=False)
    is_cut_evenly: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Assume no model axis until it is placed on one."""
        self.model = ModelPlacement(whole_part(tuple(self.shape)))

    @property
    def spec(self) -> TensorSpec:
        """Return the planner's description of the part that data parallelism divides."""
        shape = self.model.part.local_shape
        if self.is_cut_evenly:
            return TensorSpec(self.name, shape, Even())
        return TensorSpec(self.name, shape, row_numel=row_numel_of(shape))

    @property
    def is_initialized(self) -> bool:
        """Return whether it came with values or has got some since."""
        return not is_unwritten(self.sharded)

    def living_owners(self) -> list[tuple[nn.Module, str]]:
        """Return the modules that own it and are alive, with the attribute names."""
        owners = [(reference(), attribute) for reference, attribute in self.owners]
        return [(module, attribute) for module, attribute in owners if module is not None]

    def put(self, parameter: nn.Parameter) -> None:
        """Put a parameter into the owners, whatever they have there now."""
        for module, attribute in self.living_owners():
            # Bypass nn.Module.__setattr__: its checks cost microseconds for each parameter.
            module._parameters[attribute] = parameter

    def find_replaced(self) -> tuple[nn.Module, str] | None:
        """Return an owner that has neither form, and the attribute; None if all have one."""
        for module, attribute in self.living_owners():
            shown = module._parameters.get(attribute)
            if shown is not self.sharded and shown is not self.unsharded:
                return module, attribute
        return None


class Places:
    """The places of one group's parameters.

    Args:
        parameters: The group's parameters, in both forms.
    """

    def __init__(self, parameters: Sequence[ManagedParameter]) -> None:
        self._parameters = parameters
        self._find()

    def _find(self) -> None:
        # Keep the modules' dictionaries: each forward and backward walks all places four times.
        self._all: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = [
            (owner._parameters, attribute, p.sharded, p.unsharded)
            for p in self._parameters
            for owner, attribute in p.living_owners()
        ]

    @property
    def have_unsharded(self) -> bool:
        """Return whether the modules have the unsharded parameters, judged by the first one."""
        places, attribute, _, unsharded = self._all[0]
        return places.get(attribute) is unsharded

    def show_unsharded(self) -> None:
        """Put the unsharded parameters into the modules that have the sharded ones.

        Parameters that the user has assigned instead stay, for :meth:`find_replaced` to find.
        """
        for places, attribute, sharded, unsharded in self._all:
            if places.get(attribute) is sharded:
                places[attribute] = unsharded

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules that have the unsharded ones."""
        for places, attribute, sharded, unsharded in self._all:
            if places.get(attribute) is unsharded:
                places[attribute] = sharded

    def put_sharded(self) -> None:
        """Put the sharded parameters into the modules in place of the originals."""
        for p in self._parameters:
            p.put(p.sharded)

    def find_replaced(self) -> tuple[ManagedParameter, nn.Module, str] | None:
        """Return a parameter that was replaced in a module, that module, and the attribute.

        Where another parameter of the group was put in its place, the two are tied from now on: the
        place is the other's. What was there before stays in the buffers without a place, so no
        forward reads it and no gradient comes.
        """
        for places, attribute, sharded, unsharded in self._all:
            shown = places.get(attribute)
            if shown is not sharded and shown is not unsharded:
                break
        else:
            return None
        for p in self._parameters:
            while (found := p.find_replaced()) is not None:
                if not self._tie(p, *found):
                    return p, *found
        return None

    def _tie(self, parameter: ManagedParameter, module: nn.Module, attribute: str) -> bool:
        """Give a place to the parameter that was put there, if it is another of the group's."""
        # One of another unit may be freed when this one reads it: that stays refused.
        shown = module._parameters.get(attribute)
        other = next((p for p in self._parameters if p.sharded is shown), None)
        if other is None or other.shape != parameter.shape:
            return False
        place = weakref.ref(module), attribute
        parameter.owners.remove(place)
        other.owners.append(place)
        self._find()
        return True

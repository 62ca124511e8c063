"""The places in modules where a group's parameters are shown, sharded or unsharded.

A place is a module and the name of an attribute; a tied parameter has several. Both forms of a
parameter are made once, so showing one is an assignment in the module's dictionary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from megafsdp.fsdp.params.parameter_group import ManagedParameter


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
        shown = module._parameters.get(attribute)
        other = next((p for p in self._parameters if p.sharded is shown), None)
        if other is None:
            return False
        place = weakref.ref(module), attribute
        parameter.owners.remove(place)
        other.owners.append(place)
        self._find()
        return True

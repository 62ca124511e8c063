"""The plan of an optimizer group: parameters that step together, and their gradients in a step.

If tensors are small, the cost of a step is Python's work for each parameter. So this file checks
little: the gradient, where it lies, and whether the state is the same object as in the last step.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.torch_private import without_torch_function
from megafsdp.fsdp.grouping import is_replaced
from megafsdp.fsdp.params.main_gradient import FlatGradient, common_buffer
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.optimizer.adam.checks import check_grad
from megafsdp.optimizer.grads.norms import grads_of, read_grads, summed_grad
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.states.flat import FlatStates
from megafsdp.optimizer.states.store import STATES, StateStore


@dataclass(slots=True)
class FoundGrads:
    """Parameters of one optimizer group that have a gradient.

    Attributes:
        flat: Flat states, the buffer of the gradients, and the parameters' indices in them.
        singles: Other parameters and their gradients.
    """

    flat: list[tuple[FlatStates, DBuffer, list[int]]] = field(default_factory=list)
    singles: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class GroupHyper(NamedTuple):
    """Hyperparameters of an optimizer group in one step.

    Attributes:
        known: The hyperparameters that the host knows.
        late_lr: A learning rate that replaces that of ``known``: a tensor that the host does not
            read; or None.
    """

    known: AdamHyper
    late_lr: torch.Tensor | None

    @classmethod
    def of(
        cls, group: dict[str, Any], *, adam_w_mode: bool, reads_tensors: bool = True
    ) -> GroupHyper:
        """Read an optimizer group; a tensor rate is only read if ``reads_tensors``."""
        lr = group["lr"]
        late_lr = lr if isinstance(lr, torch.Tensor) and not reads_tensors else None
        known = group if late_lr is None else group | {"lr": 0.0}
        return cls(AdamHyper.of(known, adam_w_mode=adam_w_mode), late_lr)


# An optimizer group's hyperparameters, and the indices of its parameters in a flat buffer.
Members = list[tuple[GroupHyper, list[int]]]


def members_by_buffer(
    found: Sequence[FoundGrads], hypers: Sequence[GroupHyper]
) -> dict[tuple[FlatStates, DBuffer], Members]:
    """Return the parameters of all optimizer groups by flat buffer; those are stepped together."""
    joined: dict[tuple[FlatStates, DBuffer], Members] = {}
    for part, hyper in zip(found, hypers, strict=True):
        for states, grads, indices in part.flat:
            joined.setdefault((states, grads), []).append((hyper, indices))
    return joined


def gradients_of(param_groups: list[dict[str, Any]], attribute: str) -> list[torch.Tensor]:
    """Return an optimizer's gradients, always in the same order, so that norms are too."""
    return grads_of((p for group in param_groups for p in group["params"]), attribute)


class _Members:
    """Parameters of one optimizer group that lie in one flat buffer.

    Args:
        states: Their flat states.
        places: The parameters and their indices.
    """

    def __init__(self, states: FlatStates, places: list[tuple[torch.Tensor, int]]) -> None:
        self.states = states
        self.parameters = [parameter for parameter, _ in places]
        self.indices = [index for _, index in places]
        self._kept: list[dict[str, Any]] = []
        self._kept_values: list[object] = []

    def common_buffer(self, grads: list[torch.Tensor | None]) -> DBuffer | None:
        """Return the buffer that has all gradients at their places; None if there is none."""
        # A user may assign gradients of another group, whose buffer has another layout.
        buffer = common_buffer(grads, self.indices)
        return buffer if buffer is not None and buffer.layout is self.states.layout else None

    def prepare(
        self, states_by_parameter: dict[torch.Tensor, dict[str, Any]], store: StateStore
    ) -> None:
        """Bring the states that the optimizer shows into the flat buffers."""
        shown = list(map(states_by_parameter.__getitem__, self.parameters))
        # Runs in each step, and nearly always nothing has changed: so identities are compared, in
        # C. A load or a user replaces dicts or values, never the memory behind the same tensor.
        values = itertools.chain.from_iterable(map(dict.values, shown))
        if (
            len(shown) == len(self._kept)
            and all(map(operator.is_, shown, self._kept))
            and all(map(operator.is_, values, self._kept_values))
        ):
            return
        for parameter, state in zip(self.parameters, shown, strict=True):
            store.prepare(parameter, state)
        self._kept = shown
        self._kept_values = [value for state in shown for value in state.values()]


class GroupPlan:
    """The places of one optimizer group's parameters in flat buffers, found once.

    Args:
        parameters: The group's list of parameters.
        store: Where states are.
        names: The parameters' names, for messages; none if the optimizer has none.
    """

    def __init__(
        self, parameters: list[torch.Tensor], store: StateStore, names: Sequence[str] = ()
    ) -> None:
        self._parameters = list(parameters)
        # Not strict: names are given for all parameters or for none.
        self._names = dict(zip(map(id, parameters), names, strict=False))
        self._store = store
        # One kernel call steps parameters that share a flat buffer and an optimizer group.
        flat: dict[FlatStates, list[tuple[torch.Tensor, int]]] = {}
        self._others: list[torch.Tensor] = []
        owners: dict[int, ParameterGroup] = {}
        for parameter in parameters:
            owner, place = group_of(parameter), store.flat_place(parameter)
            if owner is not None:
                owners[id(owner)] = owner
            if place is None or not place[0].buffers.keys() >= set(STATES):
                self._others.append(parameter)
            else:
                flat.setdefault(place[0], []).append((parameter, place[1]))
        self._members = [_Members(states, places) for states, places in flat.items()]
        # Weak, like all references back to units: only the parameters keep their group alive.
        self._owners = [weakref.ref(owner) for owner in owners.values()]

    def is_of(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether the plan was made for these parameters."""
        own = self._parameters
        return len(own) == len(parameters) and all(map(operator.is_, own, parameters))

    def has_originals(self) -> bool:
        """Return whether ``fully_shard`` has replaced one of the parameters."""
        return any(map(is_replaced, self._others))

    def others(self) -> list[torch.Tensor]:
        """Return the parameters that lie in no flat buffer."""
        return self._others

    def owners(self) -> Iterator[ParameterGroup]:
        """Yield the parameter groups that own the parameters."""
        for reference in self._owners:
            owner = reference()
            if owner is not None:
                yield owner

    def find(
        self, states_by_parameter: dict[torch.Tensor, dict[str, Any]], *, attribute: str
    ) -> FoundGrads:
        """Collect the existing gradients, and give their parameters states.

        Local, but for gradients that :func:`summed_grad` sums.

        Args:
            states_by_parameter: The optimizer's ``state``.
            attribute: Name of the parameters' attribute with the gradients.

        Raises:
            RuntimeError: A gradient is sparse, or not cut like its parameter.
        """
        found = FoundGrads()
        # Skip __torch_function__: sharded parameters do not override attribute reads.
        with without_torch_function():
            read = [read_grads(members.parameters, attribute) for members in self._members]
        for members, grads in zip(self._members, read, strict=True):
            buffer = members.common_buffer(grads)
            if buffer is None:
                self._find_some(found, members, grads, states_by_parameter)
                continue
            members.prepare(states_by_parameter, self._store)
            found.flat.append((members.states, buffer, members.indices))
        for parameter in self._others:
            grad = getattr(parameter, attribute, None)
            if grad is not None:
                grad = summed_grad(parameter, grad, attribute)
                self._add_single(found, parameter, grad, states_by_parameter[parameter])
        return found

    def find_all(
        self,
        states: FlatStates,
        grads: torch.Tensor,
        states_by_parameter: dict[torch.Tensor, dict[str, Any]],
    ) -> list[int] | None:
        """Return the parameters in one group's flat buffers, and bring their states there; local.

        Args:
            states: The group's flat states.
            grads: A flat main gradient of the group.
            states_by_parameter: The optimizer's ``state``.

        Returns:
            Their indices; None unless all have their gradients in ``grads``.
        """
        # By identity: an equal buffer may have other gradients than those being copied.
        found: list[int] = []
        for members in self._members:
            if members.states is states:
                buffer = members.common_buffer(read_grads(members.parameters, "grad"))
                if buffer is None or buffer.flat is not grads:
                    return None
                # Missing states begin at zero and are not added to the optimizer's: the step may
                # not come, and other ranks may not have run ahead.
                shown = {p: states_by_parameter.get(p) or {} for p in members.parameters}
                members.prepare(shown, self._store)
                found += members.indices
        return found

    def _find_some(
        self,
        found: FoundGrads,
        members: _Members,
        grads: list[torch.Tensor | None],
        states_by_parameter: dict[torch.Tensor, dict[str, Any]],
    ) -> None:
        """Collect gradients where some are missing, or they lie in several buffers."""
        layout = members.states.layout
        by_buffer: dict[DBuffer, list[int]] = {}
        # E.g. a user has kept gradients of an older backward, which lie in another buffer.
        for parameter, index, grad in zip(members.parameters, members.indices, grads, strict=True):
            if grad is None:
                continue
            buffer = grad.buffer if isinstance(grad, FlatGradient) else None
            if buffer is None or grad.index != index or buffer.layout is not layout:
                self._add_single(found, parameter, grad, states_by_parameter[parameter])
                continue
            self._store.prepare(parameter, states_by_parameter[parameter])
            by_buffer.setdefault(buffer, []).append(index)
        found.flat += [(members.states, buffer, indices) for buffer, indices in by_buffer.items()]

    def _add_single(
        self, found: FoundGrads, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]
    ) -> None:
        check_grad(parameter, grad, self._names.get(id(parameter)))
        self._store.prepare(parameter, state)
        found.singles.append((parameter, grad))

"""Histories of delayed scaling in a checkpoint: ``quantize.<fqn>.weight_maxima`` and so on.

Scales are made from the maxima of steps before, which no main weight shows. So these are stored, a
fixed number of steps each, equal on all ranks; of a stack of experts a row for each expert, by its
index in the layer. Any recipe loads any checkpoint: what a model does not use is left alone, and
what a checkpoint has not begins anew, as in a first step.

Which key goes where is said here; reading and writing is that of every tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megafsdp.buffer.dtensor.uneven_layout import whole
from megafsdp.checkpoint.format.manifest import TensorEntry
from megafsdp.checkpoint.format.regions import Stored, TensorPart
from megafsdp.checkpoint.state.canonical import CanonicalState, parameter_names
from megafsdp.checkpoint.state.experts import stack_in_layer
from megafsdp.checkpoint.state.fused import StoredForm, stored_form
from megafsdp.errors import listed
from megafsdp.fsdp.params.kept_weights import in_all_layers
from megafsdp.fsdp.params.parameter_group import ManagedParameter, ParameterGroup
from megafsdp.fsdp.params.quantized_weight import QuantizedWeight
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.quantize.delayed import DelayedState

_LOGGER = logging.getLogger("megafsdp.checkpoint")


def history_state(model: nn.Module) -> CanonicalState:
    """List the histories of a model's quantized weights; local."""
    state = CanonicalState()
    for form, _, tensors in _histories_of(model):
        state.tensors.update(tensors)
        state.note_ranks(tensors, form)
    return state


class HistoryLoad:
    """A load of the histories of a model.

    Args:
        model: Whose.
        stored: What the checkpoint has, by key.

    Attributes:
        tensors: Targets by key, of which the checkpoint has tensors of the same shape.
        ranks_of: Keys that not all ranks have -> the ranks that have them.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, TensorEntry]) -> None:
        self._histories = [(state, tensors) for _, state, tensors in _histories_of(model)]
        listed_state = history_state(model)
        self.ranks_of = listed_state.ranks_of
        self.tensors = {
            key: tensor
            for key, tensor in listed_state.tensors.items()
            if key in stored and stored[key].shape == tuple(tensor.shape)
        }

    def commit(self, sources: Collection[str]) -> None:
        """Begin from what was read, and anew where something was not; local.

        Args:
            sources: Keys that were read.
        """
        missing = []
        for state, tensors in self._histories:
            lacking = [key for key in tensors if key not in sources]
            missing += lacking
            loaded = (state.weight_history, state.input_history, state.grad_history)
            state.load(*(torch.zeros_like(t) if lacking else t.clone() for t in loaded))
        if missing:
            _LOGGER.warning(
                "Delayed scaling begins with new histories, of which the checkpoint has none: %s",
                listed(in_all_layers(missing)),
            )


def _histories_of(
    model: nn.Module,
) -> Iterator[tuple[StoredForm, DelayedState, dict[str, Stored]]]:
    """Yield how each parameter with histories is stored, and these in memory and by key."""
    names = parameter_names(model)
    for unit in units_below([model]).values():
        for group in unit.groups:
            weight = group.compute_weight
            if isinstance(weight, QuantizedWeight) and weight.scales.states:
                for parameter, state in zip(group.parameters, weight.scales.states, strict=True):
                    form = stored_form(names[parameter.sharded], parameter.sharded)
                    yield form, state, _stored_tensors(form, group, parameter, state)


def _stored_tensors(
    form: StoredForm, group: ParameterGroup, parameter: ManagedParameter, state: DelayedState
) -> dict[str, Stored]:
    """Return the histories of one parameter by key; they alias those in memory."""
    if len(parameter.shape) == 3:
        # Inputs of stacks are not quantized.
        found = {"weight": state.weight_history}
    else:
        found = {
            "weight": state.weight_history[0],
            "input": state.input_history,
            "grad": state.grad_history,
        }
    return {
        f"quantize.{form.name}.{kind}_maxima": _as_stored(form, group, parameter, history)
        for kind, history in found.items()
    }


def _as_stored(
    form: StoredForm, group: ParameterGroup, parameter: ManagedParameter, history: torch.Tensor
) -> Stored:
    mesh, part = group.axes.dtensor_mesh, parameter.model.part
    placements: list[Placement] = [Replicate()] * mesh.ndim
    shape = tuple(history.shape)
    if history.ndim == 2 and part.dim == 0:
        placements[-1], shape = Shard(0), (part.shape[0], *shape[1:])
    tensor = DTensor.from_local(
        history, mesh, placements, run_check=False, shape=torch.Size(shape), stride=_strides(shape)
    )
    if history.ndim == 2 and form.experts is not None:
        shape, place = stack_in_layer(form.name, shape, form.experts)
        return TensorPart(tensor, shape, ((whole(tuple(tensor.shape)), place),), form.ranks)
    if form.is_own:
        everything = whole(shape)
        return TensorPart(tensor, shape, ((everything, everything),), form.ranks)
    return tensor


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[-1], 1) if len(shape) == 2 else (1,)

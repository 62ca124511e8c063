"""Histories of delayed scaling in a checkpoint: ``quantize.<fqn>.weight_maxima`` and so on.

Scales are made from the maxima of earlier steps, which main weights do not contain. So the maxima
are stored, for a fixed number of steps, equal on all ranks; a stack of experts has a row for each
expert, by its index in the layer. Any recipe loads any checkpoint: histories that the model does
not use are ignored, and those that the checkpoint lacks start anew, as at the first step. If the
stored history is longer, its newest steps are loaded; if it is shorter, the older steps are empty.

The keys are decided here; histories are read and written like every other tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

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
from megafsdp.fsdp.params.managed_parameter import ManagedParameter
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.quantized_weight import QuantizedWeight
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.quantize.delayed import DelayedState

_LOGGER = logging.getLogger("megafsdp.checkpoint")
_KINDS = ("weight", "input", "grad")

# Histories of the weight, the inputs and the grads, as DelayedState.histories() returns them.
Histories = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def history_state(model: nn.Module) -> CanonicalState:
    """List the histories of a model's quantized weights; local."""
    state = CanonicalState()
    for weight in _weights_of(model):
        tensors = weight.stored(weight.state.histories())
        state.tensors.update(tensors)
        state.note_ranks(tensors, weight.form)
    return state


class HistoryLoad:
    """A load of the histories of a model.

    Args:
        model: The model.
        stored: Tensors of the checkpoint, by key.

    Attributes:
        tensors: Targets by key, for which the checkpoint has tensors of the same shape. If the
            number of steps differs from the model's, the targets are buffers of this object.
        ranks_of: Keys that not all ranks have -> the ranks that have them.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, TensorEntry]) -> None:
        found = CanonicalState()
        self._loads: list[tuple[DelayedState, Histories, Collection[str]]] = []
        for weight in _weights_of(model):
            histories = weight.histories_like(stored)
            tensors = weight.stored(histories)
            self._loads.append((weight.state, histories, tensors))
            found.tensors.update(tensors)
            found.note_ranks(tensors, weight.form)
        self.ranks_of = found.ranks_of
        self.tensors = {
            key: tensor
            for key, tensor in found.tensors.items()
            if key in stored and stored[key].shape == tuple(tensor.shape)
        }

    def commit(self, sources: Collection[str]) -> None:
        """Load the histories that were read, and start those anew that were not; local.

        Args:
            sources: Keys that were read.
        """
        missing = []
        for state, histories, keys in self._loads:
            lacking = [key for key in keys if key not in sources]
            missing += lacking
            state.load(*(torch.zeros_like(t) if lacking else t.clone() for t in histories))
        if missing:
            _LOGGER.warning(
                "Delayed scaling begins with new histories, of which the checkpoint has none: %s",
                listed(in_all_layers(missing)),
            )


@dataclass(frozen=True, slots=True)
class _Weight:
    """A quantized weight with histories, and how they are stored.

    Attributes:
        form: The keys and ranks of the weight.
        group: Its parameter group.
        parameter: The weight in that group.
        state: The histories.
    """

    form: StoredForm
    group: ParameterGroup
    parameter: ManagedParameter
    state: DelayedState

    def stored(self, histories: Histories) -> dict[str, Stored]:
        """Return views of histories by key; keys and lengths are equal on all ranks."""
        kinds = dict(zip(_KINDS, histories, strict=True))
        if len(self.parameter.shape) == 3:
            # The inputs of a stack of experts are not quantized.
            kinds = {"weight": kinds["weight"]}
        else:
            kinds["weight"] = kinds["weight"][0]
        return {
            self._key(kind): _as_stored(self.form, self.group, self.parameter, history)
            for kind, history in kinds.items()
        }

    def histories_like(self, stored: Mapping[str, TensorEntry]) -> Histories:
        """Return the histories, or zeros of as many steps as a checkpoint has."""
        own, entry = self.state.histories(), stored.get(self._key("weight"))
        if entry is None or not entry.shape or entry.shape[-1] == own[0].shape[-1]:
            return own
        weight, *operands = (each.new_zeros(*each.shape[:-1], entry.shape[-1]) for each in own)
        return weight, operands[0], operands[1]

    def _key(self, kind: str) -> str:
        return f"quantize.{self.form.name}.{kind}_maxima"


def _weights_of(model: nn.Module) -> Iterator[_Weight]:
    names = parameter_names(model)
    for unit in units_below([model]).values():
        for group in unit.groups:
            weight = group.compute_weight
            if isinstance(weight, QuantizedWeight) and weight.scales.states:
                for parameter, state in zip(group.parameters, weight.scales.states, strict=True):
                    form = stored_form(names[parameter.sharded], parameter.sharded)
                    yield _Weight(form, group, parameter, state)


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

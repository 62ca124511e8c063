"""A model and its optimizer as one ``Stateful`` of ``torch.distributed.checkpoint``.

For programs that keep torch's own saver, with torch's ``fully_shard``, ours, or neither:

    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)

Names are torch's, as ``get_state_dict`` gives them. Two things that torch's planners cannot store
are left out and logged: the ``_extra_state`` of modules such as TransformerEngine's, whose bytes
differ in size between ranks; and the optimizer states of a parameter on a rank that has no elements
of it, which a load would ask for though no rank has saved them. Our own checkpoints (save.py,
load.py) have neither limit.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megafsdp.errors import listed
from megafsdp.optimizer.states.beginning import make_states

_LOGGER = logging.getLogger("megafsdp.checkpoint")
_EXTRA_STATE = "_extra_state"
_STATES = "state"


class AppState(Stateful):
    """The state of a model and, if given, its optimizer, for ``dcp.save`` and ``dcp.load``.

    Args:
        model: The model, sharded in any way that torch's state dicts know.
        optimizer: The optimizer of its parameters; None for the model alone.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return what is stored; it aliases the live tensors. Collective, as torch's getter is.

        Optimizer states that do not exist yet are made here (a new optimizer has none, and a
        parameter without a gradient so far has none): torch's reader fills all states in place.
        """
        if self.optimizer is not None:
            _make_states(self.optimizer)
        optimizers = () if self.optimizer is None else (self.optimizer,)
        model_state, optimizer_state = get_state_dict(self.model, optimizers)
        states = cast(dict[str, Any], optimizer_state.get(_STATES, {}))
        extra = [name for name in model_state if name.rpartition(".")[2] == _EXTRA_STATE]
        empty = [name for name in states if _is_empty(model_state.get(name))]
        for name in extra:
            del model_state[name]
        for name in empty:
            states[name] = {}
        for what, names in (("extra states", extra), ("empty optimizer states", empty)):
            if names:
                _LOGGER.info("AppState leaves out %d %s: %s", len(names), what, listed(names))
        return {"model": model_state, "optimizer": optimizer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write what was read to the model and the optimizer; entries that were left out stay."""
        set_state_dict(
            self.model,
            () if self.optimizer is None else (self.optimizer,),
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
            options=StateDictOptions(strict=False),
        )


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    try:
        make_states(optimizer)
    except NotImplementedError as error:
        # torch itself makes the states of a new optimizer, by a step with zero gradients.
        if optimizer.state:
            _LOGGER.warning("AppState has states of some parameters alone. %s", error)


def _is_empty(value: object) -> bool:
    """Return whether a rank has no elements of a parameter."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return isinstance(local, torch.Tensor) and local.numel() == 0

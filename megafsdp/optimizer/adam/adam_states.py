"""How states come into FusedAdam and leave it: state dicts, checkpoints, copies, narrow formats.

Others see moments in fp32, whatever they are kept in. How they are kept is the business of
:mod:`megafsdp.optimizer.states.store`, how they are stepped that of
:mod:`megafsdp.optimizer.adam.fused_adam`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.adam.checks import check_scaled_state
from megafsdp.optimizer.states.loading import (
    check_loaded_states,
    fill_options,
    packed_parameters,
)
from megafsdp.optimizer.states.store import REMAINDER, STATES, StateStore


class AdamStates(Optimizer):
    """Base of FusedAdam with all that is not a step."""

    _store: StateStore

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's Adam would: moments in fp32, whatever they are kept in; local.

        With ``store_param_remainders`` the remainders are there too, in int16.
        """

        def make_portable(_: Optimizer, packed: dict[str, Any]) -> None:
            for index, parameter in packed_parameters(packed, self.param_groups):
                if index in packed["state"]:
                    packed["state"][index] = self._portable_state(parameter)

        # Before the hooks of others, which may replace what they see.
        with self.register_state_dict_post_hook(make_portable, prepend=True):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state dict of an optimizer of this class or of torch's Adam; local.

        Hooks are called as by any optimizer: the first ones see and may replace the whole state
        dict, the last ones find its states here.

        Args:
            state_dict: Its moments are DTensors like the parameters, or plain tensors of what this
                rank holds of them.

        Raises:
            ValueError: Its groups, options, states or shapes are not this optimizer's.
            NotImplementedError: A state of a sharded parameter is whole, or torch has cut it.
        """
        packed = state_dict

        # torch would bring all states to the parameters' device at once, those of the host too.
        def set_states_aside(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            nonlocal packed
            packed = loaded
            check_loaded_states(packed, self.param_groups, ("step", *STATES, REMAINDER))
            return packed | {"state": {}}

        first = self.register_load_state_dict_pre_hook(set_states_aside)
        last = self.register_load_state_dict_post_hook(
            lambda _: self._take_over_all(packed), prepend=True
        )
        with first, last:
            super().load_state_dict(state_dict)

    def _take_over_all(self, packed: dict[str, Any]) -> None:
        """Bring the states of a state dict, whose groups are loaded, into the form kept."""
        self._store.forget_remainders()
        fill_options(self.param_groups, self.defaults)
        for index, parameter in packed_parameters(packed, self.param_groups):
            given = packed["state"].get(index)
            if given is None:
                continue
            self.state[parameter] = {
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in given.items()
            }
            self._take_over(parameter)

    def _portable_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        kept = {REMAINDER: state[REMAINDER]} if REMAINDER in state else {}
        return self._store.full_precision(parameter, state) | kept

    def _take_over(self, parameter: torch.Tensor) -> None:
        """Bring loaded states of a parameter, which :attr:`state` shows, into the form kept."""
        self._store.prepare(parameter, self.state[parameter])

    def canonical_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states as checkpoints hold them: moments in fp32; local.

        A load gives back tensors like these through :attr:`state`, in any dtype.
        """
        return self._store.full_precision(parameter, self.state.get(parameter, {}))

    def canonical_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's weight as checkpoints hold it; local.

        Returns:
            The parameter; with ``store_param_remainders`` an fp32 tensor like it, a copy.
        """
        return self._store.weight(parameter, self.state.get(parameter, {}))

    @torch.no_grad()
    def load_canonical(self, parameter: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Bring a parameter's loaded states into the form in which they are kept; local.

        Args:
            parameter: One of the optimizer's parameters, whose :attr:`state` was replaced.
            weight: Its fp32 weight, a tensor like it, with ``store_param_remainders``.
        """
        if weight is not None:
            self._store.set_weight(parameter, self.state[parameter], weight)
            owner = group_of(parameter)
            if owner is not None:
                owner.mark_stale()
        elif self.state.get(parameter):
            self._take_over(parameter)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state's values in fp32, as a tensor like the parameter; a copy; local.

        Args:
            parameter: One of the optimizer's parameters, which has been stepped.
            name: ``exp_avg`` or ``exp_avg_sq``.

        Raises:
            KeyError: The parameter has no such state.
        """
        return self._store.unscaled(parameter, name, self.state[parameter])

    def set_scaled_state(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Set a state from fp32 values, a tensor like the parameter, which are copied; local.

        Raises:
            ValueError: The values are not fp32 or of another shape, or the state has no such name.
        """
        check_scaled_state(parameter, name, values)
        self.state[parameter][name] = values.detach().clone()
        self._store.prepare(parameter, self.state[parameter])

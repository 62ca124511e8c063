"""The store of an optimizer's states: in flat buffers, in narrow formats, or one by one.

``optimizer.state`` shows every state as a tensor like its parameter. This file owns the memory of
the states, and brings states from elsewhere, e.g. from a load, into that form.

With *remainders* a bf16 parameter and an int16 state are the two halves of one fp32 weight; steps
and checkpoints use that fp32 weight.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from megafsdp.buffer.dtensor.uneven import local_tensor, wrap_like
from megafsdp.buffer.layout import row_numel_of
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.mesh.dtensor import are_rows_cut
from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.states.flat import FlatStates
from megafsdp.optimizer.states.formats import PLAIN_DTYPES, ScaledState, dtype_for, is_scaled
from megafsdp.optimizer.states.quantized import MAIN_WEIGHT, prepare_main_weight

_LOGGER = logging.getLogger("megafsdp.optimizer")

STATES = ("exp_avg", "exp_avg_sq")
REMAINDER = "param_remainder"
# Entries among the states that are parts of weights.
OF_WEIGHTS = (REMAINDER, MAIN_WEIGHT)


class StateStore:
    """The states of an optimizer's parameters.

    Args:
        dtypes: The dtype of each moment; some parameters keep fp32 (:func:`_dtype_of`).
        has_remainders: Whether parameters are bf16 with a remainder each.
        counts_on_device: Whether counts of steps are on the device of the parameters.
    """

    def __init__(
        self,
        dtypes: dict[str, torch.dtype],
        *,
        has_remainders: bool = False,
        counts_on_device: bool = False,
    ) -> None:
        self.dtypes = dtypes
        self.has_remainders = has_remainders
        self._counts_on_device = counts_on_device
        self._main_dtype = torch.bfloat16 if has_remainders else torch.float32
        self._flat: weakref.WeakKeyDictionary[ParameterGroup, FlatStates]
        self._flat = weakref.WeakKeyDictionary()
        # How many elements of each parameter group the optimizer has, and the groups of which it
        # has too few for flat states.
        self._numels: weakref.WeakKeyDictionary[ParameterGroup, int] = weakref.WeakKeyDictionary()
        self._apart: weakref.WeakSet[ParameterGroup] = weakref.WeakSet()
        # Scales and codes by parameter, then by the name of the state.
        self._scaled = WeakTensorKeyDictionary()
        # Not among the states: a remainder is half of a weight, and must outlive dropped states.
        self._remainders = WeakTensorKeyDictionary()

    def add_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the optimizer's parameters, and warn of those with wider states; local."""
        narrow = [name for name, dtype in self.dtypes.items() if is_scaled(dtype)]
        num_cut = 0
        for parameter in parameters:
            num_cut += bool(narrow) and are_rows_cut(parameter)
            owner = group_of(parameter)
            if owner is not None:
                self._numels[owner] = self._numels.get(owner, 0) + parameter.numel()
        if num_cut:
            _LOGGER.warning(
                "%s of %d parameters stay in fp32: a model axis cuts their rows, and with them "
                "blocks of one scale.",
                " and ".join(narrow),
                num_cut,
            )

    def flat_place(self, parameter: torch.Tensor) -> tuple[FlatStates, int] | None:
        """Return the flat states of a parameter's group and its index there, or None; local.

        None if its main weight is not flat or not of the dtype that flat steps take, or if the
        optimizer has less than half of the group: flat states would cover the whole group.
        """
        owner = group_of(parameter)
        if owner is None or owner.dtypes.main != self._main_dtype or self._is_apart(owner):
            return None
        states = self.flat_states(owner)
        index = states.indices.get(id(parameter))
        return None if index is None else (states, index)

    def _is_apart(self, owner: ParameterGroup) -> bool:
        """Return whether a group's parameters are stepped one by one; decided once."""
        # Once, as parameters that are added later must not move states that were shown.
        if owner not in self._flat and owner not in self._apart and owner in self._numels:
            trainable = (p.sharded for p in owner.parameters if p.sharded.requires_grad)
            if 2 * self._numels[owner] < sum(p.numel() for p in trainable):
                self._apart.add(owner)
        return owner in self._apart

    def prepare(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Bring the states of a parameter into the kept form; missing ones start at zero; local.

        A missing remainder keeps its value: it is a part of the weight, not a state.
        """
        prepare_main_weight(parameter, state)
        place = self.flat_place(parameter)
        step = state.get("step")
        if place is not None:
            state["step"] = place[0].adopt_step(place[1], step)
        else:
            device = parameter.device if self._counts_on_device else torch.device("cpu")
            step = 0.0 if step is None else step
            state["step"] = torch.as_tensor(step, dtype=torch.float32, device=device)
        for name, wished in self.dtypes.items():
            current = state.get(name)
            dtype = _dtype_of(parameter, wished)
            if is_scaled(dtype):
                self._prepare_scaled(parameter, name, dtype, state)
            elif place is not None and name in place[0].buffers:
                state[name] = place[0].adopt(place[1], name, current)
            else:
                state[name] = _by_itself(parameter, dtype, current)
        if self.has_remainders:
            current = self._remainder(parameter, state)
            if place is not None:
                state[REMAINDER] = place[0].adopt(place[1], REMAINDER, current)
            else:
                state[REMAINDER] = _by_itself(parameter, torch.int16, current)
            # Kept here too, as dropping states must not drop half of the weight.
            if place is None or state[REMAINDER] is not current:
                self._remainders[parameter] = state[REMAINDER]

    def _remainder(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor | None:
        """Return a parameter's remainder; None if it never had one."""
        if state.get(REMAINDER) is not None:
            return state[REMAINDER]
        return self._remainders.get(parameter)

    def remainders(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the remainder of each parameter that has one, with or without states; local."""
        return dict(self._remainders.items())

    def add_remainders(self, remainders: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Adopt the :meth:`remainders` of another store, by this store's parameters; local."""
        self._remainders.update(remainders)

    def forget_remainders(self) -> None:
        """Reset the remainders of parameters without states to zero; local."""
        self._remainders.clear()

    def flat_states(self, owner: ParameterGroup) -> FlatStates:
        """Return the flat states of a parameter group, made at the first call; local."""
        states = self._flat.get(owner)
        if states is None:
            plain = {n: d for n, d in self.dtypes.items() if d in PLAIN_DTYPES}
            if self.has_remainders:
                plain[REMAINDER] = torch.int16
            states = self._flat[owner] = FlatStates(
                owner, plain, counts_on_device=self._counts_on_device
            )
        return states

    def _prepare_scaled(
        self, parameter: torch.Tensor, name: str, dtype: torch.dtype, state: dict[str, Any]
    ) -> None:
        kept = self._scaled.setdefault(parameter, {})
        local, current = local_tensor(parameter), state.get(name)
        columns = row_numel_of(parameter.shape)
        # In rows of a matrix: a sharded stack has rows of all its matrices, a replicated one whole
        # matrices, and scales are for the same blocks in both.
        rows = local.numel() // max(columns, 1)
        if name not in kept:
            kept[name] = ScaledState.zeros(
                rows, columns, dtype, local.device, keeps_positive=name == "exp_avg_sq"
            )
        # The user has dropped the state: it starts again in the same memory.
        elif current is None:
            kept[name].clear()
        codes = kept[name].codes
        is_alike = isinstance(current, DTensor) == isinstance(parameter, DTensor)
        if current is not None and is_alike and _is_same_memory(local_tensor(current), codes):
            return
        if current is not None:
            kept[name].encode(local_tensor(current).float().reshape(rows, columns))
        state[name] = wrap_like(parameter, codes.view(local.shape))

    def full_precision(self, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's states in a form that any optimizer can read: moments in fp32.

        Remainders and main weights, which are weights, are left out. Moments kept in fp32 are not
        copied.
        """
        return {
            name: self.unscaled(parameter, name, state)
            if name in self.dtypes and value.dtype != torch.float32
            else value
            for name, value in state.items()
            if name not in OF_WEIGHTS
        }

    def weight(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """Return a parameter's fp32 weight: joined with its remainder, or the parameter itself."""
        if not self.has_remainders:
            return parameter
        # A weight that was never stepped has no remainder yet: its bf16 value is exact.
        remainder = self._remainder(parameter, state)
        local = local_tensor(parameter.detach())
        if remainder is None:
            return wrap_like(parameter, local.float())
        return wrap_like(parameter, reference.join_weights(local, local_tensor(remainder)))

    def set_weight(
        self, parameter: torch.Tensor, state: dict[str, Any], weight: torch.Tensor
    ) -> None:
        """Split an fp32 weight, a tensor like the parameter, into parameter and remainder."""
        # Plain NaNs first: rounding the bits of a NaN with a payload could give infinity or zero.
        high, low = reference.fp32_to_halves(reference.plain_nans(local_tensor(weight)))
        local_tensor(parameter.detach()).copy_(high)
        state[REMAINDER] = wrap_like(parameter, low)
        self.prepare(parameter, state)

    def unscaled(self, parameter: torch.Tensor, name: str, state: dict[str, Any]) -> torch.Tensor:
        """Return a state's values in fp32, as a copy like the parameter."""
        scaled = self._scaled.get(parameter, {}).get(name)
        local = local_tensor(state[name])
        # A load may have replaced the codes by a tensor of its own.
        if scaled is not None and _is_same_memory(local, scaled.codes):
            return wrap_like(parameter, scaled.decode().view(local.shape))
        return wrap_like(parameter, local.to(torch.float32, copy=True))

    def decode(self, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the 1-D values of all moments in fp32 or bf16; without a copy if possible."""
        values = {}
        for name in self.dtypes:
            scaled = self._scaled.get(parameter, {}).get(name)
            if scaled is not None:
                values[name] = scaled.decode().view(-1)
                continue
            local = local_tensor(state[name])
            is_direct = local.is_contiguous() and local.dtype in PLAIN_DTYPES
            values[name] = local.view(-1) if is_direct else local.float().reshape(-1)
        return values

    def encode(
        self, parameter: torch.Tensor, state: dict[str, Any], values: dict[str, torch.Tensor]
    ) -> None:
        """Store values from :meth:`decode` that a step has changed in place."""
        for name, value in values.items():
            scaled = self._scaled.get(parameter, {}).get(name)
            if scaled is not None:
                scaled.encode(value.view(scaled.codes.shape), is_step=True)
                continue
            local = local_tensor(state[name])
            # If decode() returned the memory itself, the step has written there already.
            if value.data_ptr() != local.data_ptr():
                local.copy_(value.view(local.shape))


def _dtype_of(parameter: torch.Tensor, wished: torch.dtype) -> torch.dtype:
    """Return the dtype of a state; fp32 if a mesh axis cuts rows, and thereby blocks."""
    if is_scaled(wished) and are_rows_cut(parameter):
        return torch.float32
    return dtype_for(parameter.shape, wished)


def _by_itself(
    parameter: torch.Tensor, dtype: torch.dtype, current: torch.Tensor | None
) -> torch.Tensor:
    """Return a state like its parameter in this dtype: the current one, or zeros."""
    if current is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    local = local_tensor(parameter)
    # A load may bring plain rows, flat ones too.
    if local_tensor(current).shape != local.shape:
        current = local_tensor(current).reshape(local.shape)
    if isinstance(parameter, DTensor) and not isinstance(current, DTensor):
        current = wrap_like(parameter, current)
    return current if current.dtype == dtype else current.to(dtype)


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    # The dtype too, as all empty tensors have the same address.
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype

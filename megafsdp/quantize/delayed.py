"""Delayed scaling: histories of maxima, from which the scales of the next step are made.

A scale for a whole tensor requires its maximum first. Delayed scaling takes the maximum from
earlier steps, so that values can be quantized in one pass. Each parameter has three histories: of
its own values, of its layer's inputs, and of the gradients of its layer's outputs. The newest
maximum is last, and zeros are steps that have not happened:

    history 4, after steps with maxima 3, 5, 4      0 3 5 4
    inputs and gradients are scaled by              5          the largest
    weights are scaled by                           5          the largest of 0 3 5, without newest
    after one more step, with maximum 2             3 5 4 2

Layers record the maxima of their inputs and gradients on each rank. Once per step, the recorded
maxima and those of the weights are combined over ranks, together with the maxima of other formats,
and rolled into the histories. The engine runs the collective.

These rules hold for each history separately:

- The first maximum is used at once. Until it is known, an input is scaled by its own maximum.
- A maximum of zero is not recorded: nothing has run, or every value was zero.
- A non-finite maximum is not recorded either, as it would spoil every later step. The tensor that
  has it becomes NaN for that step. Finite maxima recorded in the same step count.
- A weight's maximum that equals the newest is not recorded again. So it does not matter how often
  unchanged weights are encoded, and a load needs only the histories.
- Weights that do not come from a step, such as loaded ones, may be far from earlier ones. If their
  maximum is not the newest of the history, it begins a new history. (In a history that was loaded
  with the weights, their maximum is the newest.)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from megafsdp._native import native_module
from megafsdp.errors import expected

INPUT, GRAD = 0, 1
# Number of maxima that layers record for each parameter with a history: one for each operand.
NUM_PENDING = 2
# The most states that are rolled together, so that copies of their histories stay in a cache.
_MAX_TOGETHER = 64
_INFINITE_BITS = 0x7F80_0000
_NAN_BITS = 0x7FC0_0000


class DelayedState:
    """Histories of one parameter; tensors of fixed sizes, written in place and never replaced.

    Args:
        history: Number of steps.
        num_matrices: Experts of a stack, each of which has a history and a scale; else 1.
        device: Device of the tensors.

    Attributes:
        weight_history: ``(num_matrices, history)`` fp32.
        input_history: ``(history,)`` fp32; all zeros for a stack, whose inputs are not quantized.
        grad_history: ``(history,)`` fp32.
    """

    def __init__(
        self,
        history: int,
        *,
        num_matrices: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        if history < 1:
            raise ValueError(
                expected(
                    "a history of at least 1 step",
                    history,
                    where="DelayedState",
                    hint="Use 1024, as the recipe 'fp8_delayed' does",
                )
            )
        self.weight_history = torch.zeros(num_matrices, history, dtype=torch.float32, device=device)
        self._operands = torch.zeros(2, history, dtype=torch.float32, device=device)
        self._pending = torch.zeros(2, dtype=torch.int32, device=device)
        self._weight_bits = torch.zeros(num_matrices, dtype=torch.int32, device=device)
        self._operand_bits = torch.zeros(2, dtype=torch.int32, device=device)
        # A tensor's own maximum above its limit is used instead of the history's.
        self._limits = torch.full((2,), -1, dtype=torch.int32, device=device)

    @property
    def input_history(self) -> Tensor:
        """Return the maxima of inputs; aliases."""
        return self._operands[INPUT]

    @property
    def grad_history(self) -> Tensor:
        """Return the maxima of gradients of outputs; aliases."""
        return self._operands[GRAD]

    def pending(self) -> Tensor:
        """Return the maxima of inputs and grads that this rank has recorded since the last roll.

        ``(2,)`` int32, bits of fp32 magnitudes; aliases, and :meth:`roll` sets it to zero.
        """
        return self._pending

    def record(self, operand: int, bits: Tensor) -> None:
        """Raise the maximum of ``INPUT`` or ``GRAD`` that the next roll takes; local.

        Args:
            operand: ``INPUT`` or ``GRAD``.
            bits: ``(1,)`` int32 bits of a magnitude; ignored if not finite.
        """
        recorded = self._pending[operand : operand + 1]
        # A non-finite maximum would be above all others and hide what else the step records.
        finite = torch.where(bits < _INFINITE_BITS, bits, 0)
        torch.maximum(recorded, finite, out=recorded)

    def maximum_for(self, operand: int, bits: Tensor) -> Tensor:
        """Return the maximum by which to scale an ``INPUT`` or ``GRAD``.

        Args:
            operand: ``INPUT`` or ``GRAD``.
            bits: ``(1,)`` int32 bits of its own largest magnitude.

        Returns:
            Bits of the history's maximum; of its own if that is not finite or there is no history
            yet.
        """
        chosen = slice(operand, operand + 1)
        return torch.where(bits > self._limits[chosen], bits, self._operand_bits[chosen])

    def weight_maximum(self) -> Tensor:
        """Return the maxima by which to encode the weight, ``(num_matrices,)`` int32 bits; aliases.

        The largest one before the newest, so it is known before the newest weight is. NaN if the
        weight was not finite at the last roll.
        """
        return self._weight_bits

    @torch.no_grad()
    def roll(self, weight_bits: Tensor, pending_bits: Tensor) -> None:
        """Append maxima to the histories, and choose the maxima for the next step; local.

        All ranks must give the same bits. Recorded maxima are cleared.

        Args:
            weight_bits: ``(num_matrices,)`` int32, over all ranks that have rows of the weight.
            pending_bits: ``(2,)`` int32, :meth:`pending` over all ranks.
        """
        roll_together([self], [weight_bits], [pending_bits])

    @torch.no_grad()
    def load(self, weight: Tensor, input: Tensor, grad: Tensor) -> None:
        """Copy histories of a checkpoint; local. The weight's own maximum counts after a roll.

        Args:
            weight: Like ``weight_history``, or ``(history,)`` for one matrix. A longer or shorter
                history keeps its newest steps.
            input: ``(history,)`` of any length.
            grad: ``(history,)`` of any length.
        """
        for target, source in (
            (self.weight_history, weight.view(self.weight_history.shape[0], -1)),
            (self._operands, torch.stack((input, grad))),
        ):
            kept = min(target.shape[1], source.shape[1])
            target.zero_()
            target[:, target.shape[1] - kept :] = source[:, source.shape[1] - kept :]
        self._pending.zero_()
        zeros = torch.zeros_like(self._weight_bits)
        _set_used([self], self.weight_history, self._operands, zeros)

    def histories(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the histories as :meth:`load` takes them; aliases."""
        return self.weight_history, self.input_history, self.grad_history

    @staticmethod
    def of_histories(weight: Tensor, input: Tensor, grad: Tensor) -> DelayedState:
        """Make a state that begins with copies of histories, on their device."""
        made = DelayedState(weight.shape[1], num_matrices=weight.shape[0], device=weight.device)
        made.load(weight, input, grad)
        return made

    def copy(self, device: torch.device) -> DelayedState:
        """Return a state with the same histories, and nothing recorded, on a device."""
        moved = (history.to(device) for history in self.histories())
        return DelayedState.of_histories(*moved)


@torch.no_grad()
def roll_together(
    states: Sequence[DelayedState],
    weight_bits: Sequence[Tensor],
    pending_bits: Sequence[Tensor],
    *,
    is_step: bool = True,
) -> None:
    """Do :meth:`DelayedState.roll` for many states on one device together, which is faster; local.

    Args:
        states: The states; their histories may differ in length.
        weight_bits: The argument of the method for each state.
        pending_bits: Likewise.
        is_step: Whether the weights come from a step; equal on all ranks.
    """
    weight_bits = _checked(weight_bits, [state._weight_bits for state in states])
    pending_bits = _checked(pending_bits, [state._pending for state in states])
    if not is_step:
        _begin_anew(states, weight_bits)
    alike: dict[int, list[int]] = {}
    for index, state in enumerate(states):
        alike.setdefault(state.weight_history.shape[1], []).append(index)
    for length, indices in alike.items():
        history = states[indices[0]].weight_history
        # Fake tensors have no addresses.
        has_addresses = type(history) is Tensor and history.device.type == "cpu"
        native = native_module() if has_addresses else None
        together = _MAX_TOGETHER if native is None else len(indices)
        for first in range(0, len(indices), together):
            chosen = indices[first : first + together]
            arguments = (
                [states[index] for index in chosen],
                [weight_bits[index] for index in chosen],
                [pending_bits[index] for index in chosen],
            )
            if native is None:
                _roll(*arguments)
            else:
                _roll_natively(native, length, *arguments)


def _begin_anew(states: Sequence[DelayedState], weight_bits: Sequence[Tensor]) -> None:
    """Clear the histories of weights whose maximum is not the newest."""
    for state, bits in zip(states, weight_bits, strict=True):
        history = state.weight_history
        history.masked_fill_((history[:, -1] != bits.view(torch.float32))[:, None], 0.0)


def _checked(given: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """Check maxima and return them contiguous, as kernels read them."""
    for bits, like in zip(given, kept, strict=True):
        if bits.dtype != torch.int32 or bits.shape != like.shape:
            raise ValueError(
                expected(
                    f"maxima of shape {tuple(like.shape)} and dtype torch.int32",
                    f"shape {tuple(bits.shape)} and {bits.dtype}",
                    where="roll_together()",
                    hint="Pass bits of fp32 magnitudes, as DelayedState.pending() returns them",
                )
            )
    return [bits.contiguous() for bits in given]


def _roll_natively(
    native: ModuleType,
    length: int,
    states: Sequence[DelayedState],
    weight_bits: Sequence[Tensor],
    pending_bits: Sequence[Tensor],
) -> None:
    weights = [
        (state.weight_history.data_ptr(), bits.data_ptr(), state._weight_bits.data_ptr(), len(bits))
        for state, bits in zip(states, weight_bits, strict=True)
    ]
    operands = [
        (state._operands.data_ptr(), bits.data_ptr(), state._operand_bits.data_ptr(), 2)
        for state, bits in zip(states, pending_bits, strict=True)
    ]
    native.roll_histories(weights=weights, operands=operands, length=length)
    torch._foreach_zero_([state._pending for state in states])
    used = torch.cat([state._operand_bits for state in states])
    _write([state._limits for state in states], _limits_of(used))


def _roll(
    states: Sequence[DelayedState], weight_maxima: Sequence[Tensor], pending: Sequence[Tensor]
) -> None:
    weight_bits, pending_bits = torch.cat(list(weight_maxima)), torch.cat(list(pending))
    weight_history = torch.cat([state.weight_history for state in states])
    operand_history = torch.cat([state._operands for state in states])
    weights, operands = weight_bits.view(torch.float32), pending_bits.view(torch.float32)
    is_new = weights != weight_history[:, -1]
    weight_history = _appended(weight_history, weights, is_new & _is_recorded(weight_bits))
    operand_history = _appended(operand_history, operands, _is_recorded(pending_bits))
    _write([state.weight_history for state in states], weight_history)
    _write([state._operands for state in states], operand_history)
    torch._foreach_zero_([state._pending for state in states])
    _set_used(states, weight_history, operand_history, weight_bits)


def _set_used(
    states: Sequence[DelayedState],
    weight_history: Tensor,
    operand_history: Tensor,
    weight_bits: Tensor,
) -> None:
    """Set the maxima that scales are made from; histories of all states are concatenated rows."""
    before, newest = weight_history[:, :-1], weight_history[:, -1]
    if before.shape[1] > 0:
        largest = before.amax(dim=1)
        newest = torch.where(largest > 0, largest, newest)
    is_finite = weight_bits < _INFINITE_BITS
    weight = torch.where(is_finite, newest.contiguous().view(torch.int32), _NAN_BITS)
    operands = operand_history.amax(dim=1).view(torch.int32)
    _write([state._weight_bits for state in states], weight)
    _write([state._operand_bits for state in states], operands)
    _write([state._limits for state in states], _limits_of(operands))


def _limits_of(operand_bits: Tensor) -> Tensor:
    # With an empty history (-1), a tensor's own maximum is always used.
    return torch.where(operand_bits > 0, _INFINITE_BITS - 1, -1).to(torch.int32)


def _write(targets: Sequence[Tensor], joined: Tensor) -> None:
    """Split the rows of a tensor and copy them to the targets."""
    parts = joined.split([target.shape[0] for target in targets])
    torch._foreach_copy_(list(targets), list(parts))


def _is_recorded(bits: Tensor) -> Tensor:
    return (bits > 0) & (bits < _INFINITE_BITS)


def _appended(history: Tensor, maxima: Tensor, is_recorded: Tensor) -> Tensor:
    """Return histories with the maxima appended to the rows where ``is_recorded``."""
    rolled = torch.cat((history[:, 1:], maxima[:, None]), dim=1)
    return torch.where(is_recorded[:, None], rolled, history)

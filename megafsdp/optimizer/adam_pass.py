"""One pass of Adam over many parameters: the fewest kernel calls for how they lie.

Parameters of a group whose gradients and states lie in flat buffers as they do are stepped
together, neighbours by one segment; any other by itself, through copies in what the kernel takes.
Which gradients there are and what the step costs in communication is adam.py's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.uneven import local_tensor
from megafsdp.optimizer.flat_states import FlatStates
from megafsdp.optimizer.hyper import AdamHyper
from megafsdp.optimizer.kernels import AdamBuffers, AdamSegment, adam_step
from megafsdp.optimizer.state_store import REMAINDER, STATES, StateStore


@dataclass(slots=True)
class Item:
    """One parameter to step.

    Attributes:
        parameter: The parameter.
        grad: Its gradient.
        state: Its states, as the optimizer shows them.
        step: The number of this step, counted from 1.
        states: The flat states of its group; None if it has none.
        index: Its place there.
    """

    parameter: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]
    step: int
    states: FlatStates | None
    index: int


class AdamPass:
    """One step over all parameters of an optimizer.

    Args:
        store: Where states are.
        scale: Factor on the gradients.
        ftz: Whether denormal numbers are flushed.
    """

    def __init__(self, store: StateStore, *, scale: float, ftz: bool) -> None:
        self._store, self._scale, self._ftz = store, scale, ftz
        self._encodings = _Encodings()

    def step(self, items: Sequence[Item], hyper: AdamHyper) -> None:
        """Step parameters of one set of hyperparameters; local."""
        flat: dict[tuple[FlatStates, DBuffer, int], list[int]] = {}
        for item in items:
            buffer = _flat_grad(item)
            if buffer is None or item.states is None:
                self._step_one(item, hyper)
            else:
                flat.setdefault((item.states, buffer, item.step), []).append(item.index)
        for (states, grads, step), indices in flat.items():
            runs = states.runs(indices)
            kept = {name: buffer.flat for name, buffer in states.buffers.items()}
            buffers = AdamBuffers(
                states.group.main_weight.flat,
                grads.flat,
                **{name: kept[name] for name in STATES},
                remainder=kept.get(REMAINDER),
                copy_out=self._encodings.output(states),
            )
            self._call(buffers, [AdamSegment(run.start, run.stop, hyper) for run in runs], step)
            self._encodings.note(states, sum(run.numel for run in runs))

    def finish(self) -> None:
        """Tell the groups whose compute weights were written along with the main weights.

        Call it after the groups were told that their main weights changed.
        """
        self._encodings.finish()

    def _step_one(self, item: Item, hyper: AdamHyper) -> None:
        """Step one tensor by itself, through copies of what the kernel does not take."""
        own = local_tensor(item.parameter)
        if not own.numel():
            return
        kept, copies = [own], [own.contiguous().view(-1)]
        if self._store.has_remainders:
            low = local_tensor(item.state[REMAINDER])
            kept, copies = [own, low], [copies[0], low.contiguous().view(-1)]
        else:
            copies = [copies[0].float()]
        grad = local_tensor(item.grad).reshape(-1)
        moments = self._store.decode(item.parameter, item.state)
        buffers = AdamBuffers(
            copies[0],
            grad.float() if grad.dtype == torch.float64 else grad,
            **moments,
            remainder=copies[1] if len(copies) > 1 else None,
        )
        self._call(buffers, hyper, item.step)
        for tensor, stepped in zip(kept, copies, strict=True):
            if tensor.data_ptr() != stepped.data_ptr():
                tensor.copy_(stepped.view(tensor.shape))
        self._store.encode(item.parameter, item.state, moments)

    def _call(
        self, buffers: AdamBuffers, hyper: AdamHyper | Sequence[AdamSegment], step: int
    ) -> None:
        adam_step(buffers, hyper, step=step, grad_scale=self._scale, flush_denormals=self._ftz)


def _flat_grad(item: Item) -> DBuffer | None:
    """Return the flat buffer that a gradient lies in as its parameter does, if it does."""
    buffer = getattr(item.grad, "_megafsdp_buffer", None)
    states = item.states
    if buffer is None or states is None or not states.buffers.keys() >= set(STATES):
        return None
    return buffer if states.covers(item.index, buffer, item.grad) else None


class _Encodings:
    """Which compute weights a step has written along with the main weights."""

    def __init__(self) -> None:
        self._outputs: dict[FlatStates, torch.Tensor | None] = {}
        self._numels: dict[FlatStates, int] = {}

    def output(self, states: FlatStates) -> torch.Tensor | None:
        """Return where the cast of a group's main weight goes; None if it is made elsewhere."""
        if states not in self._outputs:
            self._outputs[states] = states.group.compute_weight.start_encoding()
        return self._outputs[states]

    def note(self, states: FlatStates, numel: int) -> None:
        """Count elements of parameters that were written."""
        self._numels[states] = self._numels.get(states, 0) + numel

    def finish(self) -> None:
        """Tell the groups, all of whose elements were written, that they need no cast."""
        for states, output in self._outputs.items():
            if output is not None and self._numels.get(states, 0) == states.numel:
                states.group.compute_weight.finish_encoding()

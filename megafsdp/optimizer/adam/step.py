"""One pass of Adam over many parameters, with as few kernel calls as their places allow.

Parameters of a group whose gradients and states lie in flat buffers of the same layout are stepped
together, neighbours as one segment. Any other parameter is stepped by itself, through copies in a
form that the kernel supports. plan.py finds which parameters have a gradient, and where it lies.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import local_object, local_tensor
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.adam.plan import GroupHyper, Members
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, AdamKernel, AdamSegment
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.states.flat import FlatStates
from megafsdp.optimizer.states.quantized import MAIN_WEIGHT
from megafsdp.optimizer.states.store import REMAINDER, StateStore

_START = operator.attrgetter("start")


class AdamPass:
    """One step over all parameters of an optimizer.

    Args:
        store: Where states are.
        scale: Factor on the gradients: a number, or 0-dim on their device, in fp32 on a GPU.
        ftz: Whether denormal numbers are flushed.
        found_inf: 0-dim fp32; kernels change nothing unless it is zero. The step is counted in any
            case: see :meth:`take_back`.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        scale: float | torch.Tensor,
        ftz: bool,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        # A factor on the CPU is passed as a number; one on a GPU is read there by the kernel.
        is_on_host = isinstance(scale, torch.Tensor) and scale.device.type == "cpu"
        self._scale = float(scale) if is_on_host else scale
        self._store, self._ftz, self._found_inf = store, ftz, found_inf
        self._kernels: dict[torch.device, AdamKernel] = {}
        self._encodings = _Encodings()
        # The counted steps; without references to gradients, which the caller frees.
        self._counted: list[tuple[FlatStates, list[int]]] = []
        self._counted_singles: list[dict[str, Any]] = []

    def step_flat(self, states: FlatStates, grads: DBuffer, members: Members) -> None:
        """Step parameters of one flat buffer; their grads lie in a buffer of its layout; local."""
        remainder = states.buffers.get(REMAINDER)
        # With remainders the kernel writes no cast: the bf16 weight is the cast. A step that may be
        # skipped writes none either: the memory of the cast is fresh, and the host would not know
        # that it was not filled. The next gather casts.
        has_cast = remainder is None and self._found_inf is None
        copy_out = self._encodings.output(states) if has_cast else None
        buffers = AdamBuffers(
            weight=states.group.main_weight.flat,
            grad=grads.flat,
            exp_avg=states.buffers["exp_avg"].flat,
            exp_avg_sq=states.buffers["exp_avg_sq"].flat,
            remainder=None if remainder is None else remainder.flat,
            copy_out=copy_out,
        )
        # One call for each count of steps, as the bias correction depends on it: nearly always one.
        by_step: dict[int, list[AdamSegment]] = {}
        for (hyper, _), indices in members:
            self._counted.append((states, indices))
            for step, counted in states.advance(indices).items():
                runs = states.runs(counted)
                segments = [AdamSegment(run.start, run.stop, hyper) for run in runs]
                by_step.setdefault(step, []).extend(segments)
                if copy_out is not None:
                    self._encodings.note(states, sum(run.numel for run in runs))
        for step, segments in by_step.items():
            # Optimizer groups, e.g. with and without decay, lie mixed: runs rise only within each.
            if len(members) > 1:
                segments.sort(key=_START)
            self._call(buffers, segments, step)

    def step_one(
        self,
        parameter: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
        hyper: GroupHyper,
    ) -> None:
        """Step one tensor by itself, through copies where the kernel does not support it; local.

        For a quantized parameter this steps the main weight; the caller makes the codes from it.
        """
        state["step"] += 1
        self._counted_singles.append(state)
        # Return only after the count: all ranks save the same states, so those without rows count.
        weight = state.get(MAIN_WEIGHT, parameter)
        own = local_tensor(weight)
        if not own.numel():
            return
        # Contiguous rows in the kernel's dtype are stepped in place; others as copies.
        kept, copies = [own], [own.contiguous().view(-1)]
        if self._store.has_remainders:
            low = local_tensor(state[REMAINDER])
            kept, copies = [own, low], [copies[0], low.contiguous().view(-1)]
        else:
            copies = [copies[0].float()]
        flat_grad = local_tensor(grad).reshape(-1)
        moments = self._store.decode(parameter, state)
        buffers = AdamBuffers(
            copies[0],
            flat_grad.float() if grad.dtype == torch.float64 else flat_grad,
            **moments,
            remainder=copies[1] if len(copies) > 1 else None,
        )
        self._call(buffers, hyper.known, int(state["step"]))
        for tensor, stepped in zip(kept, copies, strict=True):
            if tensor.data_ptr() != stepped.data_ptr():
                tensor.copy_(stepped.view(tensor.shape))
            elif group_of(parameter) is None:
                # The kernel writes through the address; autograd does not notice such a write.
                # Changes of a group's main weight are counted by the group.
                torch.autograd.graph.increment_version(local_object(weight))
        self._store.encode(parameter, state, moments)

    def finish(self) -> None:
        """Mark the compute weights that the step has written as current.

        Call it after the groups were marked stale.
        """
        self._encodings.finish()

    def take_back(self) -> None:
        """Undo the counts of this step, which the kernels have skipped because of ``found_inf``."""
        for states, indices in self._counted:
            states.take_back(indices)
        for state in self._counted_singles:
            state["step"] -= 1

    def _call(
        self, buffers: AdamBuffers, hyper: AdamHyper | Sequence[AdamSegment], step: int
    ) -> None:
        device = buffers.weight.device
        kernel = self._kernels.get(device)
        if kernel is None:
            # Main weights may lie on several devices, the host among them.
            scale = self._scale.to(device) if isinstance(self._scale, torch.Tensor) else self._scale
            kernel = AdamKernel(
                device,
                grad_scale=scale,
                found_inf=None if self._found_inf is None else self._found_inf.to(device),
                flush_denormals=self._ftz,
            )
            self._kernels[device] = kernel
        kernel(buffers, hyper, step=step)


class _Encodings:
    """The compute weights that a step has written along with the main weights."""

    def __init__(self) -> None:
        self._outputs: dict[FlatStates, torch.Tensor | None] = {}
        self._numels: dict[FlatStates, int] = {}

    def output(self, states: FlatStates) -> torch.Tensor | None:
        """Return the buffer for the cast of a group's main weight; None if it is made elsewhere."""
        if states not in self._outputs:
            self._outputs[states] = states.group.compute_weight.start_encoding()
        return self._outputs[states]

    def note(self, states: FlatStates, numel: int) -> None:
        """Count elements of parameters that were written."""
        self._numels[states] = self._numels.get(states, 0) + numel

    def finish(self) -> None:
        """Mark the compute weights whose elements were all written as current."""
        for states, output in self._outputs.items():
            # If a part was not stepped, it may be stale: then the whole group is cast later.
            if output is not None and self._numels.get(states, 0) == states.numel:
                states.group.compute_weight.mark_encoded()

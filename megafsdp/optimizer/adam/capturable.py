"""A step of Adam that a CUDA graph may capture: the host reads nothing in it.

Counts of steps, learning rates, the factor on gradients and the flag for non-finite gradients stay
tensors on the device, and the constants of the step are computed from them there. A CUDA kernel, if
there is one, does all of this in two launches for a flat buffer. Otherwise the definition in torch
(reference.py) runs, with many operators per parameter, which a graph replays without Python.
"""

from __future__ import annotations

from typing import Any

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import local_object, local_tensor
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.adam.plan import GroupHyper, Members
from megafsdp.optimizer.kernels import cuda as cuda_kernels
from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.kernels.adam_kernel import (
    VALUE_DTYPES,
    AdamBuffers,
    LateSegment,
    late_adam_step,
)
from megafsdp.optimizer.kernels.hyper import AdamConstants
from megafsdp.optimizer.states.flat import FlatStates
from megafsdp.optimizer.states.store import StateStore


class CapturablePass:
    """One step over all parameters of an optimizer, whose inputs all stay on the device.

    Args:
        store: Where states are; moments in fp32 or bf16.
        scale: Factor on the gradients; 0-dim fp32 on the device, or a number.
        found_inf: 0-dim fp32 on the device; nothing changes, and no step is counted, unless it
            is zero. None steps always.
        ftz: Whether the kernel flushes denormal numbers; the definition in torch keeps them.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        scale: torch.Tensor | float,
        found_inf: torch.Tensor | None,
        ftz: bool,
    ) -> None:
        self._store, self._scale, self._found_inf = store, scale, found_inf
        self._ftz = ftz
        self._rates: dict[tuple[torch.Tensor, torch.device], torch.Tensor] = {}

    def step_flat(self, states: FlatStates, grads: DBuffer, members: Members) -> None:
        """Step parameters of one flat buffer; their grads lie in a buffer of its layout; local."""
        main_weight = states.group.main_weight
        moments = [states.buffers[name] for name in self._store.dtypes]
        flats = [main_weight.flat, grads.flat, *(moment.flat for moment in moments)]
        # A segment each: counts of steps may differ, and the host cannot read them to join runs.
        places = [(hyper, index) for hyper, indices in members for index in indices]
        if _has_kernel(*flats):
            ranges = [states.range_of(index) for _, index in places]
            segments = [
                self._segment((run.start, run.stop), hyper, states.shown_step(index))
                for run, (hyper, index) in zip(ranges, places, strict=True)
            ]
            self._launch(flats, sorted(segments, key=lambda segment: segment.start))
            return
        for hyper, index in places:
            self._step(
                main_weight.tensor(index),
                grads.tensor(index),
                [moment.tensor(index) for moment in moments],
                states.shown_step(index),
                hyper,
            )

    def step_one(
        self,
        parameter: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
        hyper: GroupHyper,
    ) -> None:
        """Step one tensor by itself; local."""
        moments = [local_tensor(state[name]) for name in self._store.dtypes]
        own, own_grad = local_tensor(parameter), local_tensor(grad)
        # A user may have set a state whose count is on the host.
        is_count_there = state["step"].device == own.device and state["step"].dtype == torch.float32
        if not (is_count_there and _has_kernel(own, own_grad, *moments)):
            self._step(own, own_grad, moments, state["step"], hyper)
            return
        flats = [tensor.view(-1) for tensor in (own, own_grad, *moments)]
        self._launch(flats, [self._segment((0, own.numel()), hyper, state["step"])])
        if group_of(parameter) is None:
            # The kernel writes through the address; autograd does not notice such a write.
            torch.autograd.graph.increment_version(local_object(parameter))

    def finish(self) -> None:
        """Do nothing: compute weights are cast when they are gathered."""

    def _segment(
        self, place: tuple[int, int], hyper: GroupHyper, step: torch.Tensor
    ) -> LateSegment:
        rate = None
        if hyper.late_lr is not None:
            # The kernel reads fp64. A graph replays the cast, once for all segments of the rate.
            key = (hyper.late_lr, step.device)
            if key not in self._rates:
                self._rates[key] = hyper.late_lr.to(step.device, torch.float64).reshape(())
            rate = self._rates[key]
        return LateSegment(*place, hyper.known, step, rate)

    def _launch(self, flats: list[torch.Tensor], segments: list[LateSegment]) -> None:
        weight, grad, exp_avg, exp_avg_sq = flats
        found_inf, scale = self._found_inf, self._scale
        if isinstance(scale, torch.Tensor):
            scale = scale.to(weight.device)
        late_adam_step(
            AdamBuffers(weight, grad, exp_avg, exp_avg_sq),
            segments,
            grad_scale=scale,
            found_inf=None if found_inf is None else found_inf.to(weight.device).reshape(()),
            flush_denormals=self._ftz,
        )
        # The counts are shown as views; a write to them is noticed by their version.
        torch.autograd.graph.increment_version([segment.step for segment in segments])

    def _step(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: list[torch.Tensor],
        step: torch.Tensor,
        hyper: GroupHyper,
    ) -> None:
        # A branch would need the host: a skipped step computes everything and keeps old values.
        skips = None if self._found_inf is None else self._found_inf.to(step.device) != 0
        step.add_(1.0 if skips is None else (~skips).float())
        constants = _constants(hyper, step)
        kept = [weight, *moments]
        exp_avg, exp_avg_sq = (moment.float() for moment in moments)
        stepped = reference.update(
            weight.float(), grad.float() * self._scale, exp_avg, exp_avg_sq, constants
        )
        for old, new in zip(kept, stepped, strict=True):
            old.copy_(new if skips is None else torch.where(skips, old.float(), new))


def _has_kernel(weight: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor) -> bool:
    """Return whether there is a compiled kernel for these buffers as they are."""
    is_taken = weight.dtype == torch.float32 and grad.dtype in VALUE_DTYPES
    tensors = (weight, grad, *moments)
    return (
        is_taken
        and weight.numel() > 0
        and moments[0].dtype == moments[1].dtype
        and all(tensor.is_contiguous() for tensor in tensors)
        and cuda_kernels.usable_module(weight.device) is not None
    )


def _constants(hyper: GroupHyper, step: torch.Tensor) -> AdamConstants:
    """Compute the constants in fp64 on the device of the step, and round them to fp32 once."""
    # Constants that depend on neither the step nor a tensor learning rate are those of step 1.
    # The others become tensors, which each replay of the graph computes anew.
    known, fixed = hyper.known, AdamConstants.rounded(hyper.known, 1)
    rate = torch.full((), known.lr, dtype=torch.float64, device=step.device)
    late: dict[str, Any] = {}
    if hyper.late_lr is not None:
        rate.copy_(hyper.late_lr.reshape(()))
        # Rounded once from fp64, as in AdamConstants, to the same bits.
        late["decay"] = (1 - rate * known.weight_decay).float() if known.adam_w_mode else 1.0
    if known.bias_correction:
        beta1, beta2 = known.betas
        late["root"] = (1 - beta2 ** step.double()).sqrt().float()
        rate = rate / (1 - beta1 ** step.double())
    late["step_size"] = rate.float()
    return fixed._replace(**late)

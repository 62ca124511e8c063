"""A step of Adam that a CUDA graph may capture: nothing in it is read by the host.

Counts of steps, learning rates, the factor on gradients and whether they are finite stay tensors on
the device, and the constants of the step are computed there from them. It runs the definition in
torch (reference.py), many operators a parameter, which a graph replays without Python.
"""

from __future__ import annotations

from typing import Any

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.kernels.hyper import AdamConstants, AdamHyper
from megafsdp.optimizer.states.flat import FlatStates
from megafsdp.optimizer.states.store import StateStore


class CapturablePass:
    """One step over all parameters of an optimizer, with what it depends on left on the device.

    Args:
        store: Where states are; moments in fp32 or bf16.
        scale: Factor on the gradients; 0-dim fp32 on the device, or a number.
        found_inf: 0-dim fp32 on the device; nothing changes, and no step is counted, unless it
            is zero. None steps always.
    """

    def __init__(
        self, store: StateStore, *, scale: torch.Tensor | float, found_inf: torch.Tensor | None
    ) -> None:
        self._store, self._scale, self._found_inf = store, scale, found_inf
        self._hyper = AdamHyper()
        self._lr: torch.Tensor | None = None

    def begin(self, group: dict[str, Any], *, adam_w_mode: bool) -> None:
        """Take the hyperparameters of a parameter group for the next calls."""
        lr = group["lr"]
        self._lr = lr if isinstance(lr, torch.Tensor) else None
        # Reading a tensor would wait for the device, which a capture forbids.
        known = group if self._lr is None else group | {"lr": 0.0}
        self._hyper = AdamHyper.of(known, adam_w_mode=adam_w_mode)

    def step_flat(self, states: FlatStates, grads: DBuffer, indices: list[int]) -> None:
        """Step parameters of one group, whose gradients lie in a buffer as they do; local."""
        main_weight = states.group.main_weight
        moments = [states.buffers[name] for name in self._store.dtypes]
        # One by one: counts may differ, and the host cannot read them to join parameters.
        for index in indices:
            self._step(
                main_weight.tensor(index),
                grads.tensor(index),
                [moment.tensor(index) for moment in moments],
                states.shown_step(index),
            )

    def step_one(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        """Step one tensor by itself; local."""
        moments = [local_tensor(state[name]) for name in self._store.dtypes]
        own = local_tensor(parameter)
        self._step(own, local_tensor(grad), moments, state["step"])

    def finish(self) -> None:
        """Do nothing: compute weights are cast when they are gathered."""

    def _step(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: list[torch.Tensor],
        step: torch.Tensor,
    ) -> None:
        # Branches would need the host: a skipped step computes all and keeps the old values.
        skips = None if self._found_inf is None else self._found_inf.to(step.device) != 0
        step.add_(1.0 if skips is None else (~skips).float())
        constants = self._constants(step)
        kept = [weight, *moments]
        exp_avg, exp_avg_sq = (moment.float() for moment in moments)
        stepped = reference.update(
            weight.float(), grad.float() * self._scale, exp_avg, exp_avg_sq, constants
        )
        for old, new in zip(kept, stepped, strict=True):
            old.copy_(new if skips is None else torch.where(skips, old.float(), new))

    def _constants(self, step: torch.Tensor) -> AdamConstants:
        """Compute the constants in double where the step is, and round them to fp32 once."""
        # The constants of step 1 serve where neither the step nor a learning rate in a tensor
        # matters. The others become tensors, which each replay of the graph computes anew.
        hyper, fixed = self._hyper, AdamConstants.rounded(self._hyper, 1)
        rate = torch.full((), hyper.lr, dtype=torch.float64, device=step.device)
        late: dict[str, Any] = {}
        if self._lr is not None:
            rate.copy_(self._lr)
            # Rounded once from double, as AdamConstants does, to the same bits.
            late["decay"] = (1 - rate * hyper.weight_decay).float() if hyper.adam_w_mode else 1.0
        if hyper.bias_correction:
            beta1, beta2 = hyper.betas
            late["root"] = (1 - beta2 ** step.double()).sqrt().float()
            rate = rate / (1 - beta1 ** step.double())
        late["step_size"] = rate.float()
        return fixed._replace(**late)

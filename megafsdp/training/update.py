"""What becomes of a global batch's gradients: their norm, and one clipped step of the optimizer.

With FusedAdam the factors of unscaling and clipping ride in the step's own pass over the gradients,
which are left as they are; elsewhere gradients are unscaled and clipped in place first. Both give
the same weights, bit for bit where main gradients are fp32 and the loss scale a power of two.
Whether a step is taken is decided by :mod:`megafsdp.training.step`, between the norm and the step.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from megafsdp.optimizer.adam import FusedAdam
from megafsdp.optimizer.clip import clip_coefficient, clip_grad_norm_
from megafsdp.optimizer.grad_norms import total_norm
from megafsdp.optimizer.scaler import LossScaler


class WeightUpdate:
    """The norm of a step's gradients, then the step or nothing.

    Args:
        model: Whose gradients are clipped together.
        optimizer: Over the model's parameters.
        clip_norm: Largest norm of all gradients; None does not clip.
        scaler: Scales the loss; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        scaler: LossScaler | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._max_norm = math.inf if clip_norm is None else clip_norm
        self._scaler = scaler
        self._norm = torch.zeros(())

    @property
    def loss_scale(self) -> float | None:
        """Return the factor on this step's loss; None without a scaler."""
        return None if self._scaler is None else self._scaler.current_scale

    @property
    def is_scale_movable(self) -> bool:
        """Tell whether an overflow may be the scale's fault, which a smaller scale mends."""
        scaler = self._scaler
        if scaler is None:
            return False
        return scaler.rule.is_dynamic and scaler.current_scale > scaler.rule.min_scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss that backward starts from; local."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def measure(self) -> float:
        """Return the norm of the unscaled, unclipped gradients; collective over all ranks."""
        if not isinstance(self._optimizer, FusedAdam):
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            self._norm = clip_grad_norm_(self._model, self._max_norm)
        else:
            grads = [p.grad for p in self._model.parameters() if p.grad is not None]
            self._norm = total_norm(grads) / (self.loss_scale or 1.0)
        return float(self._norm)

    def finish(self, *, is_finite: bool) -> None:
        """Step if all ranks found the step finite, tell the scaler, and drop the gradients."""
        if is_finite:
            self._step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.update(is_finite=is_finite)

    def _step(self) -> None:
        optimizer = self._optimizer
        if not isinstance(optimizer, FusedAdam):
            optimizer.step()
            return
        coefficient = float(clip_coefficient(self._norm, self._max_norm))
        # torch's protocol of optimizers that unscale by themselves. In fp64, so that the reciprocal
        # of the reciprocal is the fp32 coefficient again.
        inverse = (self.loss_scale or 1.0) / coefficient
        optimizer.grad_scale = torch.tensor(inverse, dtype=torch.float64)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]

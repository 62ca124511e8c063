"""Measure the gradients of a global batch, and take one clipped step of the optimizer.

FusedAdam measures the norm and clips by it: its step multiplies by the factors of unscaling and
clipping, and the gradients are left as they are. Elsewhere gradients are unscaled and
clipped in place first. Both give the same weights, bit for bit where main gradients are fp32 and
the loss scale a power of two. Whether a step is taken is decided by
:mod:`megafsdp.training.step.train_step`, between the norm and the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from megafsdp.errors import expected
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.grads.clip import clip_grad_norm_
from megafsdp.optimizer.grads.norms import num_zero_grads, param_group_norms
from megafsdp.optimizer.loss_scaler import LossScaler


@dataclass(frozen=True, slots=True)
class GradStatsRequest:
    """What to compute of a step's gradients beside their norm.

    Attributes:
        group_norms: The norm of each parameter group.
        num_zeros: How many elements are zero.
    """

    group_norms: bool = False
    num_zeros: bool = False


@dataclass(frozen=True, slots=True)
class GradStatistics:
    """What is logged of a step's gradients beside their norm, alike on all ranks.

    Attributes:
        group_norms: Norm of each parameter group, unscaled and before clipping; empty if unwanted.
        num_zeros: Elements that are zero; None if unwanted.
    """

    group_norms: tuple[float, ...] = ()
    num_zeros: int | None = None


class WeightUpdate:
    """Measure the norm of a step's gradients, then take the step or skip it.

    Args:
        model: Whose gradients are clipped together.
        optimizer: Over the model's trainable parameters; a FusedAdam clips by itself, by its
            ``max_grad_norm``.
        clip_norm: Largest norm of all gradients; None does not clip.
        scaler: Scales the loss; None for none.

    Raises:
        ValueError: A FusedAdam clips otherwise, or lacks a trainable parameter.
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
        if isinstance(optimizer, FusedAdam):
            _check_clipping(optimizer, model, self._max_norm)

    @property
    def loss_scale(self) -> float | None:
        """Return the factor on this step's loss; None without a scaler."""
        return None if self._scaler is None else self._scaler.current_scale

    @property
    def can_lower_scale(self) -> bool:
        """Return whether a smaller loss scale may avoid an overflow."""
        scaler = self._scaler
        if scaler is None:
            return False
        return scaler.rule.is_dynamic and scaler.current_scale > scaler.rule.min_scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss that backward starts from; local."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self) -> None:
        """Take the loss scale off the gradients, unless the optimizer's step does.

        Collective over all ranks where it does: one all-reduce of one element.
        """
        if self._scaler is not None and not isinstance(self._optimizer, FusedAdam):
            self._scaler.unscale_(self._optimizer)

    def statistics(self, wanted: GradStatsRequest) -> GradStatistics:
        """Return statistics of the gradients; call it between :meth:`unscale` and :meth:`measure`.

        Collective over all ranks: one small all-reduce for each of the two that is wanted.
        """
        is_scaled = isinstance(self._optimizer, FusedAdam)
        scale = (self.loss_scale or 1.0) if is_scaled else 1.0
        norms: tuple[float, ...] = ()
        if wanted.group_norms:
            norms = tuple((param_group_norms(self._optimizer).double() / scale).tolist())
        num_zeros = int(num_zero_grads(self._model)) if wanted.num_zeros else None
        return GradStatistics(norms, num_zeros)

    def measure(self) -> float:
        """Return the norm of the unscaled, unclipped gradients; collective over all ranks.

        Comes after :meth:`unscale`, and clips gradients unless the optimizer's step does.
        """
        if isinstance(self._optimizer, FusedAdam):
            return float(self._optimizer.measure_grad_norm(loss_scale=self.loss_scale or 1.0))
        return float(clip_grad_norm_(self._model, self._max_norm))

    def finish(self, *, is_finite: bool) -> None:
        """Step if all ranks have finite gradients, update the scaler, and drop the gradients."""
        if is_finite:
            self._step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.update(is_finite=is_finite)

    def _step(self) -> None:
        optimizer, loss_scale = self._optimizer, self.loss_scale
        if loss_scale is None or not isinstance(optimizer, FusedAdam):
            optimizer.step()
            return
        # torch's protocol of optimizers that unscale by themselves.
        scale = torch.tensor(loss_scale, dtype=torch.float64, device="cpu")
        optimizer.grad_scale = scale  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]


def _check_clipping(optimizer: FusedAdam, model: nn.Module, max_norm: float) -> None:
    """Check that an optimizer measures all gradients of a model, and clips by this norm.

    Raises:
        ValueError: It does not.
    """
    if optimizer.max_grad_norm != max_norm:
        raise ValueError(
            expected(
                f"an optimizer with max_grad_norm={max_norm}",
                optimizer.max_grad_norm,
                where=f"{type(optimizer).__name__} in a training step",
                hint="Give both the same limit; math.inf where the step's clip_norm is None",
            )
        )
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(
                expected(
                    "an optimizer of all trainable parameters, whose norm clips them together",
                    "one without this",
                    where=f"parameter '{name}'",
                    hint="Give it to the optimizer, or call requires_grad_(False) on it",
                )
            )

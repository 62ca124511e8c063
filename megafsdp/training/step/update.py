"""Measure the gradients of a global batch, and take one clipped step of the optimizer and routers.

FusedAdam measures the norm and clips by it: its step multiplies by the factors of unscaling and
clipping, and the gradients are left as they are. For other optimizers gradients are unscaled and
clipped in place first. Both give the same weights, bit for bit if main gradients are fp32 and
the loss scale a power of two. What is measured stays on the device; whether a step is taken is
decided by :mod:`megafsdp.training.step.train_step`, between the norm and the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafsdp.errors import expected
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.grads.clip import clip_grad_norm_
from megafsdp.optimizer.grads.norms import num_zero_grads, param_group_norms
from megafsdp.optimizer.loss_scaler import LossScaler
from megafsdp.parallel import Router, end_router_step, router_metrics


@dataclass(frozen=True, slots=True)
class StatisticsRequest:
    """What to compute of a step besides its loss and the norm of its gradients.

    Attributes:
        group_norms: The norm of each parameter group's gradients.
        num_zeros: How many elements of gradients are zero.
        expert_loads: How evenly experts were used; for models that have any.
    """

    group_norms: bool = False
    num_zeros: bool = False
    expert_loads: bool = False


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What is logged of a step besides its loss and gradient norm, alike on all ranks.

    Attributes:
        group_norms: Norm of each parameter group, unscaled and before clipping; empty if unwanted.
        num_zeros: Elements that are zero; None if unwanted.
        max_load: Largest load of an expert over the mean, in the layer where it is worst; None if
            unwanted.
        aux_loss: Auxiliary loss of the routers without its coefficient; None if unwanted, or if the
            model has none.
    """

    group_norms: tuple[float, ...] = ()
    num_zeros: int | None = None
    max_load: float | None = None
    aux_loss: float | None = None

    @classmethod
    def of(cls, wanted: StatisticsRequest, numbers: Sequence[float]) -> StepStatistics:
        """Return what :meth:`WeightUpdate.statistics` has computed, read by the host."""
        num_zeros = max_load = aux_loss = None
        if wanted.expert_loads:
            *numbers, max_load, aux_loss = numbers
        if wanted.num_zeros:
            *numbers, num_zeros = numbers
        return cls(
            tuple(numbers),
            None if num_zeros is None else int(num_zeros),
            max_load,
            None if aux_loss is None or math.isnan(aux_loss) else aux_loss,
        )


class WeightUpdate:
    """Measure the norm of a step's gradients, then take the step or skip it.

    Args:
        model: The model whose gradients are clipped together.
        optimizer: Over the model's trainable parameters; a FusedAdam clips by itself, by its
            ``max_grad_norm``.
        clip_norm: Largest norm of all gradients; None does not clip.
        scaler: Scales the loss; None for none.

    Attributes:
        skips_on_device: Whether a step is queued before the host knows that it may be taken.

    Raises:
        ValueError: A FusedAdam clips by another norm, or lacks a trainable parameter.
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
        self.skips_on_device = isinstance(optimizer, FusedAdam) and optimizer.skips_on_device
        if isinstance(optimizer, FusedAdam):
            _check_clipping(optimizer, model, self._max_norm)
        self._has_routers = any(isinstance(module, Router) for module in model.modules())

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
        """Divide the gradients by the loss scale, unless the optimizer's step does so.

        Collective over all ranks if they are divided here: one all-reduce of one element.
        """
        if self._scaler is not None and not isinstance(self._optimizer, FusedAdam):
            self._scaler.queue_unscale(self._optimizer)

    def statistics(self, wanted: StatisticsRequest) -> list[torch.Tensor]:
        """Compute statistics of the step, between :meth:`unscale` and :meth:`measure`.

        Collective over all ranks: one small all-reduce for each that is wanted.

        Returns:
            1-D tensors, in the order in which :meth:`StepStatistics.of` takes their numbers.
        """
        is_scaled = isinstance(self._optimizer, FusedAdam)
        scale = (self.loss_scale or 1.0) if is_scaled else 1.0
        found = []
        if wanted.group_norms:
            found.append(param_group_norms(self._optimizer).double() / scale)
        if wanted.num_zeros:
            found.append(num_zero_grads(self._model).view(1))
        if wanted.expert_loads:
            loads = router_metrics(self._model)
            assert loads is not None, "the model has experts"
            nothing = torch.full_like(loads.max_load, math.nan)
            found.append(
                torch.stack([loads.max_load, nothing if loads.aux_loss is None else loads.aux_loss])
            )
        return found

    def measure(self) -> torch.Tensor:
        """Return the norm of the unscaled, unclipped gradients, 0-dim; collective over all ranks.

        Comes after :meth:`unscale`, and clips gradients unless the optimizer's step does.
        """
        if isinstance(self._optimizer, FusedAdam):
            return self._optimizer.measure_grad_norm(loss_scale=self.loss_scale or 1.0)
        return clip_grad_norm_(self._model, self._max_norm)

    def take(self, found_inf: torch.Tensor | bool) -> None:
        """Step unless a number is not finite, and drop the gradients; :meth:`settle` comes next.

        Biases of routers move with the weights: one all-reduce over all ranks if there are any.

        Args:
            found_inf: What all ranks found. With :attr:`skips_on_device` it is a 0-dim fp32 tensor
                on the device, and the queued step changes nothing unless it is zero.
        """
        if isinstance(found_inf, torch.Tensor):
            self._step(found_inf)
        elif not found_inf:
            self._step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._has_routers:
            end_router_step(self._model, found_inf=found_inf)

    def settle(self, *, is_finite: bool) -> None:
        """Apply what the host has learnt of the step, before the next loss is scaled."""
        if not is_finite and self.skips_on_device:
            assert isinstance(self._optimizer, FusedAdam), "it has queued a step"
            self._optimizer.take_back_step()
        if self._scaler is not None:
            self._scaler.update(is_finite=is_finite)

    def _step(self, found_inf: torch.Tensor | None = None) -> None:
        optimizer, loss_scale = self._optimizer, self.loss_scale
        if not isinstance(optimizer, FusedAdam):
            optimizer.step()
            return
        if loss_scale is not None:
            # torch's protocol for optimizers that unscale by themselves.
            scale = torch.tensor(loss_scale, dtype=torch.float64, device="cpu")
            optimizer.grad_scale = scale  # type: ignore[attr-defined]
        try:
            if found_inf is None:
                optimizer.step()
            else:
                optimizer.step_unless(found_inf)
        finally:
            if loss_scale is not None:
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

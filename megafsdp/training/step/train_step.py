"""One optimizer step on one global batch: microbatches, and what to do about NaN and overflow.

Every decision here is made from reduced numbers, so all ranks decide alike. Learning rates are set
by the caller; the loss of a microbatch is the mean over its tokens and training samples are never
padded, so the mean over microbatches and ranks is the mean over the global batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafsdp.buffer.comm.collectives import all_gather_objects, all_reduce
from megafsdp.data import Batch
from megafsdp.errors import expected
from megafsdp.fsdp import microbatch
from megafsdp.optimizer.loss_scaler import LossScaler
from megafsdp.training.process.signals import StopRequest
from megafsdp.training.step.update import GradStatistics, GradStatsRequest, WeightUpdate

_LOGGER = logging.getLogger("megafsdp.training")
_MAX_IDS = 64
_UNWANTED, _NO_STATISTICS = GradStatsRequest(), GradStatistics()


class NonFiniteError(RuntimeError):
    """Report a step that cannot be taken, as a loss or gradient norm is not finite."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, alike on all ranks except for the sample ids.

    Attributes:
        loss: Mean loss over the global batch, in nats per token.
        grad_norm: Norm of all gradients before clipping.
        is_skipped: True if the weights were left alone because a number was not finite.
        sample_ids: This rank's samples.
        loss_scale: Factor on the loss in this step; None without loss scaling.
        statistics: What else was asked of its gradients.
    """

    loss: float
    grad_norm: float
    is_skipped: bool
    sample_ids: tuple[int, ...]
    loss_scale: float | None = None
    statistics: GradStatistics = _NO_STATISTICS


class TrainStep:
    """Run steps of a model and its optimizer.

    Args:
        model: Sharded; returns the mean loss when it is given labels.
        optimizer: Over the model's parameters.
        device: What the model computes on.
        clip_norm: Largest norm of all gradients; None does not clip.
        skips_nonfinite: Skip steps whose loss or gradient norm is not finite, instead of raising.
        max_skips: Steps that may be skipped in a row; overflows that a smaller loss scale may avoid
            do not count.
        stop: Its flag is reduced with the loss, so that stopping costs no collective of its own.
        scaler: Scales the loss for fp16; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        clip_norm: float | None,
        skips_nonfinite: bool,
        max_skips: int,
        stop: StopRequest,
        scaler: LossScaler | None = None,
    ) -> None:
        self._model = model
        self._update = WeightUpdate(model, optimizer, clip_norm=clip_norm, scaler=scaler)
        self._device = device
        self._skips_nonfinite = skips_nonfinite
        self._max_skips = max_skips
        self._stop = stop
        self.num_skips_in_a_row = 0

    def __call__(
        self, batches: Sequence[Batch], *, wanted: GradStatsRequest = _UNWANTED
    ) -> StepResult:
        """Train on this rank's microbatches of a global batch; collective over all ranks.

        Args:
            batches: The microbatches.
            wanted: What else to compute of the gradients, alike on all ranks.

        Raises:
            NonFiniteError: A loss or the gradient norm is not finite, and the policy is to raise or
                too many steps were skipped in a row. On all ranks; the weights are unchanged.
        """
        loss_scale = self._update.loss_scale
        losses = self._accumulate(batches)
        self._update.unscale()
        statistics = self._update.statistics(wanted)
        grad_norm = self._update.measure()
        loss, is_finite = self._reduce(losses, has_finite_grads=math.isfinite(grad_norm))
        is_recoverable = math.isfinite(loss) and self._update.can_lower_scale
        self._update.finish(is_finite=is_finite)
        if is_finite:
            self.num_skips_in_a_row = 0
        elif is_recoverable:
            _LOGGER.info("skipped a step: gradients overflow at loss scale %g", loss_scale)
        else:
            self._report_nonfinite(batches, losses, loss, grad_norm)
        ids = torch.cat([batch.sample_ids for batch in batches]).tolist()
        return StepResult(loss, grad_norm, not is_finite, tuple(ids), loss_scale, statistics)

    def _accumulate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Run forward and backward of each microbatch; return their losses."""
        self._model.train()
        losses = []
        for index, batch in enumerate(batches):
            with microbatch(self._model, is_last=index == len(batches) - 1):
                loss = self._model(*batch.to(self._device))
                self._update.scale(loss / len(batches)).backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def _reduce(self, losses: torch.Tensor, *, has_finite_grads: bool) -> tuple[float, bool]:
        """Return the mean loss over all ranks and whether it and all gradients are finite.

        The same all-reduce agrees on a request to stop.
        """
        one = torch.ones((), dtype=torch.float64, device=self._device)
        flags = (self._stop.is_requested, not has_finite_grads)
        sums = torch.stack([losses.double().mean(), one, *(one * flag for flag in flags)])
        all_reduce(sums, label="loss")
        total, num_ranks, num_requests, num_bad = sums.tolist()
        self._stop.record_agreement(num_requests)
        loss = total / num_ranks
        return loss, math.isfinite(loss) and not num_bad

    def _report_nonfinite(
        self, batches: Sequence[Batch], losses: torch.Tensor, loss: float, grad_norm: float
    ) -> None:
        """Log the samples behind a step that cannot be taken, and raise if that is the policy."""
        is_bad = ~torch.isfinite(losses).cpu()
        suspects = [b.sample_ids for b, bad in zip(batches, is_bad.tolist(), strict=True) if bad]
        mine = torch.cat(suspects).tolist() if suspects else []
        ids = [sample for of_rank in all_gather_objects(mine) for sample in of_rank]
        if not ids:
            # Only the gradients are broken: any sample of the batch may have done it.
            all_ids = torch.cat([batch.sample_ids for batch in batches]).tolist()
            ids = [sample for of_rank in all_gather_objects(all_ids) for sample in of_rank]
        shown = f"{sorted(ids)[:_MAX_IDS]}"
        found = f"loss {loss} and gradient norm {grad_norm}"
        self.num_skips_in_a_row += 1
        # Steps that overflow at the smallest or constant loss scale are skipped, as Megatron does.
        is_overflow = self._update.loss_scale is not None and math.isfinite(loss)
        if not self._skips_nonfinite and not is_overflow:
            hint = "Look at these samples, lower optimizer.lr, or set train.nan_policy to skip"
        elif self.num_skips_in_a_row > self._max_skips:
            found += f" for {self.num_skips_in_a_row} steps in a row"
            hint = "Go back to an earlier checkpoint with a lower optimizer.lr"
        else:
            _LOGGER.warning("skipped a step with %s; samples %s", found, shown)
            return
        raise NonFiniteError(
            expected("a finite loss and gradient norm", found, where=f"samples {shown}", hint=hint)
        )

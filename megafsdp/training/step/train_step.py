"""One optimizer step on one global batch: microbatches, and what to do about NaN and overflow.

Every decision here is made from reduced numbers, so all ranks decide alike. Learning rates are set
by the caller; the loss of a microbatch is the mean over its tokens and training samples are never
padded, so the mean over microbatches and ranks is the mean over the global batch.

The host reads one tensor of numbers a step. If the optimizer can skip a step on the device, the
host reads after it has queued the next step's first forward, so that the device does not run dry::

    host     queue step 1   queue forward 2   read 1, decide   queue the rest of step 2   ...
    device                  [ step 1                  ][ forward 2 ][ rest of step 2 ]
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafsdp.buffer.comm.collectives import all_gather_objects, all_reduce
from megafsdp.checkpoint.format.manifest import TRACKER_FILE
from megafsdp.data import Batch
from megafsdp.device.host_copies import LateNumbers
from megafsdp.errors import NonFiniteError, expected
from megafsdp.fsdp import microbatch
from megafsdp.optimizer.loss_scaler import LossScaler
from megafsdp.training.process.signals import StopRequest
from megafsdp.training.step.update import StatisticsRequest, StepStatistics, WeightUpdate

_LOGGER = logging.getLogger("megafsdp.training")
_MAX_IDS = 64
_UNWANTED, _NO_STATISTICS = StatisticsRequest(), StepStatistics()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, alike on all ranks except for the sample ids.

    Attributes:
        loss: Mean loss over the global batch, in nats per token.
        grad_norm: Norm of all gradients before clipping.
        is_skipped: True if the weights were left alone because a number was not finite.
        sample_ids: This rank's samples.
        loss_scale: Factor on the loss in this step; None without loss scaling.
        statistics: The other numbers that were asked for.
    """

    loss: float
    grad_norm: float
    is_skipped: bool
    sample_ids: tuple[int, ...]
    loss_scale: float | None = None
    statistics: StepStatistics = _NO_STATISTICS


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A step that the device has in its queue, or has done.

    Attributes:
        batches: This rank's microbatches.
        losses: The microbatches' losses, 1-D.
        numbers: What the host reads.
        loss_scale: Factor on the loss; None without loss scaling.
        wanted: Which other statistics are among the numbers.
    """

    batches: Sequence[Batch]
    losses: torch.Tensor
    numbers: LateNumbers
    loss_scale: float | None
    wanted: StatisticsRequest


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of a step, in their order; the first four are sums over ranks."""

    total_loss: float
    num_ranks: float
    num_requests: float
    num_bad: float
    grad_norm: float
    statistics: tuple[float, ...]

    @classmethod
    def of(cls, queued: QueuedStep) -> _Numbers:
        """Read the numbers of a queued step; waits for the device."""
        loss, num_ranks, num_requests, num_bad, grad_norm, *rest = queued.numbers.read()
        return cls(loss, num_ranks, num_requests, num_bad, grad_norm, tuple(rest))

    @property
    def loss(self) -> float:
        """Return the mean loss over all ranks."""
        return self.total_loss / self.num_ranks

    @property
    def is_finite(self) -> bool:
        """Return whether the loss and all gradients are finite."""
        return math.isfinite(self.total_loss) and not self.num_bad


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

    @property
    def reads_late(self) -> bool:
        """Return whether a step is queued before the host knows its numbers."""
        return self._update.skips_on_device

    def __call__(
        self, batches: Sequence[Batch], *, wanted: StatisticsRequest = _UNWANTED
    ) -> StepResult:
        """Train on this rank's microbatches of a global batch; collective over all ranks.

        Args:
            batches: The microbatches.
            wanted: What else to compute of the step, alike on all ranks.

        Raises:
            NonFiniteError: As :meth:`settle`.
        """
        return self.settle(self.queue(batches, wanted=wanted))

    def queue(
        self,
        batches: Sequence[Batch],
        *,
        wanted: StatisticsRequest = _UNWANTED,
        before_backward: Callable[[], None] = lambda: None,
    ) -> QueuedStep:
        """Queue a step; waits for its numbers unless :attr:`reads_late`.

        Collective over all ranks. :meth:`settle` comes next, for one step at a time.

        Args:
            batches: This rank's microbatches of a global batch.
            wanted: What else to compute of the step, alike on all ranks.
            before_backward: Called once the first forward is queued. Nothing before it depends on
                the last step's numbers, so the caller settles that step here, and sets learning
                rates.
        """
        losses = self._accumulate(batches, before_backward)
        loss_scale = self._update.loss_scale
        self._update.unscale()
        statistics = self._update.statistics(wanted)
        numbers = self._reduce(losses, self._update.measure(), statistics)
        queued = QueuedStep(batches, losses, LateNumbers(numbers), loss_scale, wanted)
        if self.reads_late:
            # The loss and num_bad, as placed in _Numbers.
            is_finite = torch.isfinite(numbers[0]) & (numbers[3] == 0)
            self._update.take((~is_finite).float())
        else:
            self._update.take(not _Numbers.of(queued).is_finite)
        return queued

    def settle(self, queued: QueuedStep) -> StepResult:
        """Read the numbers of a step and act on them: the loss scale, skips, a request to stop.

        Local if they are finite, else collective over all ranks.

        Raises:
            NonFiniteError: A loss or the gradient norm is not finite, and the policy is to raise or
                too many steps were skipped in a row. On all ranks; the weights are unchanged.
        """
        numbers = _Numbers.of(queued)
        self._stop.record_agreement(numbers.num_requests)
        is_finite, loss = numbers.is_finite, numbers.loss
        is_recoverable = math.isfinite(loss) and self._update.can_lower_scale
        self._update.settle(is_finite=is_finite)
        if is_finite:
            self.num_skips_in_a_row = 0
        elif is_recoverable:
            _LOGGER.info("skipped a step: gradients overflow at loss scale %g", queued.loss_scale)
        else:
            self._report_nonfinite(queued.batches, queued.losses, loss, numbers.grad_norm)
        return StepResult(
            loss=loss,
            grad_norm=numbers.grad_norm,
            is_skipped=not is_finite,
            sample_ids=tuple(torch.cat([batch.sample_ids for batch in queued.batches]).tolist()),
            loss_scale=queued.loss_scale,
            statistics=StepStatistics.of(queued.wanted, numbers.statistics),
        )

    def _accumulate(
        self, batches: Sequence[Batch], before_backward: Callable[[], None]
    ) -> torch.Tensor:
        """Run forward and backward of each microbatch; return their losses."""
        self._model.train()
        losses = []
        for index, batch in enumerate(batches):
            with microbatch(self._model, is_last=index == len(batches) - 1):
                loss = self._model(*batch.to(self._device))
                if index == 0:
                    before_backward()
                self._update.scale(loss / len(batches)).backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def _reduce(
        self, losses: torch.Tensor, norm: torch.Tensor, statistics: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return what the host reads of a step, fp64 on the device: see :class:`_Numbers`.

        The all-reduce of the loss also agrees on a request to stop and on gradients that are not
        finite: if every rank has whole gradients, they may be bad on one rank alone.
        """
        one = torch.ones((), dtype=torch.float64, device=self._device)
        # Norms of gradients on the host lie there; a queued copy does not wait for the device.
        rest = [t.double().to(self._device, non_blocking=True) for t in (norm.view(1), *statistics)]
        is_bad = ~torch.isfinite(rest[0][0])
        sums = torch.stack(
            [losses.double().mean(), one, one * self._stop.is_requested, is_bad.double()]
        )
        all_reduce(sums, label="loss")
        return torch.cat([sums, *rest])

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
        # Ranks that share out a layer have read the same samples.
        shown = f"{sorted(set(ids))[:_MAX_IDS]}"
        found = f"loss {loss} and gradient norm {grad_norm}"
        self.num_skips_in_a_row += 1
        # Steps that overflow at the smallest or constant loss scale are skipped, as Megatron does.
        is_overflow = self._update.loss_scale is not None and math.isfinite(loss)
        if not self._skips_nonfinite and not is_overflow:
            hint = "Look at these samples, lower optimizer.lr, or set train.nan_policy to skip"
        elif self.num_skips_in_a_row > self._max_skips:
            found += f" for {self.num_skips_in_a_row} steps in a row"
            hint = f"Go back by the number of an earlier checkpoint in {TRACKER_FILE}, and lower"
            hint += " optimizer.lr"
        else:
            _LOGGER.warning("skipped a step with %s; samples %s", found, shown)
            return
        raise NonFiniteError(
            expected("a finite loss and gradient norm", found, where=f"samples {shown}", hint=hint)
        )

"""Speculative steps: Adam on the host during backward, before the norm of all gradients is known.

A step that waits for the norm leaves the host idle during backward. Where the loop marks the last
microbatch, and the optimizer clips by itself, each bucket is stepped as soon as its gradients are
complete, by the factor of a step that does not clip. It reads one slab and writes another, so
nothing that is shown changes before ``step()``::

    slab    weight  exp_avg  exp_avg_sq   read; parameters and states show it
    spare   weight  exp_avg  exp_avg_sq   written; a right guess exchanges the two

``step()`` compares what it would do with what was done, and repeats what differs. A wrong guess
costs time, never bits.

hybrid.py calls :meth:`StepsAhead.begin` in backward and :meth:`StepsAhead.take` in ``step()``;
:meth:`StepsAhead.cancel` drops work in between. bucket.py and bucket_step.py do not use this file.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.background import BackgroundThread
from megafsdp.device.host_copies import CopyLink
from megafsdp.device.host_memory import HostArena, aligned_nbytes
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.errors import expected
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers
from megafsdp.optimizer.kernels.hyper import round_to_fp32
from megafsdp.optimizer.offload.bucket import WEIGHT, Bucket, GradientCopy
from megafsdp.optimizer.offload.bucket_step import (
    BucketStep,
    DeferredScalar,
    HostThreads,
    SegmentRun,
)

Speculate = bool | Literal["auto"]

# "auto" guesses while a running mean of past norms is below this part of the limit.
_DECAY = 0.9
_MARGIN = 0.8
# Sums of squares are rounded differently here and in the norm.
_ROUNDING = 1e-3


def check_speculate(speculate: object) -> None:
    """Check the choice of speculation.

    Raises:
        ValueError: It is none.
    """
    if not (isinstance(speculate, bool) or speculate == "auto"):
        raise ValueError(
            expected(
                "True, False or 'auto'",
                repr(speculate),
                where="speculate of HybridDeviceOptimizer",
                hint="Leave it at 'auto' to guess while few steps are clipped",
            )
        )


@dataclass(slots=True)
class OffloadCounts:
    """Counts of the steps of buckets that ran ahead of ``step()``.

    Attributes:
        speculated: Ran ahead.
        committed: Of these, taken as they were.
        replayed: Of these, made anew with another factor or other hyperparameters.
    """

    speculated: int = 0
    committed: int = 0
    replayed: int = 0


class ClippingForecast:
    """The guess that one step does not clip, which arriving gradients may refute.

    Args:
        scale: The guessed factor on the gradients.
        max_norm: The norm from which the step clips.
    """

    def __init__(self, scale: float, max_norm: float) -> None:
        self.scale = scale
        self._limit = max_norm * (1.0 + _ROUNDING)
        self._square_sum = 0.0
        # For the sum, which the worker adds to. Backward reads is_refuted without it: one flag.
        self._lock = threading.Lock()
        self.is_refuted = False

    def add_norm(self, norm: float) -> None:
        """Count the norm of some of this rank's gradients: that of all is no smaller."""
        with self._lock:
            self._square_sum += (norm * self.scale) ** 2
            # Written so that NaN refutes the guess too.
            if not (math.isfinite(norm) and math.sqrt(self._square_sum) <= self._limit):
                self.is_refuted = True


class Forecaster:
    """Make the forecast of each step from the norms of past steps.

    Args:
        speculate: Whether to guess; ``"auto"`` while the norm stays well below the limit.
    """

    def __init__(self, speculate: Speculate) -> None:
        self.speculate = speculate
        self._mean_norm: float | None = None
        self._loss_scale = 1.0
        self._last: tuple[DeferredScalar | None, DeferredScalar] | None = None

    def note_step(
        self, norm: torch.Tensor | None, loss_scale: torch.Tensor | None, link: CopyLink
    ) -> None:
        """Record the norm and the loss scale of a step; does not wait for them."""
        self._read_last()
        self._last = (
            None if norm is None else DeferredScalar(norm, link),
            DeferredScalar(1.0 if loss_scale is None else loss_scale, link),
        )

    def _read_last(self) -> None:
        # Read one step later, when the device has long made them: nothing waits in step().
        if self._last is None:
            return
        (norm, loss_scale), self._last = self._last, None
        self._loss_scale = loss_scale.value()
        if norm is not None and math.isfinite(value := norm.value()):
            before = value if self._mean_norm is None else self._mean_norm
            self._mean_norm = _DECAY * before + (1.0 - _DECAY) * value

    def forecast(self, max_norm: float) -> ClippingForecast | None:
        """Return the guess for the coming step; None not to guess."""
        self._read_last()
        if self.speculate == "auto":
            # Early steps clip nearly always: until a norm is known the guess is that they do.
            mean = math.inf if self._mean_norm is None else self._mean_norm
            is_likely = mean < _MARGIN * max_norm or math.isinf(max_norm)
        else:
            is_likely = self.speculate
        return ClippingForecast(1.0 / self._loss_scale, max_norm) if is_likely else None


class SpareSlab:
    """The second slab of a bucket: a weight and moments like those that are shown.

    Args:
        bucket: The bucket; not referred to.
        ledger: Counts the bytes.
    """

    def __init__(self, bucket: Bucket, ledger: ByteLedger) -> None:
        shown = bucket.shown()
        nbytes = sum(aligned_nbytes(buffer.flat.nbytes) for buffer in shown.values())
        arena = HostArena(nbytes, is_pinned=bucket.is_param_pinned)
        self.pinned_nbytes = arena.pinned_nbytes
        self._buffers = {
            name: DBuffer(
                buffer.layout,
                buffer.residence,
                shard=buffer.shard,
                dtype=buffer.flat.dtype,
                device=buffer.flat.device,
                ledger=ledger,
                category=Category.MAIN_WEIGHT if name == WEIGHT else Category.OPTIMIZER_STATE,
                memory=arena.take(buffer.flat.numel(), buffer.flat.dtype),
            )
            for name, buffer in shown.items()
        }
        # A step does not write the gaps between its runs, which must be zero in both slabs.
        for buffer in self._buffers.values():
            buffer.zero_gaps()
        # Views of the shown slab and of the spare, made once: thousands are slow to make.
        self._views: dict[str, list[list[torch.Tensor]]] = {}

    def step_buffers(self, bucket: Bucket) -> AdamBuffers:
        """Return the buffers of a step that reads the shown slab and writes this one."""
        flats = {name: buffer.flat for name, buffer in bucket.shown().items()}
        flats |= {f"new_{name}": buffer.flat for name, buffer in self._buffers.items()}
        return AdamBuffers(grad=bucket.grad, copy_out=bucket.copy_out, **flats)

    def exchange(
        self, bucket: Bucket, states_by_parameter: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Show this slab and keep the other as the spare; copies nothing.

        Args:
            bucket: The bucket.
            states_by_parameter: The states that the optimizer shows, in the flat buffers.
        """
        if not self._views:
            for name, buffer in bucket.shown().items():
                both = (buffer, self._buffers[name])
                self._views[name] = [bucket.group.views_of(each) for each in both]
        for views in self._views.values():
            views.reverse()
        shown = {name: views for name, (views, _) in self._views.items()}
        bucket.group.exchange_main_weight(self._buffers[WEIGHT], shown[WEIGHT])
        bucket.states.exchange(self._buffers, shown, states_by_parameter)


@dataclass(eq=False)
class AheadStep:
    """Adam on one bucket before ``step()`` is called, into the spare slab; a job of the worker.

    Attributes:
        bucket: The bucket.
        copy: Its gradients.
        segment_runs: The segments to step.
        forecast: The guess.
        threads: Of the kernel.
        counts: Where it is counted.
        spare: The slab that it writes.
    """

    bucket: Bucket
    copy: GradientCopy
    segment_runs: list[SegmentRun]
    forecast: ClippingForecast
    threads: HostThreads
    counts: OffloadCounts
    spare: SpareSlab
    is_done: bool = field(init=False, default=False)
    error: BaseException | None = field(init=False, default=None)
    _num_changes: int = field(init=False)
    _is_cancelled: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Fix the buffers, and the state of the weights that they have."""
        self._num_changes = self.bucket.group.num_changes
        # Taken here: by the time that the worker runs, step() may have exchanged the slabs.
        self.buffers = self.spare.step_buffers(self.bucket)

    @property
    def urgency(self) -> int:
        """Return the place in forward: what runs first there is needed first."""
        return self.bucket.position

    @property
    def can_begin(self) -> bool:
        """Return whether the gradients are there."""
        return self.copy.transfer.is_done

    def run(self) -> None:
        """Run the step, in the worker's thread; an error is kept for the :class:`BucketStep`."""
        if self._is_cancelled:
            return
        try:
            with torch.no_grad():
                self._run()
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        self.copy.wait()
        self.forecast.add_norm(self.copy.norm)
        if self.forecast.is_refuted:
            return
        # The last step's cast is still being read from copy_out until its upload has ended.
        self.bucket.wait_for_upload()
        self.threads.update(self.buffers, self.segment_runs, self.forecast.scale)
        self.is_done = True
        self.counts.speculated += 1

    def cancel(self) -> None:
        """Cancel the step: it does not begin any more, and its result is dropped. Returns at once.

        The slab that is shown may be written meanwhile: a step that runs writes the spare one.
        """
        self._is_cancelled = True

    def has_ended(self) -> bool:
        """Return whether the guessed step lies in the spare slab; in the worker's thread.

        Raises:
            BaseException: The error that made it fail.
        """
        if self.error is not None:
            raise self.error
        return self.is_done

    def is_of(self, copy: GradientCopy, segment_runs: list[SegmentRun]) -> bool:
        """Return whether it steps the current weights by these gradients and hyperparameters."""
        group = self.bucket.group
        # Compare counts only after this: it is what notices writes by others since the last look.
        group.mark_stale_if_written()
        is_alike = self.copy is copy and self.segment_runs == segment_runs
        return is_alike and self._num_changes == group.num_changes and not self._is_cancelled

    def has_guessed(self, scale: float) -> bool:
        """Return whether this is the factor that was guessed."""
        return round_to_fp32(self.forecast.scale) == round_to_fp32(scale)


@dataclass(eq=False)
class ValidatingStep(BucketStep):
    """The step of a bucket that takes the result of an :class:`AheadStep` if the guess was right.

    Attributes:
        counts: Where it is counted what became of steps ahead.
        states_by_parameter: The states that the optimizer shows.
        ahead: The step that was begun for this one; None without one.
    """

    counts: OffloadCounts = field(kw_only=True)
    states_by_parameter: Mapping[torch.Tensor, dict[str, Any]] = field(kw_only=True)
    ahead: AheadStep | None = field(init=False, default=None)
    _takes_ahead: bool = field(init=False, default=False)

    def start(self) -> None:
        """Choose the buffers, issue the copy, and show the spare slab if the step writes there."""
        super().start()
        if self.ahead is not None and self._takes_ahead:
            # Before the worker has run: readers wait for this step, not for the exchange.
            self.ahead.spare.exchange(self.bucket, self.states_by_parameter)

    def _take_buffers(self) -> list[torch.Tensor]:
        ahead = self.ahead
        if ahead is None:
            return super()._take_buffers()
        if ahead.is_of(self._copy, self.segment_runs):
            # A factor that is still on its way is compared by the worker: step() does not wait.
            self._takes_ahead = not self.scale.is_there or ahead.has_guessed(self.scale.value())
        if not self._takes_ahead:
            ahead.cancel()
            return super()._take_buffers()
        # From one slab into the other, whether the result is taken or made again.
        buffers = self._buffers = ahead.buffers
        self._result, *moments = buffers.outputs
        return [buffers.weight, buffers.exp_avg, buffers.exp_avg_sq, self._result, *moments]

    def _make_result(self, scale: float) -> None:
        if not self._is_done_ahead(scale):
            super()._make_result(scale)

    def _is_done_ahead(self, scale: float) -> bool:
        """Return whether the step was made ahead, with this factor; count what becomes of it."""
        # Released here: it refers to gradients and their copy.
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return False
        if not ahead.has_ended():
            # Its gradients came while the worker chose this job, so it is still in the queue. It
            # must not run later, when the slabs are those of another step.
            ahead.cancel()
            return False
        if self._takes_ahead and ahead.has_guessed(scale):
            self.counts.committed += 1
            return True
        self.counts.replayed += 1
        return False


class StepsAhead:
    """The work that was begun for the coming step.

    Args:
        speculate: Whether to guess; ``"auto"`` while few steps are clipped.
        worker: Runs the steps.
        link: Brings norms and loss scales to the host.
        ledger: Counts the bytes of second slabs.
    """

    def __init__(
        self, speculate: Speculate, worker: BackgroundThread, link: CopyLink, ledger: ByteLedger
    ) -> None:
        self.counts = OffloadCounts()
        self.forecaster = Forecaster(speculate)
        self._worker, self._link, self._ledger = worker, link, ledger
        self._begun: dict[Bucket, AheadStep] = {}
        # Weak: a bucket that returns to the device is freed, and its second slab with it.
        self._spares: weakref.WeakKeyDictionary[Bucket, SpareSlab] = weakref.WeakKeyDictionary()
        # Buckets that would have run ahead, had they had one.
        self._without_spare: set[Bucket] = set()
        self._forecast: ClippingForecast | None = None
        self._is_new = True

    def begin(
        self,
        bucket: Bucket,
        grads: torch.Tensor,
        max_norm: float,
        threads: HostThreads,
        find_segment_runs: Callable[[], list[SegmentRun] | None],
    ) -> None:
        """Issue the copy of a bucket's gradients and, if the guess allows, Adam on them.

        Args:
            bucket: The bucket.
            grads: Its main gradient, 1-D, complete.
            max_norm: The norm from which the step clips.
            threads: Of the kernel.
            find_segment_runs: Returns the segments to step; None to begin nothing.
        """
        if self._is_new:
            # Once a step: all of its buckets add to one sum of squares.
            self._forecast, self._is_new = self.forecaster.forecast(max_norm), False
        forecast = self._forecast
        speculates = forecast is not None and not forecast.is_refuted
        copy = bucket.copy_grads(grads, has_norm=speculates)
        segment_runs = find_segment_runs() if speculates else None
        if forecast is None or segment_runs is None:
            return
        self.cancel(bucket)
        spare = self._spares.get(bucket)
        if spare is None:
            # Not made here: touching and locking its pages would hold up the backward.
            self._without_spare.add(bucket)
            return
        step = AheadStep(bucket, copy, segment_runs, forecast, threads, self.counts, spare)
        self._begun[bucket] = step
        self._worker.submit(step)

    def take(
        self,
        steps: Sequence[BucketStep],
        norm: torch.Tensor | None,
        loss_scale: torch.Tensor | None,
    ) -> None:
        """Attach to each step the one that was begun for its bucket; drop the others.

        Args:
            steps: The steps of all buckets, not started.
            norm: Of their gradients, for the next forecast; None if it was not measured.
            loss_scale: Factor on the loss; None for 1.
        """
        self.forecaster.note_step(norm, loss_scale, self._link)
        for step in steps:
            ahead = self._begun.pop(step.bucket, None)
            if ahead is not None:
                assert isinstance(step, ValidatingStep), "only Adam is run ahead of the step"
                step.ahead = ahead
        self.cancel_all()

    def make_spares(self, buckets: Iterable[Bucket] = ()) -> None:
        """Make the second slabs of buckets, and of those that lacked one in the last backward."""
        for bucket in (*buckets, *self._without_spare):
            self._spares[bucket] = SpareSlab(bucket, self._ledger)
        self._without_spare.clear()

    @property
    def pinned_nbytes(self) -> int:
        """Return the locked bytes of second slabs."""
        return sum(spare.pinned_nbytes for spare in self._spares.values())

    def cancel(self, bucket: Bucket) -> None:
        """Drop what was begun for a bucket, which others will read or write; returns at once."""
        self._without_spare.discard(bucket)
        step = self._begun.pop(bucket, None)
        if step is not None:
            step.cancel()

    def cancel_all(self) -> None:
        """Drop what was begun for a step that does not come, or not with these weights."""
        for bucket in list(self._begun):
            self.cancel(bucket)
        self._is_new = True

"""Speculative steps: Adam on the host during backward, before the norm of all gradients is known.

A step that waits for the norm leaves the host idle during backward. If the loop marks the last
microbatch, and the optimizer itself clips, each bucket is stepped as soon as its gradients are
complete, with the factor of a step that does not clip. It reads one slab and writes another, so no
visible parameter or state changes before ``step()``::

    slab    weight  exp_avg  exp_avg_sq   read; parameters and states are views of it
    spare   weight  exp_avg  exp_avg_sq   written; if the guess was right, the two are exchanged

``step()`` compares what it would do with what was done, and repeats what differs. A wrong guess
costs time, but never changes a result.

hybrid.py calls :meth:`StepsAhead.begin` in backward and :meth:`StepsAhead.take` in ``step()``;
:meth:`StepsAhead.cancel` cancels work in between. bucket.py and bucket_step.py do not use this
file.
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

# "auto" guesses while a running mean of past norms is below _MARGIN times the limit.
_DECAY = 0.9
_MARGIN = 0.8
# Sums of squares are rounded differently here and in the norm.
_ROUNDING = 1e-3


def check_speculate(speculate: object) -> None:
    """Check the choice of speculation.

    Raises:
        ValueError: It is none of the choices.
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
        speculated: Steps that ran ahead.
        committed: Of these, steps whose result was used.
        replayed: Of these, steps that were repeated with another factor or other hyperparameters.
    """

    speculated: int = 0
    committed: int = 0
    replayed: int = 0


class ClippingForecast:
    """The guess that one step does not clip, which arriving gradients may refute.

    Args:
        scale: The guessed factor on the gradients.
        max_norm: The norm above which the step clips.
    """

    def __init__(self, scale: float, max_norm: float) -> None:
        self.scale = scale
        self._limit = max_norm * (1.0 + _ROUNDING)
        self._square_sum = 0.0
        # Guards the sum, which the worker adds to. Backward reads is_refuted, one flag, without it.
        self._lock = threading.Lock()
        self.is_refuted = False

    def add_norm(self, norm: float) -> None:
        """Add the norm of some of this rank's gradients; the norm of all is at least as large."""
        with self._lock:
            self._square_sum += (norm * self.scale) ** 2
            # Written so that NaN refutes the guess too.
            if not (math.isfinite(norm) and math.sqrt(self._square_sum) <= self._limit):
                self.is_refuted = True


class Forecaster:
    """Make the forecast of each step from the norms of past steps.

    Args:
        speculate: Whether to guess; ``"auto"`` guesses while the norm stays well below the limit.
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
        # Read one step later, when the values have long arrived, so that step() does not wait.
        if self._last is None:
            return
        (norm, loss_scale), self._last = self._last, None
        self._loss_scale = loss_scale.value()
        if norm is not None and math.isfinite(value := norm.value()):
            before = value if self._mean_norm is None else self._mean_norm
            self._mean_norm = _DECAY * before + (1.0 - _DECAY) * value

    def forecast(self, max_norm: float) -> ClippingForecast | None:
        """Return the forecast for the coming step; None means not to guess."""
        self._read_last()
        if self.speculate == "auto":
            # Early steps nearly always clip: do not guess until a norm is known.
            mean = math.inf if self._mean_norm is None else self._mean_norm
            is_likely = mean < _MARGIN * max_norm or math.isinf(max_norm)
        else:
            is_likely = self.speculate
        return ClippingForecast(1.0 / self._loss_scale, max_norm) if is_likely else None


class SpareSlab:
    """The second slab of a bucket: a weight and moments like those of the shown slab.

    Args:
        bucket: The bucket; no reference to it is kept.
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
        # Gaps must be zero in both slabs, and a step does not write the gaps between its runs.
        for buffer in self._buffers.values():
            buffer.zero_gaps()
        # Views of the shown slab and the spare, made once, as thousands are slow to make.
        self._views: dict[str, list[list[torch.Tensor]]] = {}

    def step_buffers(self, bucket: Bucket) -> AdamBuffers:
        """Return the buffers of a step that reads the shown slab and writes this one."""
        flats = {name: buffer.flat for name, buffer in bucket.shown().items()}
        flats |= {f"new_{name}": buffer.flat for name, buffer in self._buffers.items()}
        return AdamBuffers(grad=bucket.grad, copy_out=bucket.copy_out, **flats)

    def exchange(
        self, bucket: Bucket, states_by_parameter: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Make this slab the shown one and the other the spare; copies nothing.

        Args:
            bucket: The bucket.
            states_by_parameter: The optimizer's ``state``, with views of the flat buffers.
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
        copy: The copy of its gradients.
        segment_runs: The segments to step.
        forecast: The guess.
        threads: Threads of the kernel.
        counts: Counts the step.
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
        """Choose the buffers, and record the version of the weights in them."""
        self._num_changes = self.bucket.group.num_changes
        # Chosen here: before the worker runs, step() may have exchanged the slabs.
        self.buffers = self.spare.step_buffers(self.bucket)

    @property
    def urgency(self) -> int:
        """Return the position in forward: the bucket that runs first is needed first."""
        return self.bucket.position

    @property
    def can_begin(self) -> bool:
        """Return whether the gradients have arrived."""
        return self.copy.transfer.is_done

    def run(self) -> None:
        """Run the step in the worker's thread; keep an error for the :class:`BucketStep`."""
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
        # The previous step's upload reads copy_out until it has ended.
        self.bucket.wait_for_upload()
        self.threads.update(self.buffers, self.segment_runs, self.forecast.scale)
        self.is_done = True
        self.counts.speculated += 1

    def cancel(self) -> None:
        """Cancel the step: it no longer begins, and its result is not used. Does not wait.

        The shown slab may then be written even if the step still runs, as it writes the spare.
        """
        self._is_cancelled = True

    def has_ended(self) -> bool:
        """Return whether the spare slab has the guessed step; in the worker's thread.

        Raises:
            BaseException: The step failed with it.
        """
        if self.error is not None:
            raise self.error
        return self.is_done

    def is_of(self, copy: GradientCopy, segment_runs: list[SegmentRun]) -> bool:
        """Return whether it steps the current weights by these gradients and hyperparameters."""
        group = self.bucket.group
        # Before the counts are compared, as only this call notices writes by others.
        group.mark_stale_if_written()
        is_alike = self.copy is copy and self.segment_runs == segment_runs
        return is_alike and self._num_changes == group.num_changes

    def has_guessed(self, scale: float) -> bool:
        """Return whether the guessed factor equals this one in fp32."""
        return round_to_fp32(self.forecast.scale) == round_to_fp32(scale)


@dataclass(eq=False)
class ValidatingStep(BucketStep):
    """The step of a bucket that takes the result of an :class:`AheadStep` if the guess was right.

    Attributes:
        counts: Counts how steps ahead ended.
        states_by_parameter: The optimizer's ``state``.
        ahead: The step that was begun ahead of this one, or None.
    """

    counts: OffloadCounts = field(kw_only=True)
    states_by_parameter: Mapping[torch.Tensor, dict[str, Any]] = field(kw_only=True)
    ahead: AheadStep | None = field(init=False, default=None)
    _takes_ahead: bool = field(init=False, default=False)

    def start(self) -> None:
        """Choose the buffers, issue the copy, and exchange the slabs if the step uses the spare."""
        super().start()
        if self.ahead is not None and self._takes_ahead:
            # Exchanged before the worker has run: readers wait for this step in any case.
            self.ahead.spare.exchange(self.bucket, self.states_by_parameter)

    def _take_buffers(self) -> list[torch.Tensor]:
        ahead = self.ahead
        if ahead is None:
            return super()._take_buffers()
        if ahead.is_of(self._copy, self.segment_runs):
            # The worker compares a factor that has not arrived yet, so that step() does not wait.
            self._takes_ahead = not self.scale.is_there or ahead.has_guessed(self.scale.value())
        if not self._takes_ahead:
            ahead.cancel()
            return super()._take_buffers()
        # From one slab into the other, whether the result is used or the step is repeated.
        buffers = self._buffers = ahead.buffers
        self._result, *moments = buffers.outputs
        return [buffers.weight, buffers.exp_avg, buffers.exp_avg_sq, self._result, *moments]

    def _make_result(self, scale: float) -> None:
        if not self._is_done_ahead(scale):
            super()._make_result(scale)

    def _is_done_ahead(self, scale: float) -> bool:
        """Return whether the step was made ahead with this factor, and count the outcome."""
        # Release the step ahead, which refers to gradients and their copy.
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return False
        if not ahead.has_ended():
            # Its gradients arrived while the worker chose this job, so it is still in the queue.
            # It must not run later, when the slabs belong to another step.
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
        speculate: Whether to guess; ``"auto"`` guesses while few steps are clipped.
        worker: Runs the steps.
        link: Copies norms and loss scales to the host.
        ledger: Counts the bytes of second slabs.
    """

    def __init__(
        self, speculate: Speculate, worker: BackgroundThread, link: CopyLink, ledger: ByteLedger
    ) -> None:
        self.counts = OffloadCounts()
        self.forecaster = Forecaster(speculate)
        self._worker, self._link, self._ledger = worker, link, ledger
        self._begun: dict[Bucket, AheadStep] = {}
        # Weak: a bucket that returns to the device is freed, and its spare with it.
        self._spares: weakref.WeakKeyDictionary[Bucket, SpareSlab] = weakref.WeakKeyDictionary()
        # Buckets that did not run ahead for lack of a spare.
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
            bucket: The bucket; earlier work for it was cancelled.
            grads: Its complete main gradient, 1-D.
            max_norm: The norm above which the step clips.
            threads: Threads of the kernel.
            find_segment_runs: Returns the segments to step; None to begin nothing.
        """
        if self._is_new:
            # Once per step: all buckets add to one sum of squares.
            self._forecast, self._is_new = self.forecaster.forecast(max_norm), False
        forecast = self._forecast
        speculates = forecast is not None and not forecast.is_refuted
        copy = bucket.copy_grads(grads, has_norm=speculates)
        segment_runs = find_segment_runs() if speculates else None
        if forecast is None or segment_runs is None:
            return
        spare = self._spares.get(bucket)
        if spare is None:
            # Not made here: touching and pinning its pages would delay backward.
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
        """Attach to each step the one that was begun for its bucket; cancel the others.

        Args:
            steps: The steps of all buckets, not started.
            norm: Norm of all gradients, for the next forecast; None if it was not measured.
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
        """Make the spares of buckets, and of those that lacked one in the last backward."""
        for bucket in (*buckets, *self._without_spare):
            self._spares[bucket] = SpareSlab(bucket, self._ledger)
        self._without_spare.clear()

    @property
    def pinned_nbytes(self) -> int:
        """Return the pinned bytes of all spares."""
        return sum(spare.pinned_nbytes for spare in self._spares.values())

    def cancel(self, bucket: Bucket) -> None:
        """Cancel the work for a bucket, before others read or write its memory; does not wait."""
        self._without_spare.discard(bucket)
        step = self._begun.pop(bucket, None)
        if step is not None:
            step.cancel()

    def cancel_all(self) -> None:
        """Cancel all work for the coming step, whose inputs may change."""
        for bucket in list(self._begun):
            self.cancel(bucket)
        self._is_new = True

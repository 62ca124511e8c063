"""One step of one bucket on the host: gradients in, Adam, compute weights out, and who waits.

::

    device   main gradient ----+                        +----> device copy -> next gather
    copies                     | to the host            | to the device
    host                       +----> Adam, cast -------+

A :class:`BucketStep` is what ``step()`` asks for. Between its submission and
:meth:`BucketStep.wait` the host's main weight and moments belong to the worker. An
:class:`AheadStep` is its middle part run before ``step()`` is called, with a guessed factor on the
gradients, from one slab into the other: the step takes the result, or makes it anew from the first
slab, which nobody has written.

This file does not know which parameters are stepped, nor who runs the step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from megafsdp.buffer.dtensor.busy_memory import register_writer, unregister_writer
from megafsdp.errors import expected
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, AdamKernel, AdamSegment
from megafsdp.optimizer.kernels.hyper import AdamHyper, round_to_fp32
from megafsdp.optimizer.offload.auto_fraction import FractionMeter, HostRate
from megafsdp.optimizer.offload.bucket import Bucket, GradientCopy
from megafsdp.optimizer.offload.offload_guess import ClippingForecast, DeferredScalar
from megafsdp.optimizer.states.flat import FlatStates


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Segments of a bucket whose counts of steps agree.

    Attributes:
        segments: Where they lie, in rising order, with their hyperparameters.
        step: This step, counted from 1.
        numel: Elements of parameters in them.
    """

    segments: tuple[AdamSegment, ...]
    step: int
    numel: int


def stretches_of(
    states: FlatStates, counts: dict[int, list[int]], hyper: AdamHyper
) -> list[SegmentRun]:
    """Return what is stepped of one group's parameters, by their counts of steps."""
    stretches = []
    for count, counted in counts.items():
        runs = states.runs(counted)
        segments = tuple(AdamSegment(run.start, run.stop, hyper) for run in runs)
        stretches.append(SegmentRun(segments, count, sum(run.numel for run in runs)))
    return stretches


@dataclass(frozen=True, slots=True)
class HostThreads:
    """How the kernel runs on the host: its threads, and whether denormals are flushed."""

    num_threads: int
    ftz: bool
    rate: HostRate | None = None

    def update(self, buffers: AdamBuffers, stretches: list[SegmentRun], scale: float) -> None:
        """Step a bucket's weights and moments, with a cast for the device."""
        kernel = AdamKernel(
            buffers.weight.device,
            grad_scale=scale,
            flush_denormals=self.ftz,
            num_threads=self.num_threads,
        )
        begin_s = time.perf_counter()
        for stretch in stretches:
            kernel(buffers, stretch.segments, step=stretch.step)
        if self.rate is not None:
            numel = sum(stretch.numel for stretch in stretches)
            self.rate.note(numel, time.perf_counter() - begin_s)


@dataclass(slots=True)
class OffloadCounts:
    """How many steps of buckets ran ahead of ``step()``, and what became of them.

    Attributes:
        speculated: Ran ahead.
        committed: Of these, taken as they were.
        replayed: Of these, made anew with another factor or other hyperparameters.
    """

    speculated: int = 0
    committed: int = 0
    replayed: int = 0


@dataclass(eq=False)
class AheadStep:
    """Adam on one bucket before ``step()`` is called, into the spare slab; a job of the worker.

    Attributes:
        bucket: The bucket.
        copy: Its gradients.
        stretches: What is stepped.
        outlook: The guess.
        threads: Of the kernel.
        counts: Where it is counted.
    """

    bucket: Bucket
    copy: GradientCopy
    stretches: list[SegmentRun]
    outlook: ClippingForecast
    threads: HostThreads
    counts: OffloadCounts
    is_done: bool = field(init=False, default=False)
    error: BaseException | None = field(init=False, default=None)
    _num_changes: int = field(init=False)
    _is_cancelled: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Take the buffers."""
        self._num_changes = self.bucket.group.num_changes
        self.buffers = self.bucket.buffers_aside()

    @property
    def urgency(self) -> int:
        """Return the place in forward: what runs first there is needed first."""
        return self.bucket.position

    @property
    def can_begin(self) -> bool:
        """Tell whether the gradients are there."""
        return self.copy.transfer.is_done

    def run(self) -> None:
        """Do it; in the worker's thread. An error is kept for the step."""
        if self._is_cancelled:
            return
        try:
            with torch.no_grad():
                self._run()
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        self.copy.wait()
        self.outlook.see(self.copy.norm)
        if self.outlook.is_hopeless:
            return
        self.bucket.wait_for_upload()
        self.threads.update(self.buffers, self.stretches, self.outlook.scale)
        self.is_done = True
        self.counts.speculated += 1

    def cancel(self) -> None:
        """Do not begin if it is not too late; nobody takes the result. Returns at once.

        The slab that is shown may be written meanwhile: what is made of it goes to the spare one.
        """
        self._is_cancelled = True

    def has_ended(self) -> bool:
        """Tell whether the spare slab holds the guessed step; in the worker's thread.

        Raises:
            BaseException: What made it fail.
        """
        if self.error is not None:
            raise self.error
        return self.is_done

    def is_of(self, copy: GradientCopy, stretches: list[SegmentRun]) -> bool:
        """Tell whether it steps the weights as they are, so far, with these gradients."""
        group = self.bucket.group
        group.mark_stale_if_written()
        is_alike = self.copy is copy and self.stretches == stretches
        return is_alike and self._num_changes == group.num_changes and not self._is_cancelled

    def has_guessed(self, scale: float) -> bool:
        """Tell whether this is the factor that was guessed."""
        return round_to_fp32(self.outlook.scale) == round_to_fp32(scale)


@dataclass(eq=False)
class BucketStep:
    """What one step does to one bucket; a job of the worker.

    Attributes:
        bucket: The bucket.
        scale: Factor on the gradients.
        threads: Of the kernel.
        counts: Where it is counted what became of a step ahead.
        meter: Told when the weights are used again.
    """

    bucket: Bucket
    scale: DeferredScalar
    threads: HostThreads
    counts: OffloadCounts
    meter: FractionMeter | None = None
    stretches: list[SegmentRun] = field(init=False, default_factory=list)
    _grads: list[torch.Tensor] = field(init=False, default_factory=list)
    _ahead: AheadStep | None = field(init=False, default=None)
    _takes_ahead: bool = field(init=False, default=False)
    _has_ended: threading.Event = field(init=False, default_factory=threading.Event)
    _error: BaseException | None = field(init=False, default=None)

    def add(self, grads: torch.Tensor, stretch: SegmentRun) -> None:
        """Note a stretch to step, and the main gradient that has its gradients, 1-D."""
        self._grads.append(grads)
        self.stretches.append(stretch)

    @property
    def urgency(self) -> int:
        """Return the place in forward: what runs first there is needed first."""
        return self.bucket.position

    @property
    def can_begin(self) -> bool:
        """Tell whether the gradients and their factor are there: steps ahead need not wait."""
        return self._copy.transfer.is_done and self.scale.is_there

    def start(self, ahead: AheadStep | None = None) -> bool:
        """Take the buffers and what was begun ahead, and issue the copy that was not.

        Returns:
            Whether the weights and states after the step are those in the spare slab.
        """
        group = self.bucket.group
        self._name = group.label
        self._target = group.compute_weight.start_copy()
        self._copy = self._issue_copy()
        self._grads = []
        self._ahead = ahead
        if ahead is not None and ahead.is_of(self._copy, self.stretches):
            # A factor that is on its way is compared by the worker.
            self._takes_ahead = not self.scale.is_there or ahead.has_guessed(self.scale.value())
        if ahead is not None and not self._takes_ahead:
            ahead.cancel()
        in_use = self._take_buffers(ahead.buffers if ahead and self._takes_ahead else None)
        register_writer(in_use, self)
        group.step_in_flight = self
        return self._takes_ahead

    def _take_buffers(self, aside: AdamBuffers | None) -> list[torch.Tensor]:
        """Take the memory to step, in place or from one slab into the other, and return it."""
        buffers = self._buffers = self.bucket.buffers() if aside is None else aside
        self._result = buffers.weight if buffers.new_weight is None else buffers.new_weight
        moments = (buffers.exp_avg, buffers.exp_avg_sq)
        made = (buffers.new_weight, buffers.new_exp_avg, buffers.new_exp_avg_sq)
        return [buffers.weight, *(t for t in (*moments, *made) if t is not None)]

    def _issue_copy(self) -> GradientCopy:
        """Return the gradients on their way to the host."""
        first, *others = self._grads
        if all(other is first for other in others):
            return self.bucket.copy_grads(first)
        pieces = [
            (segment.start, grads[segment.start : segment.stop])
            for grads, stretch in zip(self._grads, self.stretches, strict=True)
            for segment in stretch.segments
        ]
        return self.bucket.copy_pieces(pieces)

    def finish(self) -> None:
        """Tell the group, which has been told that its main weight changed, what needs no cast.

        Replicated parameters are plain DTensors, whose readers do not ask: their step ends here.
        """
        if sum(stretch.numel for stretch in self.stretches) == self.bucket.states.numel:
            self.bucket.group.compute_weight.mark_encoded()
        if not self.bucket.group.axes.is_sharded:
            self.wait_for_reader()

    def run(self) -> None:
        """Do the step; in the worker's thread. An error is kept for :meth:`wait`."""
        try:
            with torch.no_grad():
                self._run()
        except BaseException as error:
            self._error = error
        finally:
            self._ahead = None
            self._has_ended.set()

    def _run(self) -> None:
        self._copy.wait()
        scale = self.scale.value()
        if not self._is_done_ahead(scale):
            self.bucket.wait_for_upload()
            self._update(scale)
        self._upload()

    def _is_done_ahead(self, scale: float) -> bool:
        """Tell whether the step was made ahead, with this factor; count what becomes of it."""
        ahead = self._ahead
        if ahead is None:
            return False
        if not ahead.has_ended():
            # It was passed over, since its gradients came while the worker chose, and is next.
            ahead.cancel()
            return False
        if self._takes_ahead and ahead.has_guessed(scale):
            self.counts.committed += 1
            return True
        self.counts.replayed += 1
        return False

    def _update(self, scale: float) -> None:
        """Step the weights and moments on the host, with a cast for the device."""
        self.threads.update(self._buffers, self.stretches, scale)

    def _upload(self) -> None:
        """Copy the new compute weights to the device."""
        copy_out = self.bucket.copy_out
        source = self._result if copy_out is None else copy_out
        # The version counter of what forward reads belongs to the thread that runs it.
        target = self._target.data
        self.bucket.uploaded = self.bucket.link.to_device(
            [
                (target[segment.start : segment.stop], source[segment.start : segment.stop])
                for stretch in self.stretches
                for segment in stretch.segments
            ]
        )

    def wait(self) -> None:
        """Return when the host's memory, and for work queued after it the device's, is current.

        Raises:
            RuntimeError: The step failed.
        """
        meter, self.meter = self.meter, None
        begin = None if meter is None else meter.mark_time()
        begin_s = time.perf_counter()
        self._has_ended.wait()
        unregister_writer(self)
        if self._error is not None:
            raise RuntimeError(
                expected(
                    "a step of the optimizer on the host that ends",
                    f"{type(self._error).__name__}: {self._error}",
                    where=f"unit '{self._name}'",
                    hint="Mend the cause and load the last checkpoint: weights are half stepped",
                )
            ) from self._error
        assert self.bucket.uploaded is not None, "the step has ended"
        self.bucket.uploaded.order()
        if meter is not None and begin is not None:
            meter.is_needed(begin, time.perf_counter() - begin_s)

    def wait_for_reader(self) -> None:
        """Wait as :meth:`wait` does, for one who does not use the unit: nothing is measured.

        Raises:
            RuntimeError: The step failed.
        """
        self.meter = None
        self.wait()

"""One step of one bucket on the host: gradients in, Adam, compute weights out, and the waits.

::

    device   main gradient ----+                        +----> device copy -> next gather
    copies                     | to the host            | to the device
    host                       +----> Adam, cast -------+

``step()`` makes a :class:`BucketStep` for each bucket. Between its submission and
:meth:`BucketStep.wait` the host's main weight and moments belong to the worker.

This file chooses neither the parameters to step nor the thread that runs the step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from megafsdp.buffer.dtensor.busy_memory import register_writer, unregister_writer
from megafsdp.device.host_copies import CopyLink, Transfer
from megafsdp.errors import expected
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, AdamKernel, AdamSegment
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.offload.auto_fraction import FractionMeter, HostRate
from megafsdp.optimizer.offload.bucket import Bucket, GradientCopy
from megafsdp.optimizer.states.flat import FlatStates


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Segments of a bucket whose counts of steps agree.

    Attributes:
        segments: The segments in rising order, with their hyperparameters.
        step: This step, counted from 1.
        numel: Elements of parameters in them.
    """

    segments: tuple[AdamSegment, ...]
    step: int
    numel: int


def segment_runs_of(
    states: FlatStates, counts: dict[int, list[int]], hyper: AdamHyper
) -> list[SegmentRun]:
    """Return the segments of one group's parameters, by their counts of steps."""
    found = []
    for count, counted in counts.items():
        runs = states.runs(counted)
        segments = tuple(AdamSegment(run.start, run.stop, hyper) for run in runs)
        found.append(SegmentRun(segments, count, sum(run.numel for run in runs)))
    return found


class DeferredScalar:
    """A number that the host may use before it has arrived from the device.

    Args:
        value: A number, or a 0-dim floating-point tensor.
        link: The link of the tensor's device.
    """

    def __init__(self, value: float | torch.Tensor, link: CopyLink) -> None:
        self._transfer: Transfer | None = None
        self._kept = value
        if isinstance(value, torch.Tensor):
            # Pinned, as a copy to pageable memory would make the host wait for the device.
            is_pinned = value.device.type == "cuda"
            self._kept = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=is_pinned)
            # A copy: the caller may change the tensor before it is read.
            self._source = value.detach().to(torch.float64, copy=True)
            link.fence()
            self._transfer = link.to_host([(self._kept, self._source)])

    @property
    def is_there(self) -> bool:
        """Return whether :meth:`value` returns without a wait."""
        return self._transfer is None or self._transfer.is_done

    def value(self) -> float:
        """Wait for the number and return it; from any thread."""
        if self._transfer is not None:
            self._transfer.wait()
        return float(self._kept)


@dataclass(frozen=True, slots=True)
class HostThreads:
    """The options of the kernel on the host: its threads, and whether denormals are flushed."""

    num_threads: int
    ftz: bool
    rate: HostRate | None = None

    def update(self, buffers: AdamBuffers, segment_runs: list[SegmentRun], scale: float) -> None:
        """Step a bucket's weights and moments, with a cast for the device."""
        kernel = AdamKernel(
            buffers.weight.device,
            grad_scale=scale,
            flush_denormals=self.ftz,
            num_threads=self.num_threads,
        )
        begin_s = time.perf_counter()
        for run in segment_runs:
            kernel(buffers, run.segments, step=run.step)
        if self.rate is not None:
            numel = sum(run.numel for run in segment_runs)
            self.rate.note(numel, time.perf_counter() - begin_s)


@dataclass(eq=False)
class BucketStep:
    """The step of one bucket; a job of the worker.

    Attributes:
        bucket: The bucket.
        scale: Factor on the gradients.
        threads: Threads of the kernel.
        meter: Records when the weights are used again.
        segment_runs: The segments to step.
    """

    bucket: Bucket
    scale: DeferredScalar
    threads: HostThreads
    meter: FractionMeter | None = None
    segment_runs: list[SegmentRun] = field(init=False, default_factory=list)
    _grads: list[torch.Tensor] = field(init=False, default_factory=list)
    _has_ended: threading.Event = field(init=False, default_factory=threading.Event)
    _error: BaseException | None = field(init=False, default=None)

    def add(self, grads: torch.Tensor, segment_run: SegmentRun) -> None:
        """Add segments to step, and the flat main gradient that has their gradients."""
        self._grads.append(grads)
        self.segment_runs.append(segment_run)

    @property
    def urgency(self) -> int:
        """Return the position in forward: the bucket that runs first is needed first."""
        return self.bucket.position

    @property
    def can_begin(self) -> bool:
        """Return whether the gradients and their factor have arrived, so that no wait is needed."""
        return self._copy.transfer.is_done and self.scale.is_there

    def start(self) -> None:
        """Choose the buffers and issue the copy of the gradients, unless issued before."""
        group = self.bucket.group
        self._name = group.label
        self._target = group.start_copy()
        self._copy = self._issue_copy()
        # The copy keeps its sources until they are read; this step must not keep them longer.
        self._grads = []
        in_use = self._take_buffers()
        # Last: a reader that finds this step waits for its end, which would never come if start()
        # failed.
        register_writer(in_use, self)
        group.step_in_flight = self

    def _take_buffers(self) -> list[torch.Tensor]:
        """Choose the memory to step, and return the tensors that readers must not touch."""
        buffers = self._buffers = self.bucket.buffers()
        self._result = buffers.weight
        return [buffers.weight, buffers.exp_avg, buffers.exp_avg_sq]

    def _issue_copy(self) -> GradientCopy:
        """Return the copy of the gradients to the host."""
        first, *others = self._grads
        if all(other is first for other in others):
            return self.bucket.copy_grads(first)
        pieces = [
            (segment.start, grads[segment.start : segment.stop])
            for grads, run in zip(self._grads, self.segment_runs, strict=True)
            for segment in run.segments
        ]
        return self.bucket.copy_pieces(pieces)

    def finish(self) -> None:
        """Mark the compute weight as current; call it after the group was marked stale."""
        # The step writes the cast of the elements that it steps; others may be stale.
        if sum(run.numel for run in self.segment_runs) == self.bucket.states.numel:
            self.bucket.group.compute_weight.mark_encoded()
        # Replicated parameters are plain DTensors: their readers do not wait by themselves.
        if not self.bucket.group.axes.is_sharded:
            self.wait_for_reader()

    def run(self) -> None:
        """Run the step in the worker's thread; keep an error for :meth:`wait`."""
        try:
            with torch.no_grad():
                self._run()
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended.set()

    def _run(self) -> None:
        self._copy.wait()
        self._make_result(self.scale.value())
        self._upload()

    def _make_result(self, scale: float) -> None:
        """Make the weights and moments after the step, with a cast for the device."""
        # The previous step's upload reads the cast that this step writes.
        self.bucket.wait_for_upload()
        self._update(scale)

    def _update(self, scale: float) -> None:
        """Step the weights and moments on the host, with a cast for the device."""
        self.threads.update(self._buffers, self.segment_runs, scale)

    def _upload(self) -> None:
        """Copy the new compute weights to the device."""
        copy_out = self.bucket.copy_out
        source = self._result if copy_out is None else copy_out
        # .data, as the worker must not bump the version of a tensor that autograd, on another
        # thread, has saved for backward.
        target = self._target.data
        self.bucket.uploaded = self.bucket.link.to_device(
            [
                (target[segment.start : segment.stop], source[segment.start : segment.stop])
                for run in self.segment_runs
                for segment in run.segments
            ]
        )

    def wait(self) -> None:
        """Wait until the host's memory is current, and order later device work after the upload.

        Raises:
            RuntimeError: The step failed.
        """
        # Only the first use is measured.
        meter, self.meter = self.meter, None
        begin = None if meter is None else meter.mark_time()
        begin_s = time.perf_counter()
        self._has_ended.wait()
        # Only after the event: until then readers on other threads must wait too.
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
        # The device waits, not the host: work that is queued next reads the new weights.
        self.bucket.uploaded.order()
        if meter is not None and begin is not None:
            meter.note_use(begin, time.perf_counter() - begin_s)

    def wait_for_reader(self) -> None:
        """Wait as :meth:`wait` does, but measure nothing; for readers outside of forward.

        Raises:
            RuntimeError: The step failed.
        """
        self.meter = None
        self.wait()

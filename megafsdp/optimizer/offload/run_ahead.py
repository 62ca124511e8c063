"""What the host does for a step before ``step()`` is called, in a loop that has handed it over.

Where the loop has said that the optimizer's step comes next, and the optimizer clips by itself, a
bucket's gradients are copied as soon as they are complete, and Adam runs on them if the outlook is
that the step will take them as they are. Nothing that is shown changes before ``step()``.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from megafsdp.device.background import BackgroundThread
from megafsdp.optimizer.offload.bucket import Bucket
from megafsdp.optimizer.offload.bucket_step import AheadStep, HostThreads, OffloadCounts, SegmentRun
from megafsdp.optimizer.offload.offload_guess import ClippingForecast, Guesser


class StepsAhead:
    """The work that was begun for the step that is coming.

    Args:
        guesser: Says whether Adam runs, and with which factor.
        worker: Runs it.
        counts: Where it is counted.
    """

    def __init__(self, guesser: Guesser, worker: BackgroundThread, counts: OffloadCounts) -> None:
        self._guesser, self._worker, self._counts = guesser, worker, counts
        self._begun: dict[Bucket, AheadStep] = {}
        self._outlook: ClippingForecast | None = None
        self._is_new = True

    def wants_more(self, max_norm: float) -> bool:
        """Tell whether Adam may run on the gradients that arrive next."""
        if self._is_new:
            self._outlook, self._is_new = self._guesser.outlook(max_norm), False
        return self._outlook is not None and not self._outlook.is_hopeless

    def begin(self, bucket: Bucket, stretches: list[SegmentRun], threads: HostThreads) -> None:
        """Have Adam run on a bucket, whose gradients are on their way."""
        assert bucket.copy is not None and self._outlook is not None, "the step has an outlook"
        self.cancel(bucket)
        step = AheadStep(bucket, bucket.copy, stretches, self._outlook, threads, self._counts)
        self._begun[bucket] = step
        self._worker.submit(step)

    def cancel(self, bucket: Bucket) -> None:
        """Drop what was begun for a bucket; returns at once."""
        step = self._begun.pop(bucket, None)
        if step is not None:
            step.cancel()

    def cancel_all(self) -> None:
        """Drop what was begun for a step that does not come, or not with these weights."""
        for bucket in list(self._begun):
            self.cancel(bucket)
        self._is_new = True

    def take(self) -> dict[Bucket, AheadStep]:
        """Return what was begun, for the step that is there."""
        begun, self._begun = self._begun, {}
        self._is_new = True
        return begun


class _Begins(Protocol):
    """The optimizer, as far as a bucket knows it."""

    def begin_ahead(self, bucket: Bucket, grads: torch.Tensor) -> None:
        """Begin what can be done for the coming step."""

    def cancel_early_step(self, bucket: Bucket) -> None:
        """Drop what was begun."""


class BucketListener:
    """Tells the optimizer what becomes of one bucket's gradients and main weight.

    Args:
        optimizer: Referred to weakly: the model must not keep it alive.
        bucket: The bucket; weakly too.
    """

    def __init__(self, optimizer: _Begins, bucket: Bucket) -> None:
        self._optimizer, self._bucket = weakref.ref(optimizer), weakref.ref(bucket)

    def grads_are_final(self, grads: torch.Tensor) -> None:
        """Begin with the step."""
        optimizer, bucket = self._optimizer(), self._bucket()
        if optimizer is not None and bucket is not None:
            optimizer.begin_ahead(bucket, grads)

    def grads_will_change(self) -> None:
        """Let go of the gradients that were to be stepped with."""
        self.cancel()
        bucket = self._bucket()
        if bucket is not None:
            bucket.let_go_of_grads()

    def cancel(self) -> None:
        """Drop what was begun: the main weight is read or written by others."""
        optimizer, bucket = self._optimizer(), self._bucket()
        if optimizer is not None and bucket is not None:
            optimizer.cancel_early_step(bucket)

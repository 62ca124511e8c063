"""Flat storages that can be released and reallocated, and the ledger that counts their bytes.

A :class:`FlatStorage` owns one flat tensor. Releasing it shrinks the underlying storage to zero
bytes, and allocating it again grows the same storage object. So every view of it stays an alias,
including views saved by autograd. Layouts and views of tensors are in ``megafsdp.buffer``.

A storage's memory comes from the device's allocator, or from one of a few :class:`Slabs` that stay
allocated. With two slabs, and three storages used one after another, each allocated one ahead::

    slab 0   a a . c c .
    slab 1   . b b . . .          c takes the slab that a has released

``MEGAFSDP_POISON=1`` fills every fresh allocation with NaN (0x7F bytes for integers), so that
results show if code reads elements that were never written.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch

from megafsdp.device.torch_private import preserving_versions
from megafsdp.errors import expected

_POISON_VARIABLE = "MEGAFSDP_POISON"
_POISON_BYTE = 0x7F


class Category(Enum):
    """The use of a flat storage's bytes."""

    MAIN_WEIGHT = "main weight"
    COMPUTE_WEIGHT = "compute weight"
    # For quantized compute weights: tables of scales, maxima, histories of maxima.
    SCALES = "scales"
    UNSHARDED = "unsharded"
    MAIN_GRAD = "main grad"
    PARTIAL_GRAD = "partial grad"
    OPTIMIZER_STATE = "optimizer state"

    # Enum's own hash is a Python function; ledgers would call it hundreds of times per step.
    __hash__ = object.__hash__


@dataclass
class ByteLedger:
    """Count live and peak bytes by category.

    Every :class:`FlatStorage` debits its ledger when it is allocated and credits it when it is
    released or garbage-collected.

    Attributes:
        live: Bytes alive by category.
        total: Bytes alive in all categories.
        peak: Largest value of ``live`` by category since :meth:`reset_peak`.
        peak_total: Largest sum over categories since :meth:`reset_peak`.
        num_live: Storages alive by category.
        peak_num_live: Largest value of ``num_live`` since :meth:`reset_peak`.
    """

    live: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))
    total: int = 0
    peak: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))
    peak_total: int = 0
    num_live: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))
    peak_num_live: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))
    _parent: ByteLedger | None = None

    def merge_into(self, other: ByteLedger) -> None:
        """Count in ``other`` as well: the bytes alive now, and all that this ledger will count."""
        topmost = self
        while topmost._parent is not None:
            topmost = topmost._parent
        if topmost is other:
            return
        topmost._parent = other
        for category in Category:
            other.live[category] += topmost.live[category]
            other.num_live[category] += topmost.num_live[category]
        other.total += topmost.total
        other.reset_peak()

    def debit(self, category: Category, nbytes: int) -> None:
        """Count bytes that became alive."""
        if self._parent is not None:
            self._parent.debit(category, nbytes)
        self.live[category] = live = self.live[category] + nbytes
        self.total = total = self.total + nbytes
        self.num_live[category] = num_live = self.num_live[category] + 1
        if live > self.peak[category]:
            self.peak[category] = live
        if num_live > self.peak_num_live[category]:
            self.peak_num_live[category] = num_live
        if total > self.peak_total:
            self.peak_total = total

    def credit(self, category: Category, nbytes: int) -> None:
        """Count bytes that were freed."""
        if self._parent is not None:
            self._parent.credit(category, nbytes)
        self.live[category] -= nbytes
        self.total -= nbytes
        self.num_live[category] -= 1

    def reset_peak(self) -> None:
        """Start measuring peaks anew, from the bytes alive now."""
        self.peak = dict(self.live)
        self.peak_num_live = dict(self.num_live)
        self.peak_total = self.total


def outside_inference_mode() -> AbstractContextManager[object]:
    """Return a context that leaves inference mode, to make tensors that are written outside."""
    # Each reduction allocates, and entering the context takes longer than an allocation.
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


class MemoryPool(Protocol):
    """A pool of the device's allocator that contains one block of memory."""

    def allocating(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's allocations take memory of the pool."""


@dataclass(eq=False, slots=True)
class Slab:
    """One block of memory, for one storage at a time.

    Attributes:
        nbytes: Its size.
        pool: The pool with its memory.
        is_free: Whether no storage uses it.
    """

    nbytes: int
    pool: MemoryPool
    is_free: bool = True


class Slabs:
    """Slabs of one size, made when needed and alive as long as a storage may take one.

    Args:
        nbytes: Size of each slab.
        max_slabs: The most slabs to make.
        new_pool: Makes a pool that contains one block of a given number of bytes.
        ledger: Counts each slab from when it is made.
        category: The category that the bytes are counted in.

    Attributes:
        num_refused: How often a storage found no free slab and took memory of its own.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        max_slabs: int,
        new_pool: Callable[[int], MemoryPool],
        ledger: ByteLedger,
        category: Category,
    ) -> None:
        self.num_refused = 0
        self._nbytes, self._max_slabs = nbytes, max_slabs
        self._new_pool = new_pool
        self._ledger, self._category = ledger, category
        self._slabs: list[Slab] = []

    def __del__(self) -> None:
        """Count the slabs as freed; their pools free them."""
        for slab in self._slabs:
            self._ledger.credit(self._category, slab.nbytes)

    def find_free(self) -> Slab | None:
        """Return the first free slab, or make one; None if ``max_slabs`` are in use."""
        # The first one: ranks that take and release in the same order take the same slabs.
        for slab in self._slabs:
            if slab.is_free:
                return slab
        if len(self._slabs) == self._max_slabs:
            self.num_refused += 1
            return None
        slab = Slab(self._nbytes, self._new_pool(self._nbytes))
        self._slabs.append(slab)
        self._ledger.debit(self._category, self._nbytes)
        return slab


class FlatStorage:
    """One flat tensor whose memory can be released and allocated again while aliases stay.

    Args:
        numel: Number of elements.
        dtype: Element type.
        device: The device of the memory.
        ledger: Counts the bytes.
        category: The category that they are counted in.
        memory: ``(numel,)`` memory to use, which is part of a larger piece and never released.

    The storage is allocated on construction, uninitialised, on the current stream. On CUDA it must
    be released on the stream that allocated it (the caching allocator reuses memory in stream
    order).

    Attributes:
        tensor: The flat tensor.
        is_allocated: Whether it may be used: it has memory, and was not released.
        slabs: The slabs that later allocations take; None for the device's allocator.
    """

    __slots__ = (
        "__weakref__",
        "_category",
        "_has_memory",
        "_keeps_memory",
        "_ledger",
        "_nbytes",
        "_slab",
        "is_allocated",
        "slabs",
        "tensor",
    )

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
        ledger: ByteLedger,
        category: Category,
        memory: torch.Tensor | None = None,
    ) -> None:
        self._has_memory = self._keeps_memory = False
        self.slabs: Slabs | None = None
        self._slab: Slab | None = None
        if memory is None:
            try:
                with outside_inference_mode():
                    memory = torch.empty(numel, dtype=dtype, device=device)
            except torch.OutOfMemoryError as error:
                nbytes = numel * dtype.itemsize
                raise _no_room(nbytes, category, device, ledger, error) from error
        self.tensor = memory
        self._nbytes = memory.nbytes
        self._ledger = ledger
        self._category = category
        self._mark_allocated()

    def __del__(self) -> None:
        """Count the memory as freed; the last view of the tensor frees it."""
        if self._has_memory:
            self._mark_freed()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor, allocated or not."""
        return self._nbytes

    def allocate(self) -> None:
        """Allocate the memory again, uninitialised; does nothing if it is allocated."""
        if self.is_allocated:
            return
        if not self._has_memory:
            self._take_memory()
        self._mark_allocated()

    def _take_memory(self) -> None:
        slab = None if self.slabs is None else self.slabs.find_free()
        memory = self.tensor.untyped_storage()
        nbytes = self._nbytes if slab is None else slab.nbytes
        try:
            if slab is None:
                memory.resize_(nbytes)
            else:
                # Ask for the slab's full size: for equal sizes the pool reuses its one block.
                with slab.pool.allocating():
                    memory.resize_(nbytes)
                slab.is_free = False
        except torch.OutOfMemoryError as error:
            device = self.tensor.device
            raise _no_room(nbytes, self._category, device, self._ledger, error) from error
        self._slab = slab

    def release(self) -> None:
        """Free the memory; views stay aliases and must not be read until :meth:`allocate`."""
        self.is_allocated = False
        self._free_unless_kept()

    def keep_memory(self, keep: bool) -> None:
        """Choose whether :meth:`release` leaves the memory to the next :meth:`allocate`."""
        self._keeps_memory = keep
        self._free_unless_kept()

    def _free_unless_kept(self) -> None:
        if self._has_memory and not (self.is_allocated or self._keeps_memory):
            self.tensor.untyped_storage().resize_(0)
            self._mark_freed()

    def _mark_allocated(self) -> None:
        # A slab's bytes are counted as long as the slab exists.
        if self._slab is None and not self._has_memory:
            self._ledger.debit(self._category, self._nbytes)
        self.is_allocated = self._has_memory = True
        if _is_poisoning():
            poison(self.tensor)

    def _mark_freed(self) -> None:
        self.is_allocated = self._has_memory = False
        if self._slab is None:
            self._ledger.credit(self._category, self._nbytes)
        else:
            self._slab.is_free, self._slab = True, None


@functools.cache
def _is_poisoning() -> bool:
    # Read once: every gather and every reduction allocates.
    return os.environ.get(_POISON_VARIABLE) == "1"


def _no_room(
    nbytes: int,
    category: Category,
    device: torch.device,
    ledger: ByteLedger,
    error: torch.OutOfMemoryError,
) -> torch.OutOfMemoryError:
    """Return an error that says what does not fit, and how much the flat buffers take."""
    live = [f"{n:,} of {c.value}" for c, n in ledger.live.items() if n]
    return torch.OutOfMemoryError(
        expected(
            f"{nbytes:,} free bytes for a flat buffer of {category.value}",
            # torch's advice on its own allocator follows its first sentence.
            f"'{str(error).partition('. ')[0]}'",
            where=f"the memory of {device}, where flat buffers take {ledger.total:,} bytes"
            + (f" ({', '.join(live)})" if live else ""),
            hint="Use more ranks, recompute activations, or offload; a dry run says what fits",
        )
    )


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, or with 0x7F bytes if its dtype has no NaN."""
    with torch.no_grad(), preserving_versions(tensor):
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            tensor.fill_(float("nan"))
        else:
            tensor.view(torch.uint8).fill_(_POISON_BYTE)


def set_poison(is_enabled: bool) -> None:
    """Switch poisoning of fresh allocations, for this process and the processes it forks."""
    os.environ[_POISON_VARIABLE] = "1" if is_enabled else "0"
    _is_poisoning.cache_clear()


def tensors_nbytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages under a list of plain tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())

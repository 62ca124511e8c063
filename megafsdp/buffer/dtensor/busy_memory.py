"""Memory that another thread writes: a read through a DTensor waits for the writer first.

Code that gives a buffer to another thread registers the writer here, and operations of sharded
DTensors look it up. The key is the storage, so aliases are found too, for example a detached
parameter or a tensor of an earlier state dict. The file starts no thread and copies nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from megafsdp.device.torch_private import is_fake, without_modes


class Writer(Protocol):
    """The work of another thread on some memory."""

    def wait_for_reader(self) -> None:
        """Wait until the memory may be used, then call :func:`unregister_writer`."""


# Weak references: a writer without other references has finished its work.
_writers: dict[int, weakref.ref[Writer]] = {}


def register_writer(tensors: Iterable[torch.Tensor], writer: Writer) -> None:
    """Make readers of these tensors' storage wait for a writer, until :func:`unregister_writer`.

    Args:
        tensors: Plain tensors.
        writer: The writer of their memory.
    """
    reference = weakref.ref(writer)
    for tensor in tensors:
        _writers[_key(tensor)] = reference


def unregister_writer(writer: Writer) -> None:
    """Remove a writer: readers of its memory no longer wait."""
    # Loop over a copy: another thread may change the dict meanwhile.
    for key, reference in list(_writers.items()):
        if reference() in (None, writer):
            _writers.pop(key, None)


def wait_for_writer(tensor: torch.Tensor) -> None:
    """Wait until no other thread writes the storage of a plain tensor.

    Raises:
        Exception: The error that made the writer fail.
    """
    if is_fake(tensor):
        # It stands for the operand of a graph, which runs as soon as it is made. A writer may have
        # operations on real tensors left for this thread.
        with without_modes():
            wait_for_writers()
        return
    reference = _writers.get(_key(tensor)) if _writers else None
    writer = None if reference is None else reference()
    if writer is not None:
        writer.wait_for_reader()


def wait_for_writers() -> None:
    """Wait for every writer: a compiled graph reads rows without asking for them.

    Raises:
        Exception: The error that made a writer fail.
    """
    # A copy: waiting removes entries.
    for reference in list(_writers.values()):
        writer = reference()
        if writer is not None:
            writer.wait_for_reader()


def is_any_in_use() -> bool:
    """Return whether any writer is registered; cheaper than a look at each tensor."""
    return bool(_writers)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

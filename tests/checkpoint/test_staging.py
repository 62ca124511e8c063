"""Copies of a background save from a device whose work is done later, by a stand-in for one."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megafsdp.checkpoint.background import staging
from megafsdp.checkpoint.background.staging import HostSlab, Staging
from megafsdp.device import host_memory
from tests.device.stand_in_cudart import is_mapped, stand_in


class Device:
    """Copies that are queued, and made when the host waits for their event.

    Attributes:
        queued: Targets and sources; a source that was freed meanwhile gives NaN, as memory does
            that another tensor has got.
        threads: Which threads have made the device theirs.
    """

    def __init__(self) -> None:
        self.queued: list[tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = []
        self.threads: list[int] = []

    def stream(self) -> object:
        """Return a stream."""
        return self

    current_stream = stream

    @contextlib.contextmanager
    def behind_current(self, stream: object) -> Iterator[None]:
        """Queue copies on the stream, which is the current one here."""
        yield

    def adopt_thread(self) -> None:
        """Note the calling thread."""
        self.threads.append(threading.get_ident())

    def record_event(self, stream: object, *, is_blocking: bool) -> Device:
        """Return an event behind all that is queued."""
        assert is_blocking, "the thread would spin for the time of the copies"
        return self

    def synchronize(self) -> None:
        """Make the queued copies."""
        for target, reference in self.queued:
            source = reference()
            target.copy_(torch.full((), math.nan) if source is None else source.as_subclass(Plain))
        self.queued.clear()


class Plain(torch.Tensor):
    """A tensor of the host."""


class OnDevice(torch.Tensor):
    """A tensor whose copies to the host are queued."""

    is_cuda = True  # type: ignore[assignment]
    device_of_copies: Device

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Queue a copy; run anything else."""
        if func is torch.Tensor.copy_ and isinstance(args[1], OnDevice):
            cls.device_of_copies.queued.append((args[0], weakref.ref(args[1])))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Return the stand-in, which staging takes for CUDA."""
    made = OnDevice.device_of_copies = Device()
    monkeypatch.setattr(staging, "device_handle", lambda device_type: made)
    allocate = staging.host_bytes
    monkeypatch.setattr(
        staging, "host_bytes", lambda nbytes, is_pinned: allocate(nbytes, is_pinned=False)
    )
    return made


def _tensors() -> list[torch.Tensor]:
    return [torch.arange(4.0).as_subclass(OnDevice), torch.arange(3.0)]


def test_sources_on_a_device_live_until_they_are_copied(device: Device) -> None:
    """The caller may drop its last reference as soon as the copies are queued."""
    given = _tensors()
    freed, freed_on_host = map(weakref.ref, given)
    made = Staging(given, HostSlab())
    del given
    assert device.queued and freed() is not None and freed_on_host() is not None
    made.copy()
    assert freed() is None, "its memory is the device's again"
    assert freed_on_host() is None, "it need not outlive its copy"
    found, on_host = made.copies
    assert found.tolist() == [0, 1, 2, 3] and on_host.tolist() == [0, 1, 2]
    assert device.threads == [threading.get_ident()], "before it waits for the event"


def test_pinned_memory_goes_back_to_the_system(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slab is locked at a time: a larger one follows it, and none is left after release()."""
    cudart = stand_in(monkeypatch)
    monkeypatch.setattr(staging, "host_bytes", host_memory.host_bytes)
    slab = HostSlab()
    # Of the host alone: larger, but not locked.
    Staging([torch.zeros(1000)], slab).copy()
    assert not cudart.live
    for num_tensors in (1, 2, 1):
        made = Staging([*_tensors() * num_tensors], slab)
        made.copy()
        made.release()
        assert list(cudart.live.values()) == [slab.nbytes]
    assert slab.nbytes == 4 * 256 and cudart.calls.count("register") == 2
    (address,) = cudart.live
    slab.release()
    assert not cudart.live and not is_mapped(address)


def test_a_save_that_is_given_up_waits_for_its_copies(device: Device) -> None:
    """The slab's next copies would meet those under way, and the stream read freed memory."""
    given = _tensors()
    freed = weakref.ref(given[0])
    made = Staging(given, HostSlab())
    del given
    made.release()
    assert not device.queued and freed() is None and not made.copies

"""The stand-in itself: work is late, waits order it, freed memory is poison."""

from __future__ import annotations

import threading

import pytest
import torch

from megafsdp.device.host_copies import StreamLink
from megafsdp.device.memory import ByteLedger, Category, FlatStorage
from megafsdp.device.streams import DeviceHandle, device_handle
from tests.stand_in.connect import stand_in
from tests.stand_in.device import Order, on_device


def _peek(tensor: torch.Tensor) -> float:
    """Read an element as a stray pointer would: without waiting for any queue."""
    return float(tensor.detach().numpy().flat[0])


def test_work_is_done_when_it_is_asked_for() -> None:
    """Until then its output is NaN."""
    with stand_in(Order.LAZY):
        x = on_device(torch.full((4,), 3.0)).requires_grad_()
        y = (x * x).sum()
        y.backward()
        assert x.grad is not None
        assert _peek(x) != _peek(x) and _peek(x.grad) != _peek(x.grad)
        assert x.grad.tolist() == [6.0] * 4 and y.item() == 36.0


def _add_on_side_stream(handle: DeviceHandle, *, waits: bool) -> tuple[float, float]:
    """Return a sum that reads on a side stream what compute makes, and what compute makes of it."""
    side = handle.stream()
    ones = on_device(torch.ones(1)) + 0
    if waits:
        handle.wait_stream(side, handle.current_stream())
    with handle.use(side):
        twos = ones + ones
        event = handle.record_event()
    if waits:
        handle.wait_event(event)
    threes = (twos + 1).item()
    handle.synchronize()
    return twos.item(), threes


@pytest.mark.parametrize("order", Order)
def test_streams_wait_for_each_other(order: Order) -> None:
    """With both waits the sums are right in any order."""
    with stand_in(order):
        assert _add_on_side_stream(device_handle("cpu"), waits=True) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("order", "is_lost"), [(Order.COPIES_FIRST, 0), (Order.COMPUTE_FIRST, 1)], ids=str
)
def test_a_missing_wait_shows(order: Order, is_lost: int) -> None:
    """A stream that is ahead of compute reads NaN, and so does compute ahead of a stream."""
    with stand_in(order):
        found = _add_on_side_stream(device_handle("cpu"), waits=False)
    assert found[is_lost] != found[is_lost]


def test_a_copy_reads_its_source_late() -> None:
    """What the host writes meanwhile is what arrives, as of pinned memory."""
    with stand_in(Order.LAZY):
        link = StreamLink(device_handle("cpu"))
        source, target = torch.zeros(2), on_device(torch.zeros(2))
        transfer = link.to_device([(target, source)])
        source.fill_(5.0)
        transfer.order()
        assert target.tolist() == [5.0, 5.0]


def test_freed_memory_is_poison_in_the_order_of_its_stream() -> None:
    """Its own stream has read it before; another one, which is late, has not."""
    wrong = pytest.raises(AssertionError, match="memory that was freed")
    with wrong, stand_in(Order.COMPUTE_FIRST):
        link = StreamLink(device_handle("cpu"))
        target, source = torch.zeros(2), on_device(torch.ones(1)).expand(2) + 1
        link.fence()
        transfer = link.to_host([(target, source)])
        total = source.sum()
        del source
        assert total.item() == 4.0
        transfer.wait()
        assert target.isnan().all()


def test_work_that_writes_freed_memory_is_an_error() -> None:
    """The block would be another tensor's."""
    ledger = ByteLedger()
    wrong = pytest.raises(AssertionError, match="memory that was freed")
    with wrong, stand_in(Order.LAZY) as device:
        handle = device_handle("cpu")
        side = handle.stream()
        storage = FlatStorage(
            4, torch.float32, device=handle.device, ledger=ledger, category=Category.UNSHARDED
        )
        with handle.use(side):
            storage.tensor.fill_(1.0)
        storage.release()
        # The poison comes first, since the release did not wait.
        device.default_stream.synchronize()


def test_a_thread_must_adopt_the_device() -> None:
    """One that asks an event before would make a context on another GPU."""
    failed: list[AssertionError] = []

    def ask(adopts: bool) -> None:
        if adopts:
            handle.adopt_thread()
        try:
            event.synchronize()
        except AssertionError as error:
            failed.append(error)

    with stand_in(Order.LAZY):
        handle = device_handle("cpu")
        event = handle.record_event()
        assert event is not None
        for adopts, count in ((True, 0), (False, 1)):
            thread = threading.Thread(target=ask, args=(adopts,))
            thread.start()
            thread.join()
            assert len(failed) == count


def test_tensors_of_host_and_device_do_not_meet() -> None:
    """Only copies take both, and numbers of the host."""
    with stand_in(Order.LAZY):
        x = on_device(torch.ones(2))
        assert (x * torch.tensor(2.0)).tolist() == [2.0, 2.0]
        with pytest.raises(AssertionError, match="one device"):
            x + torch.ones(2)

"""One handle for streams and events; on CPU nothing of it has an effect."""

from __future__ import annotations

import pytest
import torch

from megafsdp.device.streams import DeviceHandle, device_handle


def test_cpu_has_no_streams_and_waits_return_at_once() -> None:
    """Every call of the engine works on CPU and does nothing."""
    handle = device_handle("cpu")
    assert handle == DeviceHandle(torch.device("cpu"))
    assert not handle.is_asynchronous
    stream = handle.stream(priority=-1)
    assert stream is None
    assert handle.current_stream() is None
    event = handle.record_event(stream)
    assert event is None
    handle.wait_event(event, stream)
    handle.wait_stream(stream, handle.current_stream())
    handle.synchronize()
    assert handle.peak_nbytes() is None
    with handle.use(stream):
        result = torch.ones(2) + 1
    assert result.tolist() == [2.0, 2.0]


def test_other_devices_are_refused_by_name() -> None:
    """A device that is neither CPU nor CUDA is not built."""
    with pytest.raises(NotImplementedError, match="got xpu"):
        device_handle("xpu")


@pytest.mark.gpu
def test_cuda_side_stream_is_ordered_by_events() -> None:
    """Work on a side stream is seen after its event, without the host waiting in between."""
    handle = device_handle("cuda")
    assert handle.is_asynchronous
    side = handle.stream(priority=-1)
    assert side is not None
    source = torch.zeros(1 << 22, device=handle.device)
    started = handle.record_event()
    handle.wait_event(started, side)
    with handle.use(side):
        assert handle.current_stream() == side
        for _ in range(50):
            source.add_(1)
        done = handle.record_event()
    handle.wait_event(done)
    total = source.sum()
    handle.synchronize()
    assert total.item() == 50.0 * (1 << 22)


@pytest.mark.gpu
def test_cuda_stream_waits_for_a_stream() -> None:
    """wait_stream orders everything queued so far; the peak counter is the allocator's."""
    handle = device_handle("cuda")
    side = handle.stream()
    value = torch.zeros(1 << 22, device=handle.device)
    for _ in range(50):
        value.add_(1)
    handle.wait_stream(side, handle.current_stream())
    with handle.use(side):
        seen = value.clone()
    handle.wait_stream(handle.current_stream(), side)
    assert seen.min().item() == 50.0
    assert handle.peak_nbytes() == torch.cuda.max_memory_allocated(handle.device)

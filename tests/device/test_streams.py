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


def test_copies_of_each_direction_have_one_stream_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many groups copy: torch has few streams, which collectives take too."""
    made = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(device)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    devices = [torch.device("cuda", 91), torch.device("cuda", 92)]
    found = [
        (handle.to_host_stream, handle.to_device_stream)
        for handle in map(DeviceHandle, (*devices, *devices))
    ]
    assert found[:2] == found[2:] and len({id(s) for pair in found for s in pair}) == 4
    assert made == [devices[0]] * 2 + [devices[1]] * 2
    assert device_handle("cpu").to_host_stream is None is device_handle("cpu").to_device_stream


def test_a_thread_adopts_a_device_of_streams_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's device is GPU 0 until it says otherwise."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device_handle("cpu").adopt_thread()
    DeviceHandle(torch.device("cuda", 3)).adopt_thread()
    assert chosen == [torch.device("cuda", 3)]


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

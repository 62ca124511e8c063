"""The link between buffers of the host: order, errors, and the time of a simulated device."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from megafsdp.device import host_copies as link_module
from megafsdp.device.host_copies import LateNumbers, ThreadLink
from megafsdp.device.streams import DeviceHandle


class _Clock:
    """Time that passes where it is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(link_module.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(link_module.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_copies_of_a_direction_are_made_in_turn() -> None:
    """The other direction does not wait for them; dtypes may differ."""
    link = ThreadLink()
    may_end = threading.Event()

    class _Held(torch.Tensor):
        def copy_(self, *args: object, **kwargs: object) -> torch.Tensor:
            may_end.wait()
            return super().copy_(*args, **kwargs)

    source = torch.arange(4.0)
    held, last, back = torch.zeros(4).as_subclass(_Held), torch.zeros(4).bfloat16(), torch.zeros(4)
    first = link.to_host([(held, source)])
    second = link.to_host([(last, source)])
    link.to_device([(back, source)]).wait()
    assert torch.equal(back, source)
    assert not first.is_done and not second.is_done and not last.any()
    may_end.set()
    second.wait()
    assert first.is_done and torch.equal(last.float(), source)
    link.close()


def test_an_error_is_raised_where_the_copy_is_waited_for() -> None:
    """With its cause; later copies are made."""
    link = ThreadLink()
    broken = link.to_host([(torch.zeros(2), torch.zeros(3))])
    target = torch.zeros(2)
    link.to_host([(target, torch.ones(2))]).wait()
    with pytest.raises(RuntimeError, match="copy between device and host that ends") as raised:
        broken.order()
    assert "size of tensor" in str(raised.value.__cause__)
    assert target.all()
    link.close()


def test_a_simulated_link_takes_the_time_of_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all copies that were issued together; a speed must be positive."""
    clock = _Clock(monkeypatch)
    link = ThreadLink(8.0)
    copies = [(torch.zeros(2), torch.ones(2)), (torch.zeros(4), torch.ones(4))]
    link.to_host(copies).wait()
    link.close()
    assert clock.now_s == 103.0
    with pytest.raises(ValueError, match="positive number of bytes"):
        ThreadLink(0.0)


def test_copies_after_a_fence_wait_for_a_simulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, until what it had queued at the fence is done; later work is not waited for."""
    clock = _Clock(monkeypatch)
    ready_s = 105.0
    link = ThreadLink(8.0, device_time=lambda: ready_s)
    one = [(torch.zeros(2), torch.ones(2))]
    link.to_host(one).wait()
    assert clock.now_s == 101.0
    link.fence()
    ready_s = 200.0
    link.to_host(one).wait()
    assert clock.now_s == 106.0
    link.fence()
    link.to_device(one).wait()
    assert clock.now_s == 201.0
    link.close()


def test_late_numbers_are_those_that_the_device_had_when_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What changes them afterwards is queued behind the copy, which is waited for once."""
    events: list[str] = []
    event = SimpleNamespace(synchronize=lambda: events.append("waited"))
    monkeypatch.setattr(
        DeviceHandle, "record_event", lambda handle, is_blocking: events.append("marked") or event
    )
    numbers = torch.tensor([1.0, 2.5], dtype=torch.float64)
    late = LateNumbers(numbers)
    numbers.zero_()
    assert events == ["marked"]
    assert late.read() == late.read() == [1.0, 2.5]
    assert events == ["marked", "waited"]

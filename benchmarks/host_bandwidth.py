"""The memory bandwidth that the Adam kernel gets on the host while copies over a link run.

The kernel reads bf16 gradients and writes a bf16 copy, in place and out of place. Probes of these
two kinds take turns with it, one that reads and writes an array and one that copies it to another,
and all run once with the link idle and once with copies under way in both directions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.record import CheckError
from megafsdp.device.host_copies import CopyLink, Transfer
from megafsdp.device.host_memory import HostArena
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, AdamKernel, AdamSegment
from megafsdp.optimizer.kernels.hyper import AdamHyper

# Main weight and two moments read and written, a gradient read, a copy written.
KERNEL_BYTES_PER_ELEMENT = 28
# As much memory as weight and moments take: less would fit a cache that the kernel's does not fit.
_PROBE_ARRAYS = 3
_PROBE_BYTES_PER_ELEMENT = 8 * _PROBE_ARRAYS
_WARM_UP_REPEATS = 2
# Together larger than the caches, so that copies use memory bandwidth; and each so large that they
# are issued faster than the link makes them.
_COPY_NBYTES, _NUM_COPIES = 1 << 26, 2
_MOST_TRIES = 6
_PROBE, _IN_PLACE, _OUT_OF_PLACE = "probe", "kernel in place", "kernel out of place"
_COPY_PROBE = "copying probe"
PROBE_OF = {_IN_PLACE: _PROBE, _OUT_OF_PLACE: _COPY_PROBE}


def measure(
    numel: int,
    repeats: int,
    *,
    link: CopyLink,
    link_bytes_per_s: float,
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """Return gigabytes a second of probe and kernel; local.

    Args:
        numel: Elements that a pass covers.
        repeats: Passes of each kind after warm-up; the median counts.
        link: Copies both ways.
        link_bytes_per_s: Its speed, from which enough copies are issued to outlast a pass.
        device: Where the link copies to and from.

    Returns:
        For each probe or kernel, its speed ``alone`` and ``beside transfers``.
    """
    calls = _calls(numel)
    pump = _Pump(link, link_bytes_per_s, device)
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"alone": [], "beside transfers": []} for name in calls
    }
    for repeat in range(_WARM_UP_REPEATS + repeats):
        for name, (call, _) in calls.items():
            alone_s = _time_s(call)
            # Copies must not end before the pass does.
            with_s = pump.time_s(call, expected_s=2 * alone_s)
            if repeat >= _WARM_UP_REPEATS:
                seconds[name]["alone"].append(alone_s)
                seconds[name]["beside transfers"].append(with_s)
    return {
        name: {
            state: nbytes * numel / statistics.median(values) / 1e9
            for state, values in seconds[name].items()
        }
        for name, (_, nbytes) in calls.items()
    }


def _calls(numel: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the calls to time, and the bytes that each reads and writes for an element."""
    num_arrays = 2 * _PROBE_ARRAYS + 10
    arena = HostArena(numel * num_arrays * torch.float32.itemsize, is_pinned=False)

    def take(dtype: torch.dtype = torch.float32, value: float = 0.0) -> torch.Tensor:
        return arena.take(numel, dtype).fill_(value)

    array, other = (arena.take(_PROBE_ARRAYS * numel, torch.float32).fill_(1.0) for _ in range(2))
    weight, exp_avg, exp_avg_sq = take(value=1.0), take(), take()
    grad, copy_out = take(torch.bfloat16, 1e-3), take(torch.bfloat16)
    in_place = AdamBuffers(weight, grad, exp_avg, exp_avg_sq, copy_out=copy_out)
    out_of_place = AdamBuffers(
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        copy_out=copy_out,
        new_weight=take(),
        new_exp_avg=take(),
        new_exp_avg_sq=take(),
    )
    kernel = AdamKernel(torch.device("cpu"))
    segments = [AdamSegment(0, numel, AdamHyper(1e-3))]
    return {
        _PROBE: (lambda: array.mul_(1.0), _PROBE_BYTES_PER_ELEMENT),
        _COPY_PROBE: (lambda: other.copy_(array), _PROBE_BYTES_PER_ELEMENT),
        _IN_PLACE: (lambda: kernel(in_place, segments, step=1), KERNEL_BYTES_PER_ELEMENT),
        _OUT_OF_PLACE: (lambda: kernel(out_of_place, segments, step=1), KERNEL_BYTES_PER_ELEMENT),
    }


def _time_s(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


class _Pump:
    """Keeps a link busy both ways for the time of a call."""

    def __init__(self, link: CopyLink, bytes_per_s: float, device: torch.device) -> None:
        self._link, self._bytes_per_s = link, bytes_per_s
        nbytes = 2 * _NUM_COPIES * _COPY_NBYTES
        arena = HostArena(nbytes, is_pinned=device.type == "cuda")
        self._host = arena.take(nbytes, torch.uint8).zero_().view(2, _NUM_COPIES, -1)
        self._device = torch.zeros_like(self._host, device=device)

    def time_s(self, call: Callable[[], object], *, expected_s: float) -> float:
        """Return the seconds of a call during which copies were under way from end to end.

        Raises:
            CheckError: The copies ended before the call in every try.
        """
        for _ in range(_MOST_TRIES):
            last = self._start(expected_s)
            elapsed_s = _time_s(call)
            is_covered = not any(transfer.is_done for transfer in last)
            for transfer in last:
                transfer.wait()
            if is_covered:
                return elapsed_s
            expected_s = 2 * max(expected_s, elapsed_s)
        raise CheckError(f"copies for {expected_s:.2f} s ended within a call of {elapsed_s:.2f} s")

    def _start(self, seconds: float) -> list[Transfer]:
        """Issue copies that take a number of seconds; return the last of each direction."""
        last: list[Transfer] = []
        for number in range(1 + int(seconds * self._bytes_per_s / _COPY_NBYTES)):
            at = number % _NUM_COPIES
            last = [
                self._link.to_host([(self._host[0, at], self._device[0, at])]),
                self._link.to_device([(self._device[1, at], self._host[1, at])]),
            ]
        return last

"""The speeds of a device's memory, its matrix units and its link to the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.adam import time_ms
from benchmarks.gpu.part import Report, Size
from benchmarks.record import machine, versions
from megafsdp._native import native_module, why_cuda_missing, why_missing
from megafsdp.device.host_copies import Transfer, link_of
from megafsdp.device.host_memory import HostArena
from megafsdp.device.streams import device_handle
from megafsdp.optimizer.kernels.cuda import usable_module

_REPEATS = 5


def measure(size: Size, report: Report) -> None:
    """Report machine, versions, the extensions, and speeds."""
    device = torch.device(size.device_type)
    report.figure("machine", machine())
    report.figure("versions", versions() | {"cuda": torch.version.cuda})
    report.check("the CPU kernels are there", native_module() is not None, why_missing())
    if not size.is_rehearsal:
        is_usable = usable_module(torch.device("cuda", 0)) is not None
        report.check("the CUDA kernels run here", is_usable, why_cuda_missing())
    nbytes, rows = size.either((1 << 30, 8192), (1 << 16, 64))
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda: target.copy_(source), device)
    report.figure("copy on the device, TB/s read and written", 2 * nbytes / copy_ms / 1e9)
    matrix = torch.randn(rows, rows, device=device, dtype=torch.bfloat16)
    product_ms = _median_ms(lambda: matrix @ matrix, device)
    report.figure("bf16 product, TFLOP/s", 2 * rows**3 / product_ms / 1e9)
    _measure_link(size, report, device)


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    call()
    return statistics.median(time_ms(call, device) for _ in range(_REPEATS))


def _measure_link(size: Size, report: Report, device: torch.device) -> None:
    """Report gigabytes a second of each direction alone, and the sum of both at once."""
    nbytes = size.either(1 << 28, 1 << 16)
    arena = HostArena(2 * nbytes, is_pinned=device.type == "cuda")
    here = [arena.take(nbytes, torch.uint8).fill_(1) for _ in range(2)]
    there = torch.zeros(2, nbytes, dtype=torch.uint8, device=device)
    handle = device_handle(device.type)
    link = link_of(handle)

    def to_host() -> Transfer:
        return link.to_host([(here[0], there[0])])

    def to_device() -> Transfer:
        return link.to_device([(there[1], here[1])])

    ways = {"to host": [to_host], "to device": [to_device], "both ways": [to_host, to_device]}
    for name, copies in ways.items():
        seconds = []
        for _ in range(_REPEATS):
            handle.synchronize()
            begin_s = time.perf_counter()
            for transfer in [copy() for copy in copies]:
                transfer.wait()
            seconds.append(time.perf_counter() - begin_s)
        gb_per_s = len(copies) * nbytes / min(seconds) / 1e9
        report.figure(f"pinned copies {name}, GB/s", gb_per_s)
    report.check("what was copied is there", bool((there[1] == 1).all() and (here[0] == 0).all()))
    link.close()

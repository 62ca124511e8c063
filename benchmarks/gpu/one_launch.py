"""The program that part 3 looks into: three launches of the Adam kernel, all alike."""

from __future__ import annotations

import torch

from benchmarks.gpu.part import Report, Size
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, adam_step
from megafsdp.optimizer.kernels.hyper import AdamHyper


def run(size: Size, report: Report) -> None:
    """Step a flat buffer."""
    numel = size.either(1 << 26, 1 << 10)
    weight = torch.randn(numel, device=size.device_type)
    grad = weight.bfloat16()
    states = [torch.zeros_like(weight) for _ in range(2)]
    buffers = AdamBuffers(weight, grad, *states, copy_out=torch.empty_like(grad))
    for step in range(1, 4):
        adam_step(buffers, AdamHyper(1e-3), step=step)
    # Read last: the process must not end before its kernels do.
    report.check("weights are finite", bool(weight.isfinite().all()))

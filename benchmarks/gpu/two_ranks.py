"""Part 7: two ranks that share one GPU and exchange by gloo: the losses, and the time of a step.

NCCL refuses two ranks on one GPU. Gloo takes every exchange through the host, which bounds these
times on both sides: they say nothing about NCCL.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import megafsdp
from benchmarks.gpu import train_step
from benchmarks.gpu.part import Report, Size
from benchmarks.launch import launch
from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.models import build_model, presets
from megafsdp.models.common import TransformerLayer

_CHECKED_STEPS, _WARM_UP_STEPS, _TIMED_STEPS = 10, 2, 5
_PRESET, _ROWS, _MAX_NORM = "qwen3-toy", 4, 1.0
# For losses near 6: sums in attention and embeddings have another order with fewer rows and on a
# GPU, and ten steps of Adam amplify that.
_LOSS_TOLERANCE = 1e-3


def run(size: Size, report: Report) -> None:
    """Run the ranks, which report themselves."""
    launch(_run_rank, size, report, num_ranks=2, shares_gpu=not size.is_rehearsal)


def _run_rank(size: Size, report: Report) -> None:
    device = torch.device(size.either("cuda:0", "cpu"))
    losses, wanted = _train_sharded(size, device), _train_whole(size, device)
    difference = (losses - wanted).abs().max().item()
    is_met = difference <= _LOSS_TOLERANCE and wanted[0] > wanted[-1]
    if dist.get_rank() == 0:
        report.check("losses of ten steps", bool(is_met), f"differ by {difference:.1e}")
    # Small, since FSDP2 takes half a minute a step by gloo with half a billion parameters.
    case = train_step.Case(_PRESET, size.either(4, 1), size.either(128, 16))
    for name in (train_step.OURS, train_step.FSDP2):
        try:
            step_ms: float | str = _time(name, case, device)
        except RuntimeError as error:
            if name == train_step.OURS:
                raise
            # gloo may refuse what torch's engine asks for on a GPU.
            step_ms = f"not available: {error}"
        if dist.get_rank() == 0:
            report.figure(f"step ms by gloo, {name}", step_ms)


def _batch(size: Size, step: int, device: torch.device) -> torch.Tensor:
    """Return the tokens of all ranks."""
    generator = torch.Generator().manual_seed(step)
    shape = (_ROWS, size.either(128, 16) + 1)
    vocabulary = presets[_PRESET].vocab_size
    return torch.randint(0, vocabulary, shape, generator=generator).to(device) % 50


def _new_model(device: torch.device) -> nn.Module:
    with device:
        return build_model(presets[_PRESET], seed=0)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)


def _train_sharded(size: Size, device: torch.device) -> torch.Tensor:
    """Train on this rank's half of each batch; return the mean losses of all ranks."""
    model = _new_model(device)
    for module in [*(m for m in model.modules() if isinstance(m, TransformerLayer)), model]:
        megafsdp.fully_shard(module)
    optimizer = _adam(model)
    losses = []
    for step in range(_CHECKED_STEPS):
        tokens = _batch(size, step, device).chunk(2)[dist.get_rank()]
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        megafsdp.clip_grad_norm_(model, _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses).float()
    all_reduce(mean, op="sum")
    return mean.cpu() / dist.get_world_size()


def _train_whole(size: Size, device: torch.device) -> torch.Tensor:
    """Train on whole batches, unsharded; return the losses."""
    model = _new_model(device)
    optimizer = _adam(model)
    losses = []
    for step in range(_CHECKED_STEPS):
        tokens = _batch(size, step, device)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


def _time(name: str, case: train_step.Case, device: torch.device) -> float:
    side = train_step.build(name, case, device)
    times_ms = []
    for _ in range(_WARM_UP_STEPS + _TIMED_STEPS):
        dist.barrier()
        begin_s = time.perf_counter()
        side.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_ms.append(1e3 * (time.perf_counter() - begin_s))
    return statistics.median(times_ms[_WARM_UP_STEPS:])

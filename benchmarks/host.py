"""Host time of the hooks of units beside those of FSDP2, with torch's ``fake`` backend.

A model of many thin layers is stepped plain, sharded by megafsdp and sharded by FSDP2, in one
process for each world size. Each layer is a unit of 12 tiny parameters, so kernels cost next to
nothing; the extra time of a sharded step over the plain one is the cost of its hooks: Python,
dispatch, and operators on flat buffers. A step is forward, backward, and the clearing of gradients;
the optimizer's step comes between steps and is not timed. Sides run blocks of steps in turn, and
the fastest step of a block counts. The figure is the ratio of medians, ours over FSDP2's.

The fake backend fills a gather with one operator a rank, which at 512 ranks would take longer than
the hooks. A stand-in gives both sides the same with one operator, and its time is left out; sums
are those of ranks with equal gradients. Both engines treat it as NCCL, which makes sums and means.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from benchmarks import launch
from benchmarks.record import CheckError, spread
from megafsdp.buffer.comm import collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor

SIDES = ("megafsdp", "fsdp2")
_PLAIN = "plain"
_NUM_WEIGHTS = 6
_STEPS_A_BLOCK = 5
_WARM_UP_BLOCKS = 2


@dataclass(frozen=True)
class Shape:
    """What is stepped: layers of 12 parameters, 6 square weights of a width and their biases."""

    layers: int
    width: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--repeats", type=int, default=20, help="blocks a side after warm-up")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=8)
    # For gradients, relative to the largest element: sides round alike except for the mean.
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the check")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure each world in a process of its own; return the figures.

    Raises:
        CheckError: A side's gradients or collectives are wrong.
    """
    shape = Shape(options.layers, options.width)
    worlds = {}
    for world in options.worlds:
        context = mp.get_context(launch.START_METHOD)
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
            arguments = (world, shape, options.repeats, options.tolerance)
            worlds[str(world)] = process.submit(_measure, *arguments).result()
    return {"shape": asdict(shape), "repeats": options.repeats, "worlds": worlds}


def describe(results: dict[str, Any]) -> str:
    """Return the results as lines for people."""
    shape = results["shape"]
    lines = [
        f"{shape['layers']} layers of 12 parameters, width {shape['width']}, on the fake backend; "
        "host ms of hooks a unit and step, megafsdp / FSDP2"
    ]
    for world, case in results["worlds"].items():
        ours, theirs = (case["hooks_ms_per_unit"][side] for side in SIDES)
        low, high = case["ratio_quartiles"]
        lines.append(
            f"{world:>5} ranks: {ours:.3f} / {theirs:.3f}, ratio {case['ratio']:.3f} (quartiles of "
            f"blocks {low:.3f} to {high:.3f}); plain step {case['step_ms'][_PLAIN]['median']:.1f}"
        )
    return "\n".join(lines)


class _ThinLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(width, width).softmax(dim=1) for _ in range(_NUM_WEIGHTS)
        )
        self.biases = nn.ParameterList(torch.randn(width) for _ in range(_NUM_WEIGHTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for weight, bias in zip(self.weights, self.biases, strict=True):
            y = torch.addmm(bias, y, weight)
        # Rows sum to 1, even if all are the same, so activations and gradients keep their size.
        return torch.add(x, y.sin(), alpha=0.1)


class _Side:
    """One model with its optimizer."""

    def __init__(self, name: str, shape: Shape, backend: Backend) -> None:
        torch.manual_seed(0)
        self._backend = backend
        self.model = nn.Sequential(*(_ThinLayer(shape.width) for _ in range(shape.layers)))
        if name != _PLAIN:
            shard = megafsdp.fully_shard if name == SIDES[0] else torch_fully_shard
            for layer in self.model:
                # FSDP2's default; ours would keep the last layer for backward.
                shard(layer, reshard_after_forward=True)
            shard(self.model)
        self.parameters = list(self.model.parameters())
        # A step that changes nothing: weights count as written, as in training, but stay equal.
        self._optimizer = torch.optim.SGD(self.parameters, lr=0.0, foreach=True)
        self._batch = torch.randn(2, shape.width)

    def backward(self) -> None:
        """Run forward and backward."""
        self.model(self._batch).sum().backward()

    def step(self) -> float:
        """Run a step; return its milliseconds, without those of the optimizer and the backend."""
        self._backend.spent_s = 0.0
        start_s = time.process_time()
        self.backward()
        backward_s = time.process_time()
        self._optimizer.step()
        clear_s = time.process_time()
        for parameter in self.parameters:
            parameter.grad = None
        spent_s = time.process_time() - clear_s + backward_s - start_s
        return 1e3 * (spent_s - self._backend.spent_s)

    def block(self) -> float:
        """Return the fastest of a few steps: other load of the machine slows some of them."""
        return min(self.step() for _ in range(_STEPS_A_BLOCK))


class Backend:
    """A stand-in for NCCL: does with one operator what the fake backend does with one a rank.

    Attributes:
        calls: Collectives by kind.
        spent_s: Processor time spent here.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.spent_s = 0.0
        everyone = dist.group.WORLD
        assert everyone is not None, "the process group is made"
        self._num_ranks = everyone.size()
        self._done = everyone.barrier()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Stand between torch's functions and the backends of all process groups."""
        # torch 2.13 has second names for all of them; 2.11 has only the first.
        names = {
            self._gather: ("_allgather_base", "all_gather_single"),
            self._gather_coalesced: (
                "allgather_into_tensor_coalesced",
                "all_gather_single_coalesced",
            ),
            self._reduce: ("_reduce_scatter_base", "reduce_scatter_single"),
            self._reduce_coalesced: (
                "reduce_scatter_tensor_coalesced",
                "reduce_scatter_single_coalesced",
            ),
        }
        with contextlib.ExitStack() as stack:
            for method, spellings in names.items():
                for name in spellings:
                    if hasattr(dist.ProcessGroup, name):
                        timed = self._timed(method)
                        stack.enter_context(mock.patch.object(dist.ProcessGroup, name, timed))
            stack.enter_context(mock.patch.object(collectives, "_parse", _as_nccl))
            yield

    def _timed(self, method: Callable[..., None]) -> Callable[..., dist.Work]:
        def call(group: dist.ProcessGroup, *args: Any) -> dist.Work:
            start_s = time.process_time()
            method(*args)
            self.spent_s += time.process_time() - start_s
            return self._done

        return call

    def _gather(self, output: torch.Tensor, shard: torch.Tensor, options: object) -> None:
        self._gather_coalesced([output], [shard], options)

    def _gather_coalesced(
        self, outputs: list[torch.Tensor], shards: list[torch.Tensor], options: object
    ) -> None:
        self.calls["all_gather"] += 1
        for output, shard in zip(outputs, shards, strict=True):
            # FSDP2 gathers in place: the shard is rank 0's part of the output.
            num_there = int(output.data_ptr() == shard.data_ptr())
            output.view(self._num_ranks, -1)[num_there:].copy_(shard.view(1, -1))

    def _reduce(self, output: torch.Tensor, addends: torch.Tensor, options: Any) -> None:
        self._reduce_coalesced([output], [addends], options)

    def _reduce_coalesced(
        self, outputs: list[torch.Tensor], addends: list[torch.Tensor], options: Any
    ) -> None:
        self.calls["reduce_scatter"] += 1
        # Rank 0's shard of the sum, or of the mean, of equal addends.
        factor = self._num_ranks if options.reduceOp == dist.ReduceOp.SUM else 1
        for output, own in zip(outputs, addends, strict=True):
            torch.mul(own.view(-1)[: output.numel()], factor, out=output.view(-1))


def _as_nccl(config: str) -> dict[str, str]:
    return {"cpu": "nccl"}


def _measure(world: int, shape: Shape, repeats: int, tolerance: float) -> dict[str, object]:
    """Check the sides as rank 0 of a world, then time them; runs in a process of its own."""
    # FSDP2 raises FutureWarning for names that it calls itself.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        backend = Backend()
        with backend.patched():
            sides = {name: _Side(name, shape, backend) for name in (_PLAIN, *SIDES)}
            facts = {n: _check(sides[_PLAIN], sides[n], backend, tolerance) for n in SIDES}
            return {"check": facts, **_time_sides(sides, shape, repeats)}
    finally:
        dist.destroy_process_group()


def _check(plain: _Side, side: _Side, backend: Backend, tolerance: float) -> dict[str, object]:
    """Compare a side's gradients with those of plain torch on the weights that gathers bring.

    Returns:
        The worst difference relative to the largest element of a tensor, and the collectives.

    Raises:
        CheckError: A gradient is absent, is not a DTensor of its parameter's shape, or has wrong
            values; or the collectives are not two gathers and one reduction for each layer.
    """
    # The first forward finds the root and compares layouts with an extra collective.
    side.step()
    with torch.no_grad():
        for ours, theirs in zip(plain.model, side.model, strict=True):
            # The stand-in repeats this rank's shard, so gathered weights are not the original ones.
            theirs.unshard()
            for own, full in zip(ours.parameters(), theirs.parameters(), strict=True):
                own.copy_(full)
            theirs.reshard()
    backend.calls.clear()
    for each in (plain, side):
        each.backward()
    calls, num_layers = dict(backend.calls), len(plain.model)
    expected = {"all_gather": 2 * num_layers, "reduce_scatter": num_layers}
    worst, num_compared = 0.0, 0
    for own, sharded in zip(plain.parameters, side.parameters, strict=True):
        grad = sharded.grad
        if not isinstance(grad, DTensor) or grad.shape != own.shape or own.grad is None:
            raise CheckError(f"a gradient of {tuple(own.shape)} is {grad}")
        rows = local_tensor(grad).reshape(-1)
        # Rank 0 has the first rows of FSDP2's parameters, and any rows of ours.
        start = grad.uneven_layout.element_range()[0] if isinstance(grad, UnevenDTensor) else 0
        right = own.grad.reshape(-1)[start : start + rows.numel()]
        if rows.numel():
            error = float((rows - right).abs().max() / own.grad.abs().max())
            worst = max(worst, math.inf if math.isnan(error) else error)
            num_compared += 1
    for each in (plain, side):
        each.model.zero_grad()
    if calls != expected:
        raise CheckError(f"collectives are {calls}, not {expected}")
    if not num_compared or not worst <= tolerance:
        raise CheckError(f"{num_compared} gradients differ by {worst:.1e}, over {tolerance:g}")
    return {"gradient": worst, "tolerance": tolerance, "calls": calls}


def _time_sides(sides: dict[str, _Side], shape: Shape, repeats: int) -> dict[str, object]:
    blocks_ms: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(_WARM_UP_BLOCKS + repeats):
        for name in sides if number % 2 else reversed(sides):
            block_ms = sides[name].block()
            if number >= _WARM_UP_BLOCKS:
                blocks_ms[name].append(block_ms)
    step_ms = {name: spread(blocks_ms[name]) for name in sides}
    plain_ms = step_ms[_PLAIN]["median"]
    hooks_ms = {name: step_ms[name]["median"] - plain_ms for name in SIDES}
    ratios = sorted(
        (ours - plain) / (theirs - plain)
        for plain, ours, theirs in zip(*blocks_ms.values(), strict=True)
    )
    return {
        "step_ms": step_ms,
        "hooks_ms_per_unit": {name: hooks_ms[name] / shape.layers for name in SIDES},
        "ratio": hooks_ms[SIDES[0]] / hooks_ms[SIDES[1]],
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
    }

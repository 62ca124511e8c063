"""Part 6: what collectives of a given length cost beside compute, on one GPU.

NCCL needs one GPU for each rank. So the ``fake`` backend makes a world of eight, and a stand-in
replaces its collectives. On a stream of its own, as on one link, it takes a given time; then it
gives this rank's shard in every slot of a gather, and this rank's own part of a sum. Code that did
not wait would read results before they are there: gradients must equal those of a stand-in that
takes no time. On a CPU the wait takes the time and then copies.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  It registers the backend.

import megafsdp
from benchmarks.gpu.part import Report, Size
from megafsdp.buffer.comm import collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device.host_memory import HostArena

_WORLD = 8
_LENGTHS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
# A collective that is shorter than the compute beside it should be hidden.
_HIDDEN_LENGTH = 0.75
_WARM_UP_STEPS, _STEPS = 2, 5
# Bytes of the longest delay; also timed to find how many bytes take a millisecond.
_DELAY_NBYTES = 1 << 29


class _Link:
    """A link that carries one collective after another, each for the same time."""

    def __init__(self, device: torch.device) -> None:
        self._delay = _Delay(device) if device.type == "cuda" else None
        self.ms = 0.0
        self.num_calls = 0
        self._end_s = 0.0

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Stand in for torch's collectives of flat buffers."""
        with (
            mock.patch.object(collectives, "_all_gather_single", self._gather),
            mock.patch.object(collectives, "_reduce_scatter_single", self._reduce),
        ):
            yield

    def _gather(
        self, out: torch.Tensor, own: torch.Tensor, *, async_op: bool = False, **options: object
    ) -> _Work | None:
        slots = out.view(-1, own.numel())
        if async_op:
            return self._carry(slots, own)
        # Small gathers, for comparisons of ranks before the first forward.
        slots.copy_(own.clone())
        return None

    def _reduce(self, out: torch.Tensor, own: torch.Tensor, **options: object) -> _Work:
        return self._carry(out, own[: out.numel()])

    def _carry(self, out: torch.Tensor, own: torch.Tensor) -> _Work:
        self.num_calls += 1
        event = None if self._delay is None else self._queue(self._delay, out, own)
        self._end_s = max(self._end_s, time.perf_counter()) + self.ms / 1e3
        return _Work(out, own, event, self._end_s)

    def _queue(self, delay: _Delay, out: torch.Tensor, own: torch.Tensor) -> torch.cuda.Event:
        delay.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(delay.stream):
            # Written after the delay, so that a reader that does not wait misses it.
            delay(self.ms)
            # A copy: the shard may be a slot of the output.
            out.copy_(own.clone())
        return delay.stream.record_event()


class _Delay:
    """Time on a stream in which the GPU's processors are free: a copy to the host.

    A waiting kernel would occupy a processor, and the largest products have a block for each of
    them. NCCL also occupies some, which is not measured here.
    """

    def __init__(self, device: torch.device) -> None:
        # The priority that the engine asks NCCL for: otherwise each copy waits for a whole product.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._there = torch.zeros(_DELAY_NBYTES, dtype=torch.uint8, device=device)
        self._here = HostArena(_DELAY_NBYTES, is_pinned=True).take(_DELAY_NBYTES, torch.uint8)
        self._nbytes_per_ms = 0.0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self._copy(_DELAY_NBYTES)
            start.record()
            self._copy(_DELAY_NBYTES)
            end.record()
        end.synchronize()
        self._nbytes_per_ms = _DELAY_NBYTES / start.elapsed_time(end)

    def __call__(self, ms: float) -> None:
        """Take a number of milliseconds of the current stream."""
        self._copy(int(ms * self._nbytes_per_ms))

    def _copy(self, nbytes: int) -> None:
        assert nbytes <= _DELAY_NBYTES, "a delay is at most what was timed"
        self._here[:nbytes].copy_(self._there[:nbytes], non_blocking=True)


class _Work:
    """A collective under way: the stream waits for it; on a CPU the thread waits, then copies."""

    def __init__(
        self, out: torch.Tensor, own: torch.Tensor, event: torch.cuda.Event | None, end_s: float
    ) -> None:
        # The link reads and writes these until the wait, as NCCL does: their memory must stay.
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = (out, own)
        self._event, self._end_s = event, end_s

    def wait(self) -> None:
        """Make later work wait for the collective."""
        assert self._pair is not None, "one wait"
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        else:
            time.sleep(max(0.0, self._end_s - time.perf_counter()))
            self._pair[0].copy_(self._pair[1].clone())
        self._pair = None


def run(size: Size, report: Report) -> None:
    """Measure steps by the length of a collective, in units of a layer's forward."""
    device = torch.device(size.device_type)
    num_layers, width, rows = size.either((12, 4096, 8192), (3, 16, 4))
    dist.init_process_group("fake", rank=0, world_size=_WORLD)
    link = _Link(device)
    with link.patched():
        net = _net(num_layers, width, device)
        inputs = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        for _ in range(_WARM_UP_STEPS):
            _step(net, inputs)
        wanted = _grads(net)
        wanted_calls = 3 * num_layers * _WARM_UP_STEPS
        report.check("collectives", link.num_calls == wanted_calls, link.num_calls)
        layer_ms = statistics.median(_forward_ms(net, inputs) for _ in range(_STEPS)) / num_layers
        report.figure("ms of a layer's forward", layer_ms)
        exposed: dict[str, float] = {}
        for length in _LENGTHS:
            # In turn with collectives that take no time, as a GPU gets slower when it gets warm.
            times_ms: dict[float, list[float]] = {0.0: [], length: []}
            for _ in range(_STEPS):
                for ms, times in times_ms.items():
                    link.ms = ms * layer_ms
                    times.append(_step_ms(net, inputs))
            report.check(f"gradients at {length}", _equal(_grads(net), wanted))
            base_ms, median_ms = (statistics.median(times) for times in times_ms.values())
            exposed[str(length)] = (median_ms - base_ms) / num_layers / layer_ms
            report.figure(f"step ms at {length}, and at 0", [median_ms, base_ms])
            report.figure("exposed a layer, of its forward, by length", exposed)
            if length == _HIDDEN_LENGTH:
                # Three collectives have no compute beside them: the first gather; the last layer's
                # gather in backward, right after its forward and the loss; the first layer's sum.
                report.mark(
                    f"exposed at {length}, beyond what has nothing beside it",
                    exposed[str(length)] - 3 * length / num_layers,
                    at_most=0.1,
                )
    dist.destroy_process_group()


def _net(num_layers: int, width: int, device: torch.device) -> nn.Module:
    """Return layers whose sums have a fixed order, each a unit of one buffer."""
    torch.manual_seed(0)
    with device:
        layers = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_layers)
        ]
    net = nn.Sequential(*layers)
    policy = megafsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for module in [*net, net]:
        megafsdp.fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    return net


def _step(net: nn.Module, inputs: torch.Tensor) -> None:
    net.zero_grad()
    net(inputs).square().mean().backward()


def _step_ms(net: nn.Module, inputs: torch.Tensor) -> float:
    _synchronize(inputs.device)
    begin_s = time.perf_counter()
    _step(net, inputs)
    _synchronize(inputs.device)
    return 1e3 * (time.perf_counter() - begin_s)


@torch.no_grad()
def _forward_ms(net: nn.Module, inputs: torch.Tensor) -> float:
    _synchronize(inputs.device)
    begin_s = time.perf_counter()
    net(inputs)
    _synchronize(inputs.device)
    return 1e3 * (time.perf_counter() - begin_s)


def _grads(net: nn.Module) -> list[torch.Tensor]:
    grads = [local_tensor(p.grad) for p in net.parameters() if p.grad is not None]
    assert any(grad.abs().max() > 0 for grad in grads if grad.numel()), "gradients are there"
    return [grad.clone() for grad in grads]


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

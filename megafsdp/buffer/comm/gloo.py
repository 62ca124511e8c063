"""What gloo lacks: a sum in fp32 for reduce-scatters, a wait that spins first, and a clean exit.

gloo's own reduce-scatter is an all-reduce in the dtype of the wire. So ranks exchange shards by
all-to-all, and each rank sums what it received with :func:`sum_shards`. The sum runs in rank order
in the accumulation dtype, and every operation is rounded separately, so the native kernel with any
instruction set and the torch fallback give the same bits.

:func:`look_out` spins before a wait: sleeping at once costs more than most collectives take, if the
rank has a core of its own.

:func:`wait_for_rest` runs when the interpreter exits. A thread of gloo frees its tensors shortly
after it has woken the thread that waited for the collective, and freeing a tensor with a Python
object takes the GIL. If the interpreter has ended by then, taking the GIL ends the thread, and C++
reports ``terminate called without an active exception``: a run that has done all its work ends with
SIGABRT. The threads cannot be joined: they end with the last reference to their process group, and
models and optimizers hold such references.

This file issues no collective; collectives.py does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megafsdp._native import native_module
from megafsdp.device.host_threads import is_core_shared
from megafsdp.errors import expected

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def sum_shards(
    shards: Sequence[torch.Tensor],
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Write the scaled sum of shards to a tensor; local, on the current stream.

    ``out = scale * (shards[0] + shards[1] + ...)``, plus the old ``out`` if ``accumulate``. All of
    it is computed in fp32, or in fp64 if the shards or ``out`` are fp64, and rounded once to the
    dtype of ``out``. ``scale`` is rounded to the accumulation dtype first.

    Args:
        shards: One ``(numel,)`` tensor per rank, in rank order, contiguous, of one dtype and
            device.
        out: ``(numel,)``, contiguous, on the same device; it may be one of the shards, but must not
            overlap a shard in part.
        scale: Factor of the sum, applied once at the end.
        accumulate: True to add to the old ``out``, False to overwrite it.

    Allocates nothing when the native kernel runs, else one tensor in the accumulation dtype.

    Raises:
        ValueError: There is no shard, or a tensor differs in shape, dtype, device or contiguity.
    """
    _check(shards, out)
    native = native_module()
    # The kernel reads host memory only, and an empty tensor may have a null pointer.
    if native is None or out.device.type != "cpu":
        _sum_shards_in_torch(shards, out, scale, accumulate)
    elif out.numel() > 0:
        native.sum_shards(
            shards=[shard.data_ptr() for shard in shards],
            out=out.data_ptr(),
            numel=out.numel(),
            shard_dtype=_name_of(shards[0].dtype),
            out_dtype=_name_of(out.dtype),
            scale=scale,
            accumulate=accumulate,
        )


@torch.no_grad()
def _sum_shards_in_torch(
    shards: Sequence[torch.Tensor], out: torch.Tensor, scale: float, accumulate: bool
) -> None:
    is_double = torch.float64 in (shards[0].dtype, out.dtype)
    # Copy even an fp32 shard: the sum must not overwrite the caller's.
    total = shards[0].to(torch.float64 if is_double else torch.float32, copy=True)
    for shard in shards[1:]:
        # An in-place add converts a narrower operand exactly and adds in the dtype of the total.
        total.add_(shard)
    # Keep the order of the native kernel, for equal bits: scale the sum, then add the old output.
    total.mul_(scale)
    if accumulate:
        total.add_(out)
    out.copy_(total)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(shards: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if not shards:
        raise ValueError(
            expected(
                "at least one shard", "none", where="sum_shards()", hint="Pass one shard a rank"
            )
        )
    first = shards[0]
    for name, tensor in (
        *((f"shards[{i}]", shard) for i, shard in enumerate(shards)),
        ("out", out),
    ):
        dtypes = _DTYPES if tensor is out else (first.dtype,)
        is_right = (
            tensor.ndim == 1
            and tensor.is_contiguous()
            and tensor.shape == first.shape
            and tensor.device == first.device
            and tensor.dtype in _DTYPES
            and tensor.dtype in dtypes
        )
        if not is_right:
            raise ValueError(
                expected(
                    f"a contiguous tensor of shape {tuple(first.shape)} on {first.device}, "
                    f"of dtype {' or '.join(_name_of(dtype) for dtype in dtypes)}",
                    f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.device}, "
                    f"{tensor.dtype}",
                    where=f"{name} of sum_shards()",
                    hint="Pass flat shards of one dtype and an output of their size",
                )
            )


# The time that an exchange of a megabyte takes. A rank that is later than that is still computing.
_LOOK_OUT_S = 0.001


def look_out(work: dist.Work) -> None:
    """Spin until a collective on gloo has ended, or a millisecond has passed; local.

    A collective passes from thread to thread, each woken by the one before: the rank's own, gloo's
    runner and its event loop, and those of the other ranks. Waking a thread on a core that fell
    asleep takes longer than sending the data of most collectives. So this thread keeps its core
    awake, and yields it to other threads that can run there. Where ranks share cores it would only
    take time from the rank it waits for, so it returns at once.

    ``wait()`` must follow: it raises the errors of the collective.
    """
    if is_core_shared():
        return
    deadline_s = time.monotonic() + _LOOK_OUT_S
    while not work.is_completed() and time.monotonic() < deadline_s:
        os.sched_yield()


_TASKS = Path("/proc/self/task")
# torch's name for its gloo threads, cut to the 15 letters that Linux keeps, in brackets as in stat.
_NAME = "(pt_gloo_runloop)"
_INTERVAL_S = 0.001


def wait_for_rest(patience_s: float = 2.0) -> None:
    """Wait until no thread of gloo has anything left to run, or ``patience_s`` has passed.

    Local. A thread that sleeps is at rest, even if it waits for a rank that never comes. Returns
    at once if the system has no ``/proc``.

    Args:
        patience_s: How long to wait at most, in seconds.
    """
    deadline_s = time.monotonic() + patience_s
    # A thread that waits for the GIL looks asleep. The GIL is free while this thread sleeps, so by
    # the second look that other thread has run or shows as running.
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < deadline_s:
        num_quiet = 0 if _is_any_running() else num_quiet + 1
        time.sleep(_INTERVAL_S)


def _is_any_running() -> bool:
    for stat in _TASKS.glob("*/stat"):
        # A thread may end after it was listed and before its file is read.
        with contextlib.suppress(OSError):
            name, state = stat.read_text().split()[1:3]
            if name == _NAME and state == "R":
                return True
    return False

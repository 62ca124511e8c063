"""Sum the shards that a reduce-scatter over gloo brings together.

gloo's own reduce-scatter is an all-reduce in the dtype of the wire, so ranks exchange shards by
all-to-all and each sums what it got. The sum runs in rank order in the accumulation dtype, every
operation rounded separately, so the native kernel at any instruction set and the torch fallback
give the same bits.


Let the threads of gloo come to rest before the interpreter ends.

A thread that ran a collective lets go of its tensors a little after it has woken the thread that
waited for it, and letting go of a tensor that Python knows takes Python's lock. Where the
interpreter is at its end by then, the lock takes the thread down, and C++ answers ``terminate
called without an active exception``: a run that has done all its work ends by SIGABRT. Joining the
threads would mend it, but they end only with the last reference to their process group, which
models and optimizers keep.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megafsdp._native import native_module
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
    it is computed in fp32, or in fp64 where the shards or ``out`` are fp64, and rounded once to the
    dtype of ``out``. ``scale`` is rounded to the accumulation dtype first.

    Args:
        shards: One ``(numel,)`` tensor a rank, in rank order, contiguous, of one dtype and device.
        out: ``(numel,)``, contiguous, on the same device; may be one of the shards, must not
            overlap one in part.
        scale: Factor of the sum, applied once at the end.
        accumulate: Add to what ``out`` holds instead of replacing it.

    Allocates nothing when the native kernel runs, else one tensor in the accumulation dtype.

    Raises:
        ValueError: There is no shard, or a tensor differs in shape, dtype, device or contiguity.
    """
    _check(shards, out)
    native = native_module()
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
    total = shards[0].to(torch.float64 if is_double else torch.float32, copy=True)
    for shard in shards[1:]:
        # In place, torch converts a narrower operand exactly and adds in the dtype of the total.
        total.add_(shard)
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


_TASKS = Path("/proc/self/task")
_NAME = "(pt_gloo_runloop)"
_INTERVAL_S = 0.001


def wait_for_rest(patience_s: float = 2.0) -> None:
    """Return when no thread of gloo has anything left to run, or patience is at its end.

    Local; registered to run when the interpreter exits. Threads that sleep, waiting for ranks that
    never come, say, are at rest. Does nothing where the system has no ``/proc``.

    Args:
        patience_s: How long to wait at most, in seconds.
    """
    deadline_s = time.monotonic() + patience_s
    # Sleeping gives Python's lock away, so a thread that waits for it in the first look has run or
    # can run in the second.
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < deadline_s:
        num_quiet = 0 if _is_any_running() else num_quiet + 1
        time.sleep(_INTERVAL_S)


def _is_any_running() -> bool:
    for stat in _TASKS.glob("*/stat"):
        # A thread may end between the listing and the look at it.
        with contextlib.suppress(OSError):
            name, state = stat.read_text().split()[1:3]
            if name == _NAME and state == "R":
                return True
    return False

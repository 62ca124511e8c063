"""One pass of Adam over flat buffers, and sums of squares: compiled where possible, else in torch.

Both ways, every instruction set and every number of threads give the same bits. This file checks
the buffers and picks the way; the arithmetic is defined in reference.py. One call takes a whole
flat buffer and a table of segments, each with its own hyperparameters: parameters with and without
weight decay lie mixed in a buffer, and a call for each would cost more than small ones take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from megafsdp._native import native_module
from megafsdp.errors import expected
from megafsdp.optimizer import reference
from megafsdp.optimizer.hyper import AdamConstants, AdamHyper, round_to_fp32

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STATE_DTYPES = (torch.float32, torch.bfloat16)
_COPY_DTYPES = (torch.bfloat16, torch.float16)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _GRAD_DTYPES}
# Of moments in two dtypes, which pass through fp32 copies of so many elements.
_WIDE_NUMEL = 1 << 20
_BESIDE_FP32 = {
    "weight": (torch.float32,),
    "grad": _GRAD_DTYPES,
    "exp_avg": _STATE_DTYPES,
    "exp_avg_sq": _STATE_DTYPES,
    "copy_out": _COPY_DTYPES,
}
_BESIDE_REMAINDERS = _BESIDE_FP32 | {
    "weight": (torch.bfloat16,),
    "remainder": (torch.int16,),
    "copy_out": (),
}


@dataclass(frozen=True, slots=True)
class AdamBuffers:
    """Flat tensors of one length on one device, contiguous, none overlapping another.

    Attributes:
        weight: ``(numel,)`` fp32 main weights; bf16 if ``remainder`` is given.
        grad: ``(numel,)`` fp32, bf16 or fp16; is read only.
        exp_avg: ``(numel,)`` fp32 or bf16.
        exp_avg_sq: ``(numel,)`` fp32 or bf16.
        remainder: ``(numel,)`` int16; the low half of fp32 weights whose high half is ``weight``.
        copy_out: ``(numel,)`` bf16 or fp16; receives the new weights, rounded to nearest even. Not
            with ``remainder``, where ``weight`` is that copy already.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    remainder: torch.Tensor | None = None
    copy_out: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check the tensors.

        Raises:
            ValueError: One has the wrong shape, dtype, device or strides.
        """
        wanted = _BESIDE_FP32 if self.remainder is None else _BESIDE_REMAINDERS
        numel, device = self.weight.numel(), self.weight.device
        for name, dtypes in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None:
                _check_tensor(name, tensor, dtypes, numel=numel, device=device)

    def narrow(self, start: int, stop: int) -> AdamBuffers:
        """Return elements ``start`` to ``stop`` of all buffers; aliases them."""
        names = [
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        ]
        return AdamBuffers(**{name: getattr(self, name)[start:stop] for name in names})


@dataclass(frozen=True, slots=True)
class AdamSegment:
    """Elements ``start`` to ``stop`` of the buffers, and their hyperparameters."""

    start: int
    stop: int
    hyper: AdamHyper


@torch.no_grad()
def adam_step(
    buffers: AdamBuffers,
    hyper: AdamHyper | Sequence[AdamSegment],
    *,
    step: int,
    grad_scale: float = 1.0,
    flush_denormals: bool = True,
    num_threads: int | None = None,
) -> None:
    """Update weights and moments in place; local, elementwise, in one pass.

    Elements of no segment are neither read nor written. Gradients that are not finite spoil what
    they touch, as in torch: look at :func:`sum_of_squares` first. The native kernel allocates
    nothing; the fallback a few chunks of 64 KiB.

    Args:
        buffers: What to update.
        hyper: Hyperparameters of all elements; or segments in rising order, gaps allowed.
        step: This step, counted from 1.
        grad_scale: Factor of the gradient, rounded to fp32: one over the loss scale, times the
            clipping coefficient.
        flush_denormals: On a CPU, take and give zero for subnormal numbers, which are up to 40
            times slower; the caller's own mode is left as it is.
        num_threads: Threads of the native kernel; by default ``torch.get_num_threads()``. Small
            buffers use fewer.

    Raises:
        ValueError: A segment lies outside the buffers or before its predecessor's end, ``step`` or
            ``num_threads`` is not positive.
    """
    numel = buffers.weight.numel()
    segments = [AdamSegment(0, numel, hyper)] if isinstance(hyper, AdamHyper) else hyper
    num_threads = torch.get_num_threads() if num_threads is None else num_threads
    _check_positive(step=step, num_threads=num_threads)
    _check_segments(segments, numel)
    table = [(s.start, s.stop, AdamConstants.rounded(s.hyper, step)) for s in segments]
    scale = round_to_fp32(grad_scale)
    native = native_module()
    if native is None or buffers.weight.device.type != "cpu":
        with reference.denormal_mode(flush_denormals):
            for start, stop, constants in table:
                for chunk in reference.chunks(start, stop):
                    _step_in_torch(buffers, chunk, constants, scale)
        return
    options: dict[str, object] = {
        "grad_scale": scale,
        "flush_denormals": flush_denormals,
        "num_threads": num_threads,
    }
    if buffers.exp_avg.dtype == buffers.exp_avg_sq.dtype:
        rows = [(start, stop, constants.row()) for start, stop, constants in table]
        _call_native(native, buffers, rows, options)
        return
    for start, stop, constants in table:
        row = constants.row()
        for first in range(start, stop, _WIDE_NUMEL):
            part = buffers.narrow(first, min(first + _WIDE_NUMEL, stop))
            wide = dataclasses.replace(
                part, exp_avg=part.exp_avg.float(), exp_avg_sq=part.exp_avg_sq.float()
            )
            _call_native(native, wide, [(0, wide.weight.numel(), row)], options)
            part.exp_avg.copy_(wide.exp_avg)
            part.exp_avg_sq.copy_(wide.exp_avg_sq)


@torch.no_grad()
def sum_of_squares(values: torch.Tensor, *, num_threads: int | None = None) -> float:
    """Return the sum of squares of a ``(numel,)`` tensor; fp32, bf16 or fp16; local.

    Squares are exact and are added in double in an order that depends on nothing but their
    positions. The sum of finite values cannot overflow: it is not finite if and only if one of the
    values is not.

    Raises:
        ValueError: The tensor is not flat, contiguous and of one of these dtypes, or
            ``num_threads`` is not positive.
    """
    num_threads = torch.get_num_threads() if num_threads is None else num_threads
    _check_positive(num_threads=num_threads)
    _check_tensor("values", values, _GRAD_DTYPES, numel=values.numel(), device=values.device)
    native = native_module()
    if native is None or values.device.type != "cpu":
        return reference.sum_of_squares(values)
    if values.numel() == 0:
        return 0.0
    total: float = native.sum_of_squares(
        values=values.data_ptr(),
        numel=values.numel(),
        dtype=_NAMES[values.dtype],
        num_threads=num_threads,
    )
    return total


def _call_native(
    native: ModuleType,
    buffers: AdamBuffers,
    rows: list[tuple[int, int, tuple[float, ...]]],
    options: dict[str, object],
) -> None:
    if buffers.weight.numel() == 0:
        return
    native.adam_step(
        weight=buffers.weight.data_ptr(),
        grad=buffers.grad.data_ptr(),
        exp_avg=buffers.exp_avg.data_ptr(),
        exp_avg_sq=buffers.exp_avg_sq.data_ptr(),
        remainder=_address_of(buffers.remainder),
        copy_out=_address_of(buffers.copy_out),
        numel=buffers.weight.numel(),
        grad_dtype=_NAMES[buffers.grad.dtype],
        state_dtype=_NAMES[buffers.exp_avg.dtype],
        copy_out_dtype="" if buffers.copy_out is None else _NAMES[buffers.copy_out.dtype],
        segments=rows,
        **options,
    )


def _step_in_torch(
    buffers: AdamBuffers, chunk: slice, constants: AdamConstants, scale: float
) -> None:
    stored = buffers.weight[chunk]
    low = None if buffers.remainder is None else buffers.remainder[chunk]
    exp_avg, exp_avg_sq = buffers.exp_avg[chunk], buffers.exp_avg_sq[chunk]
    weight, *moments = reference.update(
        stored if low is None else reference.halves_to_fp32(stored, low),
        buffers.grad[chunk].float() * scale,
        exp_avg.float(),
        exp_avg_sq.float(),
        constants,
    )
    exp_avg.copy_(moments[0])
    exp_avg_sq.copy_(moments[1])
    if low is None:
        stored.copy_(weight)
        if buffers.copy_out is not None:
            buffers.copy_out[chunk].copy_(weight)
    else:
        high, rest = reference.fp32_to_halves(reference.plain_nans(weight))
        stored.copy_(high)
        low.copy_(rest)


def _address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(expected("a positive number", number, where=name, mend="Count from 1"))


def _check_segments(segments: Sequence[AdamSegment], numel: int) -> None:
    end = 0
    for i, segment in enumerate(segments):
        if not end <= segment.start <= segment.stop <= numel:
            raise ValueError(
                expected(
                    f"{end} <= start <= stop <= {numel}",
                    f"start {segment.start}, stop {segment.stop}",
                    where=f"segment {i} of adam_step()",
                    mend="Give segments in rising order, inside the buffers, without overlap",
                )
            )
        end = segment.stop


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    *,
    numel: int,
    device: torch.device,
) -> None:
    is_right = (
        tensor.dtype in dtypes
        and tensor.dim() == 1
        and tensor.numel() == numel
        and tensor.is_contiguous()
        and tensor.device == device
    )
    if not is_right:
        raise ValueError(
            expected(
                f"a contiguous flat tensor of {numel} elements on {device}, of dtype "
                f"{' or '.join(str(dtype) for dtype in dtypes) or 'None'}",
                f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.device}, "
                f"{tensor.dtype}",
                where=f"{name} of AdamBuffers or sum_of_squares()",
                mend="Pass views of flat buffers with one element for each weight",
            )
        )

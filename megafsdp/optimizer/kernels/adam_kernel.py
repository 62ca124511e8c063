"""One pass of Adam over flat buffers: by a compiled kernel if possible, else in torch.

Both give the same bits, on every instruction set and with every number of threads. This file
defines and checks the buffers of a step, and chooses the kernel; reference.py defines the
arithmetic and cuda.py launches on CUDA. One call takes a whole flat buffer and a table of segments,
each with its own hyperparameters: parameters with and without weight decay lie mixed in a buffer,
and for small ones a call each would cost more than the work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafsdp._native import native_module
from megafsdp.errors import expected
from megafsdp.optimizer.kernels import cuda as cuda_kernels
from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.kernels.hyper import AdamConstants, AdamHyper, round_to_fp32

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES}
_STATE_DTYPES = (torch.float32, torch.bfloat16)
_COPY_DTYPES = (torch.bfloat16, torch.float16)
# Moments in two dtypes pass through fp32 copies, this many elements at a time.
_WIDE_NUMEL = 1 << 20
# The dtypes of each buffer: with fp32 weights, and with weights in two halves.
_BESIDE_FP32 = {
    "weight": (torch.float32,),
    "grad": VALUE_DTYPES,
    "exp_avg": _STATE_DTYPES,
    "exp_avg_sq": _STATE_DTYPES,
    "copy_out": _COPY_DTYPES,
    "new_weight": (torch.float32,),
    "new_exp_avg": (torch.float32,),
    "new_exp_avg_sq": (torch.float32,),
}
_BESIDE_REMAINDERS = _BESIDE_FP32 | {
    "weight": (torch.bfloat16,),
    "remainder": (torch.int16,),
    "copy_out": (),
}
_NEW = ("new_weight", "new_exp_avg", "new_exp_avg_sq")


@dataclass(frozen=True, slots=True)
class AdamBuffers:
    """Flat tensors of one length on one device, contiguous, none overlapping another.

    A step is in place; or, if all three ``new_`` buffers are given, out of place: it only reads the
    old weights and moments, so that it can be repeated from them. The bits are the same.

    Attributes:
        weight: ``(numel,)`` fp32 main weights; bf16 if ``remainder`` is given.
        grad: ``(numel,)`` fp32, bf16 or fp16; is read only.
        exp_avg: ``(numel,)`` fp32 or bf16.
        exp_avg_sq: ``(numel,)`` fp32 or bf16.
        remainder: ``(numel,)`` int16; the low half of fp32 weights whose high half is ``weight``.
        copy_out: ``(numel,)`` bf16 or fp16; receives the new weights, rounded to nearest even. Not
            with ``remainder``: then ``weight`` is that copy already.
        new_weight: ``(numel,)`` fp32; receives the new weights, and ``weight`` keeps the old ones.
            Only on a CPU, and without ``remainder`` or bf16 moments.
        new_exp_avg: ``(numel,)`` fp32; as ``new_weight``.
        new_exp_avg_sq: ``(numel,)`` fp32; as ``new_weight``.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    remainder: torch.Tensor | None = None
    copy_out: torch.Tensor | None = None
    new_weight: torch.Tensor | None = None
    new_exp_avg: torch.Tensor | None = None
    new_exp_avg_sq: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check the tensors.

        Raises:
            ValueError: A tensor has the wrong shape, dtype, device or strides. Or only some
                ``new_`` buffers are given, or with a remainder, bf16 moments, or off the CPU.
        """
        if new := self.new_names():
            self._check_out_of_place(new)
        # Checked here, once per step and buffer, as the kernels get bare addresses.
        wanted = _BESIDE_FP32 if self.remainder is None else _BESIDE_REMAINDERS
        numel, device = self.weight.numel(), self.weight.device
        for name, dtypes in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None:
                check_flat(name, tensor, dtypes, numel=numel, device=device)

    @property
    def outputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weights and the two moments that a step writes."""
        if self.new_weight is None or self.new_exp_avg is None or self.new_exp_avg_sq is None:
            return self.weight, self.exp_avg, self.exp_avg_sq
        return self.new_weight, self.new_exp_avg, self.new_exp_avg_sq

    def new_names(self) -> list[str]:
        """Return the names of the buffers that an out-of-place step writes; none if in place."""
        # A shortcut: this runs in every call, and most steps are in place.
        if self.new_weight is self.new_exp_avg is self.new_exp_avg_sq is None:
            return []
        return [name for name in _NEW if getattr(self, name) is not None]

    def _check_out_of_place(self, new: Sequence[str]) -> None:
        moments = (self.exp_avg.dtype, self.exp_avg_sq.dtype)
        if len(new) < len(_NEW):
            wanted, got = f"all of {', '.join(_NEW)}", f"only {', '.join(new)}"
        elif self.remainder is not None:
            wanted, got = "fp32 weights", "bf16 weights and a remainder"
        elif moments != (torch.float32, torch.float32):
            wanted, got = "fp32 moments", f"{moments[0]} and {moments[1]}"
        # Only steps on the host run ahead, so only the CPU kernel works out of place.
        elif self.weight.device.type != "cpu":
            wanted, got = "tensors on a CPU", f"tensors on {self.weight.device}"
        else:
            return
        raise ValueError(
            expected(
                wanted,
                got,
                where="AdamBuffers of a step out of place",
                hint="Give all three beside fp32 tensors on a CPU; or none, for a step in place",
            )
        )

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


@dataclass(frozen=True, slots=True)
class LateSegment:
    """One parameter's elements, and a count of steps that the host does not read.

    Attributes:
        start: First element of the buffers.
        stop: One past the last element; the step of an empty segment is counted too.
        hyper: Hyperparameters.
        step: Count of the steps before this one, 0-dim fp32 on the device.
        lr: A learning rate that replaces that of ``hyper``: 0-dim fp64 on the device; or None.
    """

    start: int
    stop: int
    hyper: AdamHyper
    step: torch.Tensor
    lr: torch.Tensor | None = None


@torch.no_grad()
def adam_step(
    buffers: AdamBuffers,
    hyper: AdamHyper | Sequence[AdamSegment],
    *,
    step: int,
    grad_scale: float | torch.Tensor = 1.0,
    found_inf: torch.Tensor | None = None,
    flush_denormals: bool = True,
    num_threads: int | None = None,
) -> None:
    """Update weights and moments, in place or out of place; local, elementwise, in one pass.

    Elements outside all segments are neither read nor written. Non-finite gradients spoil their
    weights, as in torch: check :func:`sum_of_squares` first, or give ``found_inf``. The native
    kernel allocates nothing; the fallback allocates some chunks of 64 KiB, on a device of 32 MiB.

    On CUDA the kernel is one launch on the current stream and nothing waits for it. A graph that
    captured it would repeat this step's constants.

    Args:
        buffers: What to update.
        hyper: Hyperparameters of all elements; or segments in rising order, gaps allowed.
        step: This step, counted from 1.
        grad_scale: Factor of the gradient, rounded to fp32: one over the loss scale, times the
            clipping coefficient. A number, or a ``()`` fp32 tensor on the buffers' device, which
            the kernel reads there.
        found_inf: ``()`` fp32 on the buffers' device; nothing changes unless it is zero. The
            fallback waits for it.
        flush_denormals: Read and write subnormal numbers, which are up to 40 times slower on a CPU,
            as zero; the caller's own mode is left as it is. The fallback on CUDA keeps them.
        num_threads: Threads of the native kernel on a CPU; by default ``torch.get_num_threads()``.
            Small buffers use fewer.

    Raises:
        ValueError: A segment lies outside the buffers or before its predecessor's end, ``step`` or
            ``num_threads`` is not positive, or a tensor is not an fp32 scalar on the buffers'
            device.
        RuntimeError: CUDA refuses the launch.
    """
    kernel = AdamKernel(
        buffers.weight.device,
        grad_scale=grad_scale,
        found_inf=found_inf,
        flush_denormals=flush_denormals,
        num_threads=num_threads,
    )
    kernel(buffers, hyper, step=step)


@torch.no_grad()
def late_adam_step(
    buffers: AdamBuffers,
    segments: Sequence[LateSegment],
    *,
    grad_scale: float | torch.Tensor = 1.0,
    found_inf: torch.Tensor | None = None,
    flush_denormals: bool = True,
) -> None:
    """Count and make a step of each segment; the host reads nothing, so a graph may capture it.

    Only on devices with a CUDA kernel. A first launch counts and computes the constants, and the
    second is that of :func:`adam_step`; unless ``found_inf`` is zero, nothing is counted either.

    Args:
        buffers: As for :func:`adam_step`, like the following.
        segments: In rising order; empty ones anywhere.
        grad_scale: A number, or a ``()`` fp32 tensor on the buffers' device.
        found_inf: ``()`` fp32 on the buffers' device.
        flush_denormals: Read and write subnormal numbers, also in constants, as zero.

    Raises:
        ValueError: As :func:`adam_step`.
        RuntimeError: CUDA refuses the launch.
    """
    device = buffers.weight.device
    module = cuda_kernels.usable_module(device)
    assert module is not None, "callers look for the kernel"
    _check_scalars(device, grad_scale=grad_scale, found_inf=found_inf)
    # A rank without rows may have empty segments anywhere; their steps are counted all the same.
    empty = [s for s in segments if s.start == s.stop]
    filled = [s for s in segments if s.start < s.stop]
    _check_segments([AdamSegment(s.start, s.stop, s.hyper) for s in filled], buffers.weight.numel())
    table = [(0, 0, AdamConstants.rounded(s.hyper, 1)) for s in empty]
    table += [(s.start, s.stop, AdamConstants.rounded(s.hyper, 1)) for s in filled]
    is_tensor = isinstance(grad_scale, torch.Tensor)
    cuda_kernels.launch_adam_step(
        module,
        {
            **_native_arguments(buffers, table),
            "grad_scale": 1.0 if is_tensor else round_to_fp32(float(grad_scale)),
            "flush_denormals": flush_denormals,
        },
        device,
        grad_scale=grad_scale if isinstance(grad_scale, torch.Tensor) else None,
        found_inf=found_inf,
        late=[_late_arguments(s) for s in (*empty, *filled)],
    )


def _late_arguments(segment: LateSegment) -> cuda_kernels.LateParameter:
    hyper, lr = segment.hyper, segment.lr
    numbers = (hyper.lr, *hyper.betas, hyper.weight_decay)
    flags = (hyper.adam_w_mode, hyper.bias_correction)
    return segment.step.data_ptr(), 0 if lr is None else lr.data_ptr(), numbers, flags


class AdamKernel:
    """Run :func:`adam_step` on many buffers of one device; the kernel is chosen once.

    Args:
        device: Where the buffers are.
        grad_scale: As for :func:`adam_step`, like the following.
        found_inf: Read by the kernel on the device, or by the host at each call.
        flush_denormals: Read and write subnormal numbers as zero.
        num_threads: Threads on a CPU.

    Raises:
        ValueError: As for :func:`adam_step`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        grad_scale: float | torch.Tensor = 1.0,
        found_inf: torch.Tensor | None = None,
        flush_denormals: bool = True,
        num_threads: int | None = None,
    ) -> None:
        # Read here, not at each call: the number is a per-thread setting, and a worker thread may
        # call the kernel.
        num_threads = torch.get_num_threads() if num_threads is None else num_threads
        check_positive("num_threads", num_threads)
        _check_scalars(device, grad_scale=grad_scale, found_inf=found_inf)
        self._grad_scale, self._flushes = grad_scale, flush_denormals
        self._run = _compiled(device, grad_scale, found_inf, flush_denormals, num_threads)
        # The CUDA kernel reads the flag on the device; otherwise the host reads it before a call.
        is_read_there = self._run is not None and device.type != "cpu"
        self._found_inf = None if is_read_there else found_inf

    def __call__(
        self, buffers: AdamBuffers, hyper: AdamHyper | Sequence[AdamSegment], *, step: int
    ) -> None:
        """Update weights and moments, in place or out of place.

        Raises:
            ValueError: As for :func:`adam_step`.
            RuntimeError: As for :func:`adam_step`.
        """
        numel = buffers.weight.numel()
        segments = [AdamSegment(0, numel, hyper)] if isinstance(hyper, AdamHyper) else hyper
        check_positive("step", step)
        _check_segments(segments, numel)
        table = [(s.start, s.stop, AdamConstants.rounded(s.hyper, step)) for s in segments]
        # item() waits for the device: it is called only if no kernel reads the flag there.
        if numel == 0 or (self._found_inf is not None and self._found_inf.item() != 0):
            return
        if self._run is None:
            self._run_in_torch(buffers, table)
        elif buffers.exp_avg.dtype == buffers.exp_avg_sq.dtype:
            self._run(**_native_arguments(buffers, table))
        else:
            _step_through_fp32(buffers, table, self._run)

    def _run_in_torch(
        self, buffers: AdamBuffers, table: Sequence[tuple[int, int, AdamConstants]]
    ) -> None:
        scale, device = self._grad_scale, buffers.weight.device
        scale = scale if isinstance(scale, torch.Tensor) else round_to_fp32(scale)
        with torch.no_grad(), reference.denormal_mode(self._flushes):
            # The kernels flush all that they read, also constants; torch flushes only tensors.
            for start, stop, constants in table:
                taken = constants.flushed() if self._flushes else constants
                # In chunks that torch runs on this thread: the flushing mode is per thread.
                for chunk in reference.chunks(start, stop, device):
                    _step_in_torch(buffers, chunk, taken, scale)


def _compiled(
    device: torch.device,
    grad_scale: float | torch.Tensor,
    found_inf: torch.Tensor | None,
    flush_denormals: bool,
    num_threads: int,
) -> Callable[..., None] | None:
    """Return a function that calls the compiled kernel of a device; None if there is none."""
    # Chosen once for many buffers: looking for a kernel takes as long as a small step.
    cuda = cuda_kernels.usable_module(device)
    if cuda is not None:
        # The kernel reads a tensor scale when it runs: the host need not wait for the norm.
        on_device = grad_scale if isinstance(grad_scale, torch.Tensor) else None
        on_host = 1.0 if isinstance(grad_scale, torch.Tensor) else round_to_fp32(grad_scale)
        options = {"grad_scale": on_host, "flush_denormals": flush_denormals}
        return lambda **arguments: cuda_kernels.launch_adam_step(
            cuda, arguments | options, device, grad_scale=on_device, found_inf=found_inf
        )
    # On a CPU the native kernel takes numbers, so a scale tensor is read below, without a wait.
    native = native_module() if device.type == "cpu" else None
    if native is None:
        return None
    # Rounded here: all kernels and the fallback multiply by the same number.
    scale = round_to_fp32(float(grad_scale))
    return functools.partial(
        native.adam_step,
        grad_scale=scale,
        flush_denormals=flush_denormals,
        num_threads=num_threads,
    )


def _native_arguments(
    buffers: AdamBuffers, table: Sequence[tuple[int, int, AdamConstants]]
) -> dict[str, Any]:
    """Return the kernel arguments for buffers and segments; keep the buffers alive meanwhile."""
    return {
        "weight": buffers.weight.data_ptr(),
        "grad": buffers.grad.data_ptr(),
        "exp_avg": buffers.exp_avg.data_ptr(),
        "exp_avg_sq": buffers.exp_avg_sq.data_ptr(),
        "remainder": _address_of(buffers.remainder),
        "copy_out": _address_of(buffers.copy_out),
        "numel": buffers.weight.numel(),
        "grad_dtype": DTYPE_NAMES[buffers.grad.dtype],
        "state_dtype": DTYPE_NAMES[buffers.exp_avg.dtype],
        "copy_out_dtype": "" if buffers.copy_out is None else DTYPE_NAMES[buffers.copy_out.dtype],
        "segments": [(start, stop, constants) for start, stop, constants in table],
        # The CUDA kernel lacks these arguments, and never gets such buffers.
        **{name: getattr(buffers, name).data_ptr() for name in buffers.new_names()},
    }


@torch.no_grad()
def _step_through_fp32(
    buffers: AdamBuffers,
    table: Sequence[tuple[int, int, AdamConstants]],
    call: Callable[..., None],
) -> None:
    """Step moments of two dtypes, which the kernels do not support, in chunks."""
    for start, stop, constants in table:
        for first in range(start, stop, _WIDE_NUMEL):
            part = buffers.narrow(first, min(first + _WIDE_NUMEL, stop))
            # Chunks bound the fp32 copies: whole buffers would double the memory of the states.
            wide = dataclasses.replace(
                part, exp_avg=part.exp_avg.float(), exp_avg_sq=part.exp_avg_sq.float()
            )
            call(**_native_arguments(wide, [(0, wide.weight.numel(), constants)]))
            part.exp_avg.copy_(wide.exp_avg)
            part.exp_avg_sq.copy_(wide.exp_avg_sq)


def _step_in_torch(
    buffers: AdamBuffers,
    chunk: slice,
    constants: AdamConstants,
    scale: float | torch.Tensor,
) -> None:
    stored = buffers.weight[chunk]
    low = None if buffers.remainder is None else buffers.remainder[chunk]
    weight, *moments = reference.update(
        stored if low is None else reference.join_weights(stored, low),
        buffers.grad[chunk].float() * scale,
        buffers.exp_avg[chunk].float(),
        buffers.exp_avg_sq[chunk].float(),
        constants,
    )
    # Nothing is written before all three are computed: in place, the outputs are the inputs.
    into_weight, *into_moments = (output[chunk] for output in buffers.outputs)
    into_moments[0].copy_(moments[0])
    into_moments[1].copy_(moments[1])
    if low is None:
        into_weight.copy_(weight)
        if buffers.copy_out is not None:
            buffers.copy_out[chunk].copy_(weight)
    else:
        # Plain NaNs first: rounding the bits of a NaN with a payload could give infinity or zero.
        high, rest = reference.fp32_to_halves(reference.plain_nans(weight))
        stored.copy_(high)
        low.copy_(rest)


def _address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def check_positive(name: str, number: int) -> None:
    """Check a count.

    Raises:
        ValueError: It is below 1.
    """
    if number < 1:
        raise ValueError(expected("a positive number", number, where=name, hint="Count from 1"))


def check_flat(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    *,
    numel: int,
    device: torch.device,
) -> None:
    """Check a buffer of a kernel.

    Args:
        name: Name of the argument, for the message.
        tensor: The buffer.
        dtypes: Dtypes that it may have.
        numel: Elements that it must have.
        device: Where it must be.

    Raises:
        ValueError: It is not flat, contiguous, of this length, dtype and device.
    """
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
                hint="Pass views of flat buffers with one element for each weight",
            )
        )


def _check_scalars(device: torch.device, **scalars: object) -> None:
    for name, scalar in scalars.items():
        if not isinstance(scalar, torch.Tensor):
            continue
        # Checked, as the kernel reads four bytes at the address.
        if scalar.shape != () or scalar.dtype != torch.float32 or scalar.device != device:
            raise ValueError(
                expected(
                    f"a scalar tensor, torch.float32 on {device}",
                    f"shape {tuple(scalar.shape)}, {scalar.dtype} on {scalar.device}",
                    where=f"{name} of adam_step()",
                    hint="Compute it where the buffers are",
                )
            )


def _check_segments(segments: Sequence[AdamSegment], numel: int) -> None:
    # Elements of two segments would be stepped twice, maybe by two threads at once.
    end = 0
    for i, segment in enumerate(segments):
        if not end <= segment.start <= segment.stop <= numel:
            raise ValueError(
                expected(
                    f"{end} <= start <= stop <= {numel}",
                    f"start {segment.start}, stop {segment.stop}",
                    where=f"segment {i} of adam_step()",
                    hint="Give segments in rising order, inside the buffers, without overlap",
                )
            )
        end = segment.stop

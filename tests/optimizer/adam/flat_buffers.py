"""Flat buffers for the tests of Adam's kernels: all layouts, guarded on both sides."""

from __future__ import annotations

import dataclasses

import torch

from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers
from megafsdp.optimizer.kernels.hyper import AdamHyper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HYPER = AdamHyper(1e-2, (0.9, 0.95), 1e-8, 0.1)
L2_HYPER = dataclasses.replace(HYPER, adam_w_mode=False)
# Gradient, states, weights: how they are stored, and what is copied out.
LAYOUTS = [
    (grad_dtype, state_dtype, master)
    for grad_dtype in (FP32, BF16, FP16)
    for state_dtype in (FP32, BF16)
    for master in ("fp32", "fp32 to bf16", "fp32 to fp16", "halves")
]
# Elements on both sides; addresses are then aligned to elements alone, or to vectors.
GUARD = 3
ALIGNED_GUARD = 64


def values_of(numel: int, dtype: torch.dtype, seed: int, spread: int = 8) -> torch.Tensor:
    """Return normal values times powers of two."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator) * 2.0**exponents
    return values.to(dtype)


def guarded(
    values: torch.Tensor, guard: int = GUARD, device: torch.device | None = None
) -> torch.Tensor:
    """Return a copy, on another device if one is given, with poison on both sides."""
    shape = (values.numel() + 2 * guard,)
    whole = torch.empty(shape, dtype=values.dtype, device=device or values.device)
    whole.view(torch.uint8).fill_(0x7F)
    whole[guard:-guard] = values
    return whole[guard:-guard]


def make_buffers(
    numel: int, layout: tuple[torch.dtype, torch.dtype, str] = (FP32, FP32, "fp32")
) -> AdamBuffers:
    """Return guarded buffers of a layout."""
    grad_dtype, state_dtype, master = layout
    copy_dtype = {"fp32 to bf16": BF16, "fp32 to fp16": FP16}.get(master)
    has_halves = master == "halves"
    low = torch.randint(-(2**15), 2**15, (numel,), generator=torch.Generator().manual_seed(5))
    return AdamBuffers(
        weight=guarded(values_of(numel, BF16 if has_halves else FP32, seed=1)),
        grad=guarded(values_of(numel, grad_dtype, seed=2)),
        exp_avg=guarded(values_of(numel, state_dtype, seed=3)),
        exp_avg_sq=guarded(values_of(numel, state_dtype, seed=4).abs()),
        remainder=guarded(low.to(torch.int16)) if has_halves else None,
        copy_out=guarded(torch.zeros(numel, dtype=copy_dtype)) if copy_dtype else None,
    )


def spread_subnormals(buffers: AdamBuffers) -> None:
    """Put numbers around the smallest normal one everywhere, in place; 4096 elements."""
    near = 2.0 ** torch.linspace(-160, -120, 4096, dtype=torch.float64)
    buffers.exp_avg.copy_(near)
    buffers.exp_avg_sq.copy_(near.flip(0))
    buffers.grad.copy_(torch.where(torch.arange(4096) % 3 == 0, near, 0.0))
    buffers.weight[:2048].copy_(near[2048:])


def tensors_of(buffers: AdamBuffers) -> dict[str, torch.Tensor]:
    """Return the tensors that are there."""
    named = {f.name: getattr(buffers, f.name) for f in dataclasses.fields(buffers)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def copy_of(
    buffers: AdamBuffers, guard: int = GUARD, device: torch.device | None = None
) -> AdamBuffers:
    """Return guarded copies."""
    return AdamBuffers(**{n: guarded(t, guard, device) for n, t in tensors_of(buffers).items()})


def assert_same_bits(left: AdamBuffers, right: AdamBuffers) -> None:
    """Compare bytes, except that any NaN equals any other."""
    for name, mine in tensors_of(left).items():
        wanted = tensors_of(right)[name]
        if mine.dtype.is_floating_point:
            assert torch.equal(mine.isnan(), wanted.isnan()), name
            mine, wanted = (torch.where(t.isnan(), torch.zeros_like(t), t) for t in (mine, wanted))
        assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8)), name


def assert_guards_hold(buffers: AdamBuffers, guard: int = GUARD) -> None:
    """Check that nothing beside the elements was written."""
    for name, tensor in tensors_of(buffers).items():
        nbytes = tensor.untyped_storage().nbytes()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage(), 0, (nbytes,))
        edge = guard * tensor.element_size()
        assert (whole[:edge] == 0x7F).all() and (whole[-edge:] == 0x7F).all(), name

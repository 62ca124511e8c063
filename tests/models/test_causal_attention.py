"""Causal attention: equal to the naive formula in every dtype, in fp32 where that is faster."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp.models.causal_attention import attend_to_end, causal_attention
from megafsdp.parallel import Documents


class _DtypesOfKernels(TorchDispatchMode):
    """Note in which dtype attention kernels run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run the operator."""
        if func._schema.name.startswith("aten::_scaled_dot_product"):
            self.found.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _inputs(dtype: torch.dtype, length: int, num_groups: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 8) for heads in (4, num_groups, num_groups)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _attend_naively(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax of masked, scaled products, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    num_before = k.shape[2] - q.shape[2]
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + num_before)
    return scores.masked_fill(is_later, -math.inf).softmax(-1) @ v


def _check(output: Tensor, wanted: Tensor, inputs: list[Tensor], copies: list[Tensor]) -> None:
    """Compare outputs, then the gradients of both sides' inputs."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    for side in (output.float(), wanted):
        (side * weights.to(side.device)).sum().backward()
    # A unit in the last place of numbers below 4; sums of gradients over 33 places below 8.
    unit = 4 * torch.finfo(output.dtype).eps
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=unit)
    for own, copy in zip(inputs, copies, strict=True):
        assert own.grad is not None and copy.grad is not None
        torch.testing.assert_close(own.grad.double(), copy.grad.double(), rtol=0, atol=4 * unit)


@pytest.mark.parametrize("num_groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_naive_formula(dtype: torch.dtype, num_groups: int) -> None:
    """Output and gradients, with as many key heads as query heads and with fewer."""
    inputs = _inputs(dtype, 33, num_groups)
    copies = [t.detach().clone().requires_grad_() for t in inputs]
    output, wanted = causal_attention(*inputs), _attend_naively(*copies)
    assert output.dtype == dtype
    _check(output, wanted, inputs, copies)


@pytest.mark.parametrize("num_queries", [1, 8, 24])
@pytest.mark.parametrize("num_groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_last_queries_see_all_before_them(
    device: str, dtype: torch.dtype, num_groups: int, num_queries: int
) -> None:
    """A part of a sequence's queries, with all keys up to the last of them."""
    q, k, v = (t.detach().to(device) for t in _inputs(dtype, 24, num_groups))
    inputs = [t.requires_grad_() for t in (q[:, :, -num_queries:], k, v)]
    copies = [t.detach().clone().requires_grad_() for t in inputs]
    output, wanted = attend_to_end(*inputs), _attend_naively(*copies)
    _check(output, wanted, inputs, copies)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_attend_by_themselves(device: str, dtype: torch.dtype) -> None:
    """With the values and gradients of the naive formula on each."""
    lengths = [[1, 9, 14], [24]]
    inputs = [t.detach().to(device).requires_grad_() for t in _inputs(dtype, 24, 2)]
    copies = [t.detach().clone().requires_grad_() for t in inputs]
    output = causal_attention(*inputs, documents=Documents(lengths))
    rows = []
    for row, of_row in enumerate(lengths):
        pieces = zip(*(t[row : row + 1].split(of_row, dim=2) for t in copies), strict=True)
        rows.append(torch.cat([_attend_naively(*piece) for piece in pieces], dim=2))
    _check(output, torch.cat(rows), inputs, copies)
    with pytest.raises(ValueError, match=r"2 rows.*a sum of 24, got \[\[24\], \[25\]\]"):
        causal_attention(*inputs, documents=Documents([[24], [25]]))


@pytest.mark.parametrize(
    ("dtype", "length", "wanted"),
    [
        (torch.bfloat16, 256, torch.float32),
        (torch.bfloat16, 257, torch.bfloat16),
        (torch.float16, 257, torch.float32),
        (torch.float32, 16, torch.float32),
    ],
)
def test_runs_in_the_faster_dtype(dtype: torch.dtype, length: int, wanted: torch.dtype) -> None:
    """On a CPU short sequences of bf16, and fp16, are computed in fp32."""
    inputs = _inputs(dtype, length, 2)
    with _DtypesOfKernels() as kernels:
        causal_attention(*inputs).sum().backward()
    assert len(kernels.found) == 2  # Forward and backward.
    assert set(kernels.found) == {wanted}

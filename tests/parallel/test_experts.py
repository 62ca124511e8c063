"""Stacks of experts: products against a loop, initial values, the cut by ep, what is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.mesh.torch_private import local_of
from megafsdp.parallel import GroupedExperts, GroupedLinear, Linear, parallelize
from megafsdp.parallel import experts as experts_module
from megafsdp.parallel.experts import multiply_in_groups, multiply_in_loop, reason_for_loop
from tests.ranks import Ranks

# Experts without rows at either end and between, one with all rows, and no rows at all.
_LOADS = ([3, 0, 5, 2], [0, 4, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1])


def _product(multiply: Any, loads: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(loads), 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(loads), 24, 16, generator=generator).to(dtype).requires_grad_()
    out = multiply(x, weight, torch.tensor(loads))
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), grad))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch without grouped_mm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loads", _LOADS, ids=str)
def test_the_grouped_product_equals_the_loop(loads: list[int], dtype: torch.dtype) -> None:
    """Output and both gradients; an expert without rows gets a gradient of zeros."""
    found = _product(multiply_in_groups, loads, dtype)
    wanted = _product(multiply_in_loop, loads, dtype)
    # Sums of up to 24 products, in another order at most.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for expert, load in enumerate(loads):
        assert load or not found[2][expert].any()


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch without grouped_mm")
@pytest.mark.parametrize("loads", _LOADS, ids=str)
def test_inputs_and_gradients_may_be_expanded(loads: list[int]) -> None:
    """As the gradient of a sum is, of rows and of none."""
    results = []
    for multiply in (multiply_in_groups, multiply_in_loop):
        row = torch.linspace(-1, 1, 16, requires_grad=True)
        weight = torch.linspace(-1, 1, 4 * 24 * 16).view(4, 24, 16).requires_grad_()
        out = multiply(row.expand(sum(loads), 16), weight, torch.tensor(loads))
        results.append((out, *torch.autograd.grad(out.sum(), (row, weight))))
    for got, expected in zip(*results, strict=True):
        # Sums of up to 240 products, in another order at most.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loads", _LOADS, ids=str)
def test_the_loop_equals_products_row_by_row(loads: list[int]) -> None:
    """In fp64, which torch's grouped product does not take."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(loads), 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(loads), 24, 16, generator=generator, dtype=torch.float64)
    rows = [e for e, load in enumerate(loads) for _ in range(load)]
    wanted = torch.einsum("ri,roi->ro", x, weight[rows])
    found = multiply_in_loop(x, weight, torch.tensor(loads))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_experts_equal_the_naive_formula(dtype: torch.dtype) -> None:
    """SwiGLU with gate rows first, row by row, with the gradients of both stacks."""
    torch.manual_seed(0)
    layer = GroupedExperts(3, 8, 12, init_std=0.5).to(dtype)
    first, second = layer.linear_fc1.weight, layer.linear_fc2.weight
    x = torch.randn(7, 8, dtype=dtype)
    expert_of_row = [0, 0, 2, 2, 2, 2, 2]

    def naive(first: Tensor, second: Tensor) -> Tensor:
        rows = []
        for row, expert in zip(x, expert_of_row, strict=True):
            gate, up = first[expert][:12] @ row, first[expert][12:] @ row
            rows.append(second[expert] @ (gate * gate.sigmoid() * up))
        return torch.stack(rows)

    out = layer(x, torch.tensor([2, 0, 5]))
    wanted = naive(first, second)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    # The gradient of a sum is expanded.
    found = torch.autograd.grad(out.sum(), (first, second))
    for got, expected in zip(
        found, torch.autograd.grad(wanted.sum(), (first, second)), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_experts_compute_in_the_dtype_of_their_weights() -> None:
    """A policy may keep them in fp32; the result has the dtype of the input."""
    layer = GroupedLinear(2, 8, 8)
    x = torch.randn(3, 8).to(torch.bfloat16)
    out = layer(x, torch.tensor([1, 2]))
    wanted = multiply_in_loop(x.float(), layer.weight, torch.tensor([1, 2]))
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted.to(torch.bfloat16))


def test_a_loop_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Strides and dtypes that the grouped product refuses, with the reason, and never raised."""
    experts_module._log_loop.cache_clear()
    odd = GroupedLinear(2, 5, 7)
    with caplog.at_level(logging.WARNING, logger="megafsdp.parallel"):
        for layer in (odd, odd, GroupedLinear(3, 5, 7)):
            layer(torch.ones(3, 5), torch.tensor([1, 2, 0][: layer.num_experts]))
    (record,) = caplog.records
    assert "matrices (7, 5) of torch.float32" in record.message
    assert reason_for_loop(torch.empty(2, 8, 8, dtype=torch.float64)) == "torch.float64 on cpu"
    for sizes in ((8, 4), (4, 8)):
        assert reason_for_loop(torch.empty(2, *sizes, dtype=torch.bfloat16)) is not None
    if hasattr(F, "grouped_mm"):
        assert reason_for_loop(torch.empty(2, 8, 8, dtype=torch.bfloat16)) is None


def test_without_a_grouped_product_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an older torch."""
    layer, load = GroupedLinear(2, 8, 8), torch.tensor([1, 2])
    x = torch.randn(3, 8)
    wanted = layer(x, load)
    monkeypatch.delattr(F, "grouped_mm", raising=False)
    assert "without" in str(reason_for_loop(layer.weight))
    torch.testing.assert_close(layer(x, load), wanted)


def _cut_experts(tp: int, ep: int) -> None:
    meshes = ParallelDims(dp_shard=2 // tp, tp=tp, ep=ep).build("cpu")
    torch.manual_seed(0)
    wanted = GroupedExperts(4, 8, 12, sequence_parallel=True)
    torch.manual_seed(0)
    layer = parallelize(GroupedExperts(4, 8, 12, sequence_parallel=True), meshes)
    with torch.device("meta"):
        late = parallelize(GroupedExperts(4, 8, 12, sequence_parallel=True), meshes)
    late.to_empty(device="cpu")
    torch.manual_seed(0)
    late.linear_fc1.reset_parameters()
    late.linear_fc2.reset_parameters()
    for cut in (layer, late):
        for name, whole in wanted.named_parameters():
            parameter = cut.get_parameter(name)
            annotation = annotation_of(parameter)
            assert annotation.is_expert and annotation.fused == annotation_of(whole).fused
            if ep == 1:
                # The ranks of tp divide them as data ranks do.
                assert type(parameter) is nn.Parameter and torch.equal(parameter, whole)
                continue
            assert meshes.ep is not None and isinstance(parameter, DTensor)
            assert parameter.device_mesh == meshes.ep and parameter.placements == (Shard(0),)
            assert parameter.shape == whole.shape
            own = whole.chunk(2)[meshes.ep.get_local_rank()]
            assert torch.equal(local_of(parameter), own)
    if ep == 1:
        return
    assert meshes.ep is not None
    rank, x, loads = meshes.ep.get_local_rank(), torch.randn(5, 8), torch.tensor([2, 3])
    layer(x, loads).square().sum().backward()
    # The whole stack computes the same if no other expert gets a row.
    wanted(x, F.pad(loads, (2 * rank, 2 - 2 * rank))).square().sum().backward()
    for name, whole in wanted.named_parameters():
        grad = layer.get_parameter(name).grad
        assert isinstance(grad, DTensor) and grad.placements == (Shard(0),)
        assert whole.grad is not None and grad.shape == whole.shape
        assert torch.equal(local_of(grad), whole.grad.chunk(2)[rank]) and whole.grad.any()


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (2, 2), (2, 1)])
def test_ep_gives_each_rank_its_experts_of_a_whole_draw(ranks: Ranks, tp: int, ep: int) -> None:
    """Values and gradients are those of one process, also from the meta device; tp cuts none."""
    ranks(2).run(_cut_experts, tp, ep)


def _refuse_twice() -> None:
    meshes = ParallelDims(ep=2).build("cpu")
    layer = parallelize(GroupedExperts(4, 8, 12), meshes)
    with pytest.raises(RuntimeError, match="got a second call"):
        parallelize(layer, meshes)
    sharded = torch_fully_shard(GroupedExperts(4, 8, 12), mesh=meshes.data)
    with pytest.raises(RuntimeError, match="got the unit '' of fully_shard"):
        parallelize(sharded, meshes)


def test_experts_are_cut_once(ranks: Ranks) -> None:
    """A second cut would give a rank a part of its part, and one after sharding parts of rows."""
    ranks(2).run(_refuse_twice)


def test_what_ep_cannot_cut_is_refused() -> None:
    """Before anything is changed: degrees, models without experts, tokens that tp ranks repeat."""
    meshes: Any = SimpleNamespace(tp=None, ep=SimpleNamespace(size=lambda: 3))
    layer = GroupedExperts(4, 8, 12)
    with pytest.raises(ValueError, match="divides 4 experts, got 3"):
        parallelize(layer, meshes)
    with pytest.raises(ValueError, match="a model with stacks of experts, got Linear"):
        parallelize(Linear(4, 4), meshes)
    meshes.ep.size, meshes.tp = (lambda: 2), SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match="experts with sequence parallelism, got 2 ranks of tp"):
        parallelize(layer, meshes)
    meshes.ep = None
    with pytest.raises(ValueError, match="experts with sequence parallelism"):
        parallelize(layer, meshes)
    assert all(type(p) is nn.Parameter and p.shape[0] == 4 for p in layer.parameters())

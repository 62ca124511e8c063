"""The plain tensor of a parameter: identity, memory, requires_grad, gradients."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megafsdp.mesh.torch_private import local_of
from megafsdp.parallel import Linear, ParallelModule, localized
from tests.parallel.cases import mesh_of
from tests.ranks import Ranks


def test_a_plain_parameter_is_returned_itself() -> None:
    """No view of it either: what a kernel saves is the parameter."""
    weight = nn.Parameter(torch.ones(2))
    assert localized(weight) is weight
    assert localized(weight, sums_over_tp=True) is weight


class _Coded(Tensor):
    """A local tensor of a subclass, as quantized weights are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def _check_subclass() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for requires_grad in (True, False):
        coded = torch.ones(2, 3).as_subclass(_Coded)
        dtensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        weight = nn.Parameter(dtensor, requires_grad=requires_grad)
        # Parameter() detaches, which a subclass without kernels of its own does not survive.
        weight._local_tensor = coded  # type: ignore[attr-defined]
        for step in range(2):
            own = localized(weight)
            assert own is local_of(weight) and own.requires_grad is requires_grad
            if not requires_grad:
                continue
            (own * (step + 1)).sum().backward()
            assert isinstance(weight.grad, DTensor) and weight.grad.placements == (Shard(0),)
            assert torch.equal(weight.grad.to_local(), torch.full((2, 3), step + 1.0))
            weight.grad = None


def test_a_local_tensor_of_a_subclass_is_returned_itself(ranks: Ranks) -> None:
    """Whoever refreshes it in place is then seen by what backward has saved."""
    ranks(2).run(_check_subclass)


class _Keeping(ParallelModule):
    """A layer that shows what its kernel was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(4, 4, bias=False, parallel_mode="column", init_std=1.0)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the local weight and keep it."""
        weight = localized(self.linear.weight)
        assert weight.data_ptr() == local_of(self.linear.weight).data_ptr()
        assert weight.requires_grad and type(weight) is Tensor
        self.seen.append(weight)
        return F.linear(x, weight).sin()


def _train_two_steps() -> None:
    data, tp = mesh_of(2, 2)
    torch.manual_seed(0)
    layer = _Keeping()
    plain = layer.linear.weight.detach().clone().requires_grad_()
    layer.set_device_mesh(tp_mesh=tp)
    torch_fully_shard(layer, mesh=data, reshard_after_forward=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    wanted_optimizer = torch.optim.SGD([plain], lr=0.1)
    for step in range(2):
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step))
        own = x.chunk(2)[data.get_local_rank()]
        layer(own).sum().backward()
        (F.linear(x, plain).sin().sum() / 2).backward()
        grad = layer.linear.weight.grad
        assert isinstance(grad, DTensor) and grad.placements == layer.linear.weight.placements
        # Sums of a few fp32 products in another order.
        torch.testing.assert_close(grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-6)
        for each in (optimizer, wanted_optimizer):
            each.step()
            each.zero_grad()
    # What the first iteration was given is what a reference kept from it reads in the second.
    first, second = layer.seen
    assert first.data_ptr() == second.data_ptr()


def test_backward_reads_the_weight_gathered_again(ranks: Ranks) -> None:
    """Freed after forward, gathered for backward, over two steps between which it changes."""
    ranks(4).run(_train_two_steps)


def _grad_placements() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1), Replicate()):
        sums = (False, True) if placement == Replicate() else (False,)
        for is_sum, is_coded in itertools.product(sums, (False, True)):
            own = DTensor.from_local(torch.ones(2, 2), mesh, [placement], run_check=False)
            weight = nn.Parameter(own)
            if is_coded:
                weight._local_tensor = torch.ones(2, 2).as_subclass(_Coded)  # type: ignore[attr-defined]
            factor = mesh.get_local_rank() + 1 if is_sum else 3
            (localized(weight, sums_over_tp=is_sum) * factor).sum().backward()
            assert isinstance(weight.grad, DTensor)
            assert weight.grad.placements == ((Partial(),) if is_sum else (placement,))
            assert torch.equal(weight.grad.full_tensor(), torch.full(weight.shape, 3.0))


def test_gradients_are_placed_as_the_parameter_or_as_addends(ranks: Ranks) -> None:
    """An addend of a sum over tp says so, in the form that torch's engines read."""
    ranks(2).run(_grad_placements)

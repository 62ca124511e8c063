"""Functions of parameters, gradients and averages under ``torch.compile``, against eager ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from megafsdp import fully_shard
from megafsdp.buffer.dtensor.busy_memory import register_writer, unregister_writer
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor, local_tensor
from tests.buffer.cuts import cut, whole_mesh
from tests.ranks import Ranks

# The tracer asks every input for .grad, and torch warns where it is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
TRACED = pytest.mark.skipif(IS_DISPATCH_BYPASSED, reason="torch 2.11 traces no rules of ours")
UNEVEN: dict[str, object] = {"strategy": "optim_grads_params"}
WAYS: list[dict[str, object]] = [UNEVEN, {"strategy": "no_shard"}, {"even_shards": True}]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _average(averages: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    torch._foreach_lerp_(list(averages), list(parameters), 0.25)


def _step(
    parameter: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    momentum.lerp_(grad, 0.1)
    parameter.sub_(momentum, alpha=0.5)
    return momentum.square(), parameter


def _net(options: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Linear(5, 7), **options)


def _trains(options: dict[str, object], compile_: Callable[..., Callable[..., Any]]) -> nn.Module:
    net, draws = _net(options), torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(3, 5, generator=draws)
    step, average = compile_(_step), compile_(_average)
    momenta = [torch.zeros_like(p) for p in net.parameters()]
    averages = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        net.zero_grad()
        net(batch).square().sum().backward()
        with torch.no_grad():
            for parameter, momentum in zip(net.parameters(), momenta, strict=True):
                square, stepped = step(parameter, parameter.grad, momentum)
                assert stepped is parameter
                assert type(square) is type(momentum)
                assert torch.equal(square, momentum.square())
            average(averages, list(net.parameters()))
    with torch.no_grad():
        for parameter, mean in zip(net.parameters(), averages, strict=True):
            parameter.add_(mean)
    # It gathers what graphs have written.
    net(batch).square().sum().backward()
    return net


def _functions_have_the_bits_of_eager_ones() -> None:
    for options in WAYS:
        torch._dynamo.reset()
        eager, traced = (_trains(options, each) for each in (lambda f: f, _compiled))
        for wanted, found in zip(eager.parameters(), traced.parameters(), strict=True):
            assert torch.equal(full_tensor(found.detach()), full_tensor(wanted.detach()))
            assert torch.equal(full_tensor(found.grad), full_tensor(wanted.grad))
    torch._dynamo.reset()


@TRACED
def test_compiled_steps_and_averages_have_the_bits_of_eager_ones(ranks: Ranks) -> None:
    """In one graph each, of sharded and replicated parameters and of what units leave in grad."""
    ranks(2).run(_functions_have_the_bits_of_eager_ones)


def _graphs_know_the_cuts() -> None:
    torch._dynamo.reset()
    # Rank 1 has four rows of both, the second from its third row on.
    full = torch.arange(55.0).view(11, 5)
    first, second = (cut(full, whole_mesh(), skipped=n, shard_rows=4) for n in (0, 1))
    assert first.local.shape == second.local.shape or dist.get_rank() != 1
    double = _compiled(lambda x: x * 2)
    for rows in (first, second, first):
        found = double(rows)
        assert isinstance(found, UnevenDTensor)
        assert found.uneven_layout == rows.uneven_layout
        assert torch.equal(found.full_tensor(), rows.full_tensor() * 2)
    pick = _compiled(lambda x: x[4] * 1)
    for rows in (first, second):
        found = pick(rows)
        assert isinstance(found, UnevenDTensor)
        assert torch.equal(found.full_tensor(), rows.full_tensor()[4])
    add = _compiled(lambda x, y: x + y)
    assert torch.equal(add(first, first).full_tensor(), first.full_tensor() * 2)
    with pytest.raises(Exception, match="operands cut like the first"):
        add(first, second)
    torch._dynamo.reset()


@TRACED
def test_a_graph_of_one_layout_does_not_run_for_another(ranks: Ranks) -> None:
    """Of equal global and local shapes; nor for operands that are cut in different ways."""
    ranks(3).run(_graphs_know_the_cuts)


def _collectives_end_graphs() -> None:
    torch._dynamo.reset()
    for options in WAYS:
        weight = _net(options).weight
        wanted = weight.detach().full_tensor() * 2
        whole_of = torch.compile(lambda p: p.full_tensor() * 2, backend="aot_eager")
        assert torch.equal(whole_of(weight.detach()), wanted)
        rows = _compiled(lambda p: p.to_local() * 2)
        assert torch.equal(rows(weight.detach()), weight.detach().to_local() * 2)
        norm = _compiled(lambda p: p.norm() * 1)
        found = norm(weight.detach())
        assert isinstance(found, DTensor)
        found = found.redistribute(placements=[Replicate()] * found.device_mesh.ndim).to_local()
        torch.testing.assert_close(found * 2, wanted.norm())
        product = _compiled(lambda p: p @ p.t())
        if options is UNEVEN:
            with pytest.raises(Exception, match="an elementwise operation, or a statistic"):
                product(weight.detach())
        torch._dynamo.reset()


@TRACED
def test_a_gather_ends_the_graph_and_a_product_is_refused(ranks: Ranks) -> None:
    """Local rows and statistics are parts of graphs."""
    ranks(2).run(_collectives_end_graphs)


def _losses_reach_gradients() -> None:
    for options in WAYS:
        grads = []
        for compile_ in (lambda f: f, _compiled):
            torch._dynamo.reset()
            weight = _net(options).weight
            for loss in (lambda p: p.square().sum(), lambda p: p.to_local().square().sum()):
                found = compile_(loss)(weight)
                (found.full_tensor() if isinstance(found, DTensor) else found).backward()
            grads.append(full_tensor(weight.grad))
        assert torch.equal(*grads)
        assert grads[0].any()
    torch._dynamo.reset()


@TRACED
def test_a_compiled_loss_of_a_parameter_has_its_gradient(ranks: Ranks) -> None:
    """Whole and from local rows, as an eager one."""
    ranks(2).run(_losses_reach_gradients)


def _count_graphs() -> list[int]:
    counts = []
    for is_even in (True, False):
        torch._dynamo.reset()
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        net = fully_shard(net, even_shards=is_even)
        function, counter = (lambda p: p * 2), torch._dynamo.testing.CompileCounter()
        double = torch.compile(function, backend=counter, fullgraph=True)
        for layer in net:
            weight = layer.weight.detach()
            assert torch.equal(double(weight).full_tensor(), weight.full_tensor() * 2)
        counts.append(counter.frame_count)
    torch._dynamo.reset()
    return counts


@TRACED
def test_even_parameters_of_one_shape_share_a_graph(ranks: Ranks) -> None:
    """Uneven ones lie in other rows of each rank."""
    assert ranks(2).run(_count_graphs)[0] == [1, 2]


def _keys_of_stored_graphs() -> None:
    first, second = (cut(torch.zeros(11, 5), whole_mesh(), skipped=n, shard_rows=4) for n in (0, 1))
    net = _net(UNEVEN)
    net(torch.ones(1, 5)).sum().backward()
    weight = net.weight.detach()
    like = weight.like(weight.local)
    named = [t._stable_hash_for_caching() for t in (first, second, weight, like, net.weight.grad)]
    assert named[2] == named[3]
    assert len(set(named)) == 4


@TRACED
def test_stored_graphs_are_found_by_class_and_layout(ranks: Ranks) -> None:
    """Gradients that lie in a buffer are of a class of their own."""
    ranks(3).run(_keys_of_stored_graphs)


class _LateWriter:
    """Writes a value where a reader waits for it, as a step on another thread would."""

    def __init__(self, rows: torch.Tensor, value: float) -> None:
        self._rows, self._value = rows, value
        register_writer([rows], self)

    def wait_for_reader(self) -> None:
        """Write, and be done."""
        self._rows.fill_(self._value)
        unregister_writer(self)


def _graphs_wait_for_writers() -> None:
    torch._dynamo.reset()
    weight = _net(UNEVEN).weight.detach()
    double = _compiled(lambda p: p * 2)
    for value in (3.0, 4.0, 5.0):
        writer = _LateWriter(local_tensor(weight), value)
        assert (double(weight).to_local() == 2 * value).all()
        del writer
    torch._dynamo.reset()


@TRACED
def test_a_graph_waits_for_a_step_on_another_thread(ranks: Ranks) -> None:
    """When it is traced, and when it runs again."""
    ranks(2).run(_graphs_wait_for_writers)

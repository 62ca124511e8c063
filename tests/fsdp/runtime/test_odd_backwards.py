"""Backwards of backwards, cut short, given up, or of units with two roots: gradients are right."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from megafsdp import fully_shard, microbatch
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.runtime.forward_passes import ForwardToken
from megafsdp.fsdp.runtime.unit import units_below
from tests.fsdp.runtime.test_unit import Choosing, Guard, used_and_kept
from tests.fsdp.toy import Block, assert_same_grads, batches, mine, pair
from tests.library import library_on_gloo
from tests.ranks import Ranks


def _chain(*inner: nn.Module, **options: object) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a plain chain and a sharded copy of it, each of the inner modules a unit."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 12), *inner, nn.Linear(12, 1))
    net = copy.deepcopy(reference)
    for module in [*net[1:-1].children(), net]:
        fully_shard(module, **options)
    return reference, net


def _own(x: torch.Tensor) -> torch.Tensor:
    return x[dist.get_rank()]


def _second_order(strategy: str, has_loss: bool) -> None:
    layers = (nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2))
    reference, net = _chain(*layers, strategy=strategy)
    x = torch.randn(dist.get_world_size(), 3, 12)

    def run(model: nn.Module, rows: torch.Tensor) -> None:
        rows = rows.clone().requires_grad_()
        output = model(rows)
        (grad,) = torch.autograd.grad(output.sum(), rows, create_graph=True)
        loss = grad.square().mean()
        (loss + output.mean() if has_loss else loss).backward()

    run(reference, x)
    run(net, _own(x))
    assert_same_grads(net, reference)
    reference.zero_grad()
    net.zero_grad()
    reference(x).mean().backward()
    net(_own(x)).mean().backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("has_loss", [False, True])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "no_shard"])
def test_gradients_of_gradients(ranks: Ranks, strategy: str, has_loss: bool) -> None:
    """A penalty on the gradient of the inputs, alone or beside a loss, and a plain step after."""
    ranks(2).run(_second_order, strategy, has_loss)


def _through_tangents(strategy: str) -> None:
    layers = (nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2))
    reference, net = _chain(*layers, strategy=strategy)
    x = torch.randn(dist.get_world_size(), 3, 12)

    def run(model: nn.Module, rows: torch.Tensor) -> None:
        direction = torch.ones_like(rows)
        output, tangent = torch.autograd.functional.jvp(model, rows, direction, create_graph=True)
        (output - tangent).square().mean().backward()

    for _ in range(2):
        run(reference, x)
        run(net, _own(x))
        assert_same_grads(net, reference)
        reference.zero_grad()
        net.zero_grad()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_gradients_of_tangents(ranks: Ranks, strategy: str) -> None:
    """A loss of a Jacobian times a direction reaches the weights, as in a single process."""
    ranks(2).run(_through_tangents, strategy)


def _fail(*args: object) -> None:
    raise ZeroDivisionError


def _cut_short_at(name: str, by_library: bool) -> None:
    with library_on_gloo() if by_library else contextlib.nullcontext():
        _fails_once_at(name)


def _fails_once_at(name: str) -> None:
    reference, net = pair()
    first, second = batches(2)
    handle = net.get_parameter(name).register_post_accumulate_grad_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        net(*mine(first)).backward()
    handle.remove()
    for parameter in net.parameters():
        parameter.grad = None
    reference(*second).backward()
    net(*mine(second)).backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("name", ["norm.weight", "blocks.0.up.weight", "blocks.2.up.weight"])
@pytest.mark.parametrize("by_library", [False, True])
def test_a_hook_that_raises_leaves_no_sum_behind(ranks: Ranks, name: str, by_library: bool) -> None:
    """Also where it runs after the last unit's backward, with reductions under way or to come."""
    ranks(2).run(_cut_short_at, name, by_library)


def _fail_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_fail)


def _cleared_outside_of_units(by: str, use_reentrant: bool | None) -> None:
    reference, net = (nn.ModuleDict({"net": chain}) for chain in _chain(Block(), Block()))
    x = torch.randn(dist.get_world_size(), 3, 12)
    net["net"](_own(x)).mean().backward()

    def loss(model: nn.ModuleDict, rows: torch.Tensor) -> torch.Tensor:
        chain = model["net"]
        if use_reentrant is None:
            return chain(rows).mean()
        hidden = rows.clone().requires_grad_()
        for part in chain[1:3]:
            hidden = checkpoint(part, hidden, use_reentrant=use_reentrant)
        return hidden.mean()

    for _ in range(2):
        handle = net["net"][1].register_forward_hook(_fail_in_backward)
        with pytest.raises(ZeroDivisionError):
            loss(net, _own(x)).backward()
        handle.remove()
        if by == "zero_grad":
            net.zero_grad()
        else:
            for parameter in net.parameters():
                parameter.grad = None
        reference.zero_grad()
        loss(reference, x).backward()
        loss(net, _own(x)).backward()
        for index in (1, 2):
            assert_same_grads(net["net"][index], reference["net"][index])


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("by", ["zero_grad", "loop"])
def test_gradients_are_cleared_through_a_wrapper_after_a_failed_backward(
    ranks: Ranks, by: str, use_reentrant: bool | None
) -> None:
    """It is no unit, and clears those of the parameters that it finds."""
    ranks(2).run(_cleared_outside_of_units, by, use_reentrant)


def _parts_after_a_failure() -> None:
    reference, net = _chain(Guard(), Guard())
    x = torch.randn(dist.get_world_size(), 3, 12)
    net(_own(x)).mean().backward()

    def loss(model: nn.Sequential, rows: torch.Tensor) -> torch.Tensor:
        return model[2](model[1](rows.clone().requires_grad_())).mean()

    net[1].fail_in = "backward"
    with pytest.raises(ValueError, match="asked to fail"):
        loss(net, _own(x)).backward()
    net[1].fail_in = ""
    for _ in range(3):
        reference.zero_grad()
        for parameter in net.parameters():
            parameter.grad = None
        loss(reference, x).backward()
        loss(net, _own(x)).backward()
        for index in (1, 2):
            assert_same_grads(net[index], reference[index])


def test_units_run_without_the_root_after_a_failed_backward(ranks: Ranks) -> None:
    """The failure is undone by whoever runs next."""
    ranks(2).run(_parts_after_a_failure)


class _Ends(nn.Module):
    """A unit of its own before one that it has in common with others."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared, self.head = Block(), shared, nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.shared(self.own(x))).mean()


def _two_roots_of_a_unit() -> None:
    torch.manual_seed(0)
    shared = Block()
    references = nn.ModuleList([_Ends(shared), _Ends(shared)])
    nets = copy.deepcopy(references)
    for module in (nets[0].shared, nets[0].own, nets[0], nets[1].own, nets[1]):
        fully_shard(module)
    x = torch.randn(dist.get_world_size(), 3, 12)
    for used in ((0,), (1,), (0,), (1,), (0, 1), (1, 0)):
        references.zero_grad()
        nets.zero_grad()
        sum(references[index](x) for index in used).backward()
        sum(nets[index](_own(x)) for index in used).backward()
        assert_same_grads(nets, references)


def test_a_unit_may_be_under_two_roots(ranks: Ranks) -> None:
    """In turn, and in one backward."""
    ranks(2).run(_two_roots_of_a_unit)


def _given_up(strategy: str, manner: str, clears: str, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    reference, net = pair(num_blocks=1, strategy=strategy, mesh=mesh)
    first, second = batches(2)
    with microbatch(net, is_last=False) if manner == "microbatch" else net.no_sync():
        net(*mine(first)).backward()
    if clears == "zero_grad":
        net.zero_grad()
    else:
        net.reset_iter_state()
        for parameter in net.parameters():
            parameter.grad = None
    reference(*second).backward()
    net(*mine(second)).backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("clears", ["zero_grad", "reset_iter_state"])
@pytest.mark.parametrize(
    ("strategy", "manner", "shape"),
    [
        ("optim_grads_params", "microbatch", (2,)),
        ("optim", "microbatch", (2,)),
        ("optim_grads_params", "no_sync", (2,)),
        ("optim_grads_params", "microbatch", (2, 2)),
    ],
)
def test_a_step_may_be_given_up_before_its_last_microbatch(
    ranks: Ranks, strategy: str, manner: str, shape: tuple[int, ...], clears: str
) -> None:
    """What waited for the last one is forgotten, whatever the strategy."""
    ranks(2 ** len(shape)).run(_given_up, strategy, manner, clears, shape)


def _idle_rank_clears(which: int, idle: int) -> None:
    reference, net = _chain(Choosing())
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 3, 12)
    net[1].which = None if rank == idle else which
    with microbatch(net, is_last=False):
        net(x[rank]).mean().backward()
    net.zero_grad()
    for other in range(world):
        reference[1].which = None if other == idle else which
        (reference(x[other]).mean() / world).backward()
    net(x[rank]).mean().backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_used_nothing_clears_like_the_others(
    ranks: Ranks, which: int, idle: int
) -> None:
    """It holds nothing by which it could see that gradients were cleared."""
    ranks(2).run(_idle_rank_clears, which, idle)


class _Caching(nn.Module):
    """A block that keeps a tensor of its forward, hence the graph behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.block(x)
        self.kept = output.square().mean()
        return output


class _Segments(nn.Module):
    """Blocks that are recomputed two at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(_Caching() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in range(0, 6, 2):
            pair_of_blocks = nn.Sequential(*list(self.blocks)[index : index + 2])
            x = checkpoint(pair_of_blocks, x, use_reentrant=False)
        return x.mean()


def _recomputed_graphs_kept() -> list[str]:
    torch.manual_seed(0)
    reference = _Segments()
    net = copy.deepcopy(reference)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    for _ in range(2):
        reference.zero_grad()
        net.zero_grad()
        reference(x).backward()
        loss = net(_own(x))
        with record_collectives() as record:
            loss.backward()
        assert_same_grads(net, reference)
    return [label for kind, label in record.events if kind == "reduce_scatter"]


def test_recomputed_graphs_that_are_kept_hold_no_unit_up(ranks: Ranks) -> None:
    """Each unit is reduced when its own backward ends."""
    labels = [f"blocks.{index}" for index in reversed(range(6))]
    for found in ranks(2).run(_recomputed_graphs_kept):
        assert found[:6] == labels


def _parts_only() -> list[int]:
    _, net = _chain(Block(), Block())
    x = _own(torch.randn(dist.get_world_size(), 3, 12))
    net(x).mean().backward()
    context = net._fsdp_unit().require_context()
    lengths = []
    for _ in range(3):
        lengths.append(len(context._forward._running))
        net[1](x).mean().backward()
    return lengths


def test_the_roots_order_does_not_grow_by_units_without_it(ranks: Ranks) -> None:
    """However often they run."""
    assert ranks(2).run(_parts_only) == [[3, 3, 3]] * 2


def _output_dropped_on_one_rank() -> list[tuple[str, str]]:
    reference, net = used_and_kept()
    x, rank = torch.randn(2, 3, 12, requires_grad=True), dist.get_rank()
    reference(x)[0].mean().backward()
    for ranks_that_drop in ((0, 1), (1,)):
        net.zero_grad()
        used, kept = net(x[rank])
        if rank in ranks_that_drop:
            del kept
        with record_collectives() as record:
            used.mean().backward()
        assert_same_grads(net, reference)
        assert not net._fsdp_unit().require_context().passes_in_backward
    return record.events


def test_an_output_that_one_rank_alone_drops_changes_no_order(ranks: Ranks) -> None:
    """Ranks reduce in one order, whether what they did not use is still alive or not."""
    first, second = ranks(2).run(_output_dropped_on_one_rank, timeout_s=60)
    assert first == second


def _resharded_in_backward() -> None:
    reference, net = pair()
    batch = batches(1)[0]
    reference(*batch).backward()
    block = net.blocks[1]

    def reshard(gradient: torch.Tensor) -> None:
        block.reshard()

    block.down.register_forward_hook(lambda _, args, out: out.register_hook(reshard) and None)
    for _ in range(2):
        net.zero_grad()
        net(*mine(batch)).backward()
        assert_same_grads(net, reference)


def test_a_unit_at_work_in_backward_is_not_resharded(ranks: Ranks) -> None:
    """A user's hook may ask for it; what backward reads stays until it has ended."""
    ranks(2).run(_resharded_in_backward)


def _num_forwards_in_memory() -> int:
    gc.collect()
    return sum(isinstance(held, ForwardToken) for held in gc.get_objects())


def _forwards_that_stay() -> int:
    _, net = used_and_kept()
    x = torch.randn(3, 12, requires_grad=True)
    num_before = _num_forwards_in_memory()
    for _ in range(3):
        net(x)[0].mean().backward()
    return _num_forwards_in_memory() - num_before


def test_forwards_whose_outputs_went_unused_are_forgotten_with_the_backward(ranks: Ranks) -> None:
    """Nothing stays of them, in a model that runs for months."""
    assert ranks(2).run(_forwards_that_stay) == [0, 0]


def _num_counted(net: nn.Module) -> int:
    gc.collect()
    return sum(len(unit.outstanding._by_pass) for unit in units_below([net]).values())


def _forwards_without_backward() -> list[int]:
    _, net = used_and_kept()
    x = torch.randn(3, 12, requires_grad=True)
    counts = []
    for _ in range(3):
        for _ in range(5):
            outputs = net(x)
        counts.append(_num_counted(net))
    del outputs
    counts.append(_num_counted(net))
    kept = [net(x) for _ in range(4)]
    counts.append(_num_counted(net))
    kept[0][0].mean().backward()
    counts.append(_num_counted(net))
    return counts


def test_forwards_without_a_backward_leave_nothing(ranks: Ranks) -> None:
    """As in an evaluation that builds graphs: what is counted is what a backward may come of."""
    for counts in ranks(2).run(_forwards_without_backward):
        *alive, last, kept, none = counts
        assert alive == [alive[0]] * 3 and alive[0] > 0
        assert last == alive[0], "the last pass may go on in units that run without the root"
        assert kept == 4 * alive[0]
        assert none == 0

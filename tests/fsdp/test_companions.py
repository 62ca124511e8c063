"""What people put around units or ask of them as of plain modules: right, or refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed._composable import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megafsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.fsdp.runtime.unit import units_below
from tests.fsdp.toy import (
    WIDTH,
    Block,
    assert_same_grads,
    assert_same_parameters,
    batches,
    mine,
    pair,
)
from tests.ranks import Ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Stack(nn.ModuleList):
    """A list that has a method of its own to run."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return what all of them make of x."""
        for module in self:
            x = module(x)
        return x


class Runs(nn.ModuleList):
    """A list with a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the first makes of x."""
        return self[0](x)


class Shelf(nn.ModuleList):
    """A list that only looks like a module."""

    size = 2


class Holder(nn.Module):
    """Has parts that others run."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Block()


def _containers() -> None:
    blocks = {"a": Block()}
    parameters = nn.ParameterList([nn.Parameter(torch.ones(3))])
    for container in (
        nn.ModuleList(blocks.values()),
        nn.ModuleDict(blocks),
        Shelf(),
        parameters,
    ):
        for given in (container, [Block(), container]):
            with record_collectives() as record, pytest.raises(ValueError) as caught:
                fully_shard(given)
            assert type(container).__name__ in str(caught.value)
            assert "one call for each" in str(caught.value)
            assert not record.calls
        assert not any(isinstance(m, FSDPModule) for m in container.modules())
    assert isinstance(fully_shard(Holder()), FSDPModule), "its units may be gathered by hand"
    x = torch.randn(2, 3, WIDTH)
    reference = Runs([Block()])
    torch.testing.assert_close(fully_shard(copy.deepcopy(reference))(x), reference(x))
    reference = Stack([Block(), Block()])
    net = fully_shard(copy.deepcopy(reference))
    register_fsdp_forward_method(net, "run")
    torch.testing.assert_close(net.run(x), reference.run(x))


def test_a_container_without_a_forward_is_refused(ranks: Ranks) -> None:
    """Nothing could be gathered around it; one with a forward or a method to run is a unit."""
    ranks(2).run(_containers)


class Chain(nn.Sequential):
    """A sequential of the user's own class."""


def _slices() -> None:
    x = torch.randn(2, 3, WIDTH)
    for cls in (nn.Sequential, Chain):
        reference = cls(Block(), Block(), Block())
        net = copy.deepcopy(reference)
        for block in net:
            fully_shard(block)
        fully_shard(net)
        with torch.no_grad():
            torch.testing.assert_close(net(x), reference(x))
            part = net[1:]
            assert type(part) is cls and isinstance(net, FSDPModule)
            assert [*part] == [net[1], net[2]]
            torch.testing.assert_close(part(x), reference[1:](x))
        assert list(units_below([part]).values()) == [m._fsdp_unit() for m in part]
        made = type(net)(nn.Linear(2, 2))
        assert type(made) is cls and len(made) == 1


def test_a_slice_of_a_sharded_sequential_is_a_plain_one(ranks: Ranks) -> None:
    """Its modules are the sharded ones, which run in it."""
    ranks(2).run(_slices)


def _transformed() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    x, t = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    with warnings.catch_warnings():
        # torch itself uses what it has deprecated, once.
        warnings.simplefilter("ignore")
        wanted_tangent = torch.func.jvp(reference, (x,), (t,))
    for strategy in STRATEGIES:
        net = copy.deepcopy(reference)
        fully_shard(net[2], strategy=strategy)
        fully_shard(net, strategy=strategy)

        def loss(y: torch.Tensor, model: nn.Module = net) -> torch.Tensor:
            return model(y).square().sum()

        wrong: dict[str, Callable[[], object]] = {
            "grad": lambda: torch.func.grad(loss)(x),
            "jvp": lambda: torch.func.jvp(net, (x,), (t,)),  # noqa: B023
            "vmap": lambda: torch.func.vmap(torch.func.grad(loss))(x),
        }
        for name, call in wrong.items():
            with record_collectives() as record, pytest.raises(NotImplementedError) as caught:
                call()
            message = str(caught.value)
            assert f"torch.func.{'grad' if name == 'vmap' else name}" in message
            assert "unit 'Sequential'" in message and "torch.autograd" in message
            assert not record.calls
            assert not any(unit.is_at_work for unit in units_below([net]).values())
        # What the errors name instead, and what stays right.
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf), leaf)
        (wanted,) = torch.autograd.grad(loss(leaf, reference), leaf)
        torch.testing.assert_close(found, wanted)
        found = torch.autograd.functional.jvp(net, x, t)
        torch.testing.assert_close(found, wanted_tangent)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, t)
            with pytest.raises(NotImplementedError, match=r"torch\.autograd\.forward_ad\. In unit"):
                net(dual)
            with torch.no_grad():
                found = tuple(forward_ad.unpack_dual(net(dual)))
        torch.testing.assert_close(found, wanted_tangent)
        with torch.no_grad():
            torch.testing.assert_close(torch.func.vmap(net)(x), reference(x))
        net.zero_grad()
        loss(x).backward()
        reference.zero_grad()
        loss(x, reference).backward()
        assert_same_grads(net, reference)


def test_transforms_of_functions_are_refused_by_name(ranks: Ranks) -> None:
    """Grad and jvp of torch.func and dual tensors find no hooks; autograd's own ways are right."""
    ranks(2).run(_transformed)


class Around(nn.Module):
    """A sharded net and a plain layer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.own = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return a loss of both."""
        return self.net(tokens, labels) + self.own(x).square().mean()


def _names_of_replicas() -> dict[str, Callable[[nn.Module], nn.Module]]:
    return {
        "DistributedDataParallel": DistributedDataParallel,
        "replicate": replicate,
        "replicate by fsdp": replicate_by_fsdp,
    }


def _replicated() -> None:
    for strategy in STRATEGIES:
        for name, wrap in _names_of_replicas().items():
            _, net = pair(num_blocks=1, strategy=strategy)
            before = [type(m) for m in net.modules()], list(net.parameters())
            with (
                record_collectives() as record,
                pytest.raises((ValueError, RuntimeError)) as caught,
            ):
                wrap(net)
            assert "fully_shard" in str(caught.value) and name.split()[0] in str(caught.value)
            assert not record.calls
            assert [type(m) for m in net.modules()] == before[0]
            assert all(a is b for a, b in zip(net.parameters(), before[1], strict=True))
            net(*mine(batches(1)[0])).backward()


def _replicated_around() -> None:
    x = torch.randn(dist.get_world_size(), 2, 3)
    for strategy in STRATEGIES:
        for name, wrap in _names_of_replicas().items():
            reference, net = pair(num_blocks=1, strategy=strategy)
            torch.manual_seed(0)
            reference, net = Around(reference), Around(net)
            net.own.load_state_dict(reference.own.state_dict())
            if name == "replicate by fsdp":
                with pytest.raises(RuntimeError, match="a unit of megafsdp at 'net' of Around"):
                    wrap(net)
                continue
            if name == "DistributedDataParallel":
                with pytest.raises(ValueError, match="fully_shard"):
                    wrap(net)
                net._ddp_params_and_buffers_to_ignore = [
                    f"net.{n}" for n, _ in net.net.named_parameters(remove_duplicate=False)
                ]
            wrapped = wrap(net)
            for batch in batches(2):
                reference(*batch, x).backward()
                wrapped(*mine(batch), x[dist.get_rank()]).backward()
            assert_same_grads(net.net, reference.net)
            grad = net.own.weight.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            torch.testing.assert_close(grad, reference.own.weight.grad)


@pytest.mark.parametrize("body", [_replicated, _replicated_around])
def test_replicas_of_units_are_refused_and_of_what_is_around_them_are_right(
    ranks: Ranks, body: Callable[[], None]
) -> None:
    """DistributedDataParallel and replicate() leave units alone, or are refused."""
    ranks(2).run(body)


def _kinds_of_parameters(is_replica_first: bool) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 5))

    sizes = {"momentum": 0.9, "weight_decay": 0.1, "lr": 0.05}
    for kind, options in (
        (torch.optim.SGD, {**sizes, "foreach": True}),
        (torch.optim.SGD, {**sizes, "foreach": False}),
        (torch.optim.SGD, {**sizes, "fused": True}),
        (torch.optim.RMSprop, {**sizes, "foreach": True}),
        (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3, "foreach": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-3, "fused": True}),
    ):
        reference, model = make(), make()
        strategies = ("no_shard", "optim") if is_replica_first else ("optim", "no_shard")
        for module, strategy in zip((model[0], model[2]), strategies, strict=True):
            fully_shard(module, strategy=strategy)
        torch_fully_shard(model[1])
        for parameter in model[3].parameters():
            parameter.register_hook(_mean_over_ranks)
        optimizers = [kind(m.parameters(), **options) for m in (reference, model)]
        for step in range(3):
            inputs = torch.randn(dist.get_world_size(), 4, 6, generator=_seeded(step))
            reference(inputs).square().mean().backward()
            model(inputs[dist.get_rank()]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(model, reference, rtol=1e-5, atol=1e-6)
        for parameter, state in optimizers[1].state.items():
            of_rows = isinstance(parameter, UnevenDTensor)
            kept = UnevenDTensor if of_rows else DTensor if isinstance(parameter, DTensor) else None
            for tensor in state.values():
                if torch.is_tensor(tensor) and tensor.ndim:
                    assert kept is None or type(tensor) is kept
                    assert tensor.shape == parameter.shape


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _mean_over_ranks(grad: torch.Tensor) -> torch.Tensor:
    total = grad.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@pytest.mark.parametrize("is_replica_first", [True, False])
def test_one_optimizer_of_torch_steps_units_replicas_and_what_torch_has_cut(
    ranks: Ranks, is_replica_first: bool
) -> None:
    """Its lists mix all of them; states are of the kind of their parameters."""
    ranks(2).run(_kinds_of_parameters, is_replica_first)


def _averaged() -> None:
    """A plain model is copied, then it and the copy are sharded alike."""
    multi_avg = get_ema_multi_avg_fn(0.75)
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    net = copy.deepcopy(reference)
    wanted, averaged = (AveragedModel(m, multi_avg_fn=multi_avg) for m in (reference, net))
    for model in (net, averaged.module):
        fully_shard(model[0])
        fully_shard(model)
    with pytest.raises(RuntimeError, match=r"copy\.deepcopy"):
        AveragedModel(net)
    for _ in range(3):
        for model, average in ((reference, wanted), (net, averaged)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5).add_(0.25)
            average.update_parameters(model)
    assert_same_parameters(averaged.module, wanted.module, rtol=0, atol=0)
    inputs = torch.ones(4, WIDTH)
    averaged.eval(), wanted.eval()
    with torch.no_grad():
        assert torch.equal(averaged(inputs), wanted(inputs))


def test_an_average_of_weights_is_made_before_both_are_sharded(ranks: Ranks) -> None:
    """By torch's AveragedModel, moving exponentially, with all of its arithmetic's bits."""
    ranks(2).run(_averaged)


def _without_rows() -> None:
    """The second rank's rows run out: its loss is a sum over none."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    net = copy.deepcopy(reference)
    fully_shard(net[0])
    fully_shard(net)
    for num_rows in (3, 0):
        rows = torch.randn(2 + num_rows, WIDTH, generator=_seeded(num_rows))
        own = rows[:2] if rank == 0 else rows[2:]
        for model in (reference, net):
            model.zero_grad()
        reference(rows).square().sum().div(len(rows)).backward()
        (net(own).square().sum() * num_ranks / len(rows)).backward()
        assert_same_grads(net, reference, rtol=1e-5, atol=1e-7)


def test_a_rank_may_have_a_batch_without_rows(ranks: Ranks) -> None:
    """With each rank's loss weighted by its rows, gradients are those of all rows."""
    ranks(2).run(_without_rows)

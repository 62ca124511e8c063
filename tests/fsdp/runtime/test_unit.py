"""What a unit's modules show in each phase, and every way a user may drive a unit."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megafsdp import FSDPModule, full_tensor, fully_shard, mark_main_weights_changed, microbatch
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.device.memory import Category
from megafsdp.fsdp.runtime.unit import Phase
from tests.fsdp.toy import (
    Block,
    Net,
    assert_same_grads,
    assert_same_parameters,
    batches,
    fused_adamw,
    mine,
    pair,
    shard,
)
from tests.ranks import Ranks


def _shown(module: nn.Module) -> set[str]:
    return {"sharded" if isinstance(p, DTensor) else "full" for p in module.parameters()}


def _phases() -> None:
    _, net = pair()
    block = net.blocks[0]
    seen: dict[str, set[str]] = {}
    block.up.register_forward_hook(lambda *_: seen.update(forward=_shown(block)))
    net.register_forward_hook(lambda *_: seen.update(after_root=_shown(net)))
    objects = {n: id(p) for n, p in net.named_parameters()}
    loss = net(*mine(batches(1)[0]))
    seen["between"] = _shown(net)
    handles = [
        p.register_hook(lambda g: seen.update(backward=_shown(block)))
        for p in (g.unsharded for g in block._fsdp_unit().groups[0].parameters)
    ]
    loss.backward()
    assert len(handles) == 6
    assert seen == {
        "forward": {"full"},
        "after_root": {"sharded"},
        "between": {"sharded"},
        "backward": {"full"},
    }
    assert _shown(net) == {"sharded"}
    assert {n: id(p) for n, p in net.named_parameters()} == objects


def test_modules_show_full_parameters_only_in_their_own_forward_and_backward(ranks: Ranks) -> None:
    """Kept units show sharded parameters too, and the sharded objects never change."""
    ranks(2).run(_phases)


def _two_forwards() -> None:
    reference = Net(num_blocks=6)
    net = shard(copy.deepcopy(reference))
    first, second = batches(2)
    (reference(*first) + reference(*second)).backward()
    loss = net(*mine(first)) + net(*mine(second))
    ledger = net._fsdp_unit().ledger
    ledger.reset_peak()
    loss.backward()
    assert_same_grads(net, reference)
    # The root, the last unit, one at work and one gathered ahead, as after a single forward.
    assert ledger.peak_num_live[Category.UNSHARDED] <= 4


def _two_forwards_two_backwards() -> None:
    reference, net = pair()
    first, second = batches(2)
    for model, pick in ((reference, lambda b: b), (net, mine)):
        losses = [model(*pick(first)), model(*pick(second))]
        for loss in losses:
            loss.backward()
    assert_same_grads(net, reference)


def _two_forwards_of_one_unit() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 12), Block())
    net = copy.deepcopy(reference)
    fully_shard(net[1])
    fully_shard(net)
    x = torch.randn(2, dist.get_world_size(), 12)
    (reference(x[0]).mean() + reference(x[1]).mean()).backward()
    own = x[:, dist.get_rank()]
    (net(own[:1]).mean() + net(own[1:]).mean()).backward()
    assert_same_grads(net, reference)


def _retained_graph() -> None:
    reference, net = pair()
    batch = batches(1)[0]
    for model, own in ((reference, batch), (net, mine(batch))):
        loss = model(*own)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_grads(net, reference)


class _Twice(nn.Module):
    """A block whose output passes through it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(self.first(x)))


def _unit_applied_twice() -> None:
    torch.manual_seed(0)
    reference = _Twice()
    net = copy.deepcopy(reference)
    fully_shard(net.block)
    fully_shard(net)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 12)

    def run(model: _Twice, rows: torch.Tensor, *, is_used_again: bool) -> torch.Tensor:
        output = model(rows)
        return (model.block(output) if is_used_again else output).square().mean(dim=1).sum()

    # Within the root once a unit; one that runs by itself may be of another graph each time.
    for is_used_again, num_reductions in ((False, 2), (True, 3)):
        net.zero_grad()
        reference.zero_grad()
        (run(reference, x, is_used_again=is_used_again) / world).backward()
        with record_collectives() as record:
            run(net, x[rank : rank + 1], is_used_again=is_used_again).backward()
        assert_same_grads(net, reference)
        assert record.calls["reduce_scatter"] == num_reductions


def _units_without_the_root() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(Block() for _ in range(5)))
    net = copy.deepcopy(reference)
    for module in [*net, net]:
        fully_shard(module)
    x, rank = torch.randn(2, 3, 12), dist.get_rank()
    net(x[rank]).mean().backward()

    def run(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(*list(model.children())[1:])(rows.clone().requires_grad_()).mean()

    run(reference, x).backward()
    run(net, x[rank]).backward()  # Their order is recorded.
    usual = None
    for keeping in ((), (0,), (0, 1)):
        kept: torch.Tensor | None = run(net, x[rank])
        if rank not in keeping:
            kept = None  # Of the graph that others keep this rank knows nothing.
        loss = run(net, x[rank])
        net.zero_grad()
        with record_collectives() as record:
            loss.backward()
        assert_same_grads(net, reference)
        usual = usual or record.events
        assert record.events == usual
        del kept


def _train_after_eval() -> None:
    reference, net = pair()
    batch = batches(1)[0]
    with torch.no_grad():
        net(*mine(batch))
        assert _shown(net) == {"sharded"}
    net.eval()
    net(*mine(batch))
    net.train()
    for model, own in ((reference, batch), (net, mine(batch))):
        model(*own).backward()
    assert_same_grads(net, reference)


def _part_of_the_model() -> None:
    reference, net = pair()
    x = torch.randn(2, 12)
    net(*mine(batches(1)[0])).backward()
    net.zero_grad()
    for model in (reference, net):
        model.blocks[1](x).sum().backward()
    assert_same_grads(net.blocks[1], reference.blocks[1])


def _recomputed(use_reentrant: bool, stops_early: bool) -> None:
    reference, net = pair()

    def wrap(model: Net) -> None:
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, f=inner: checkpoint(f, x, use_reentrant=use_reentrant)

    def outside(model: Net, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = model.embedding(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        logits = model.head(model.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    class Outside(nn.Module):
        def __init__(self, model: Net) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return outside(self.model, tokens, labels)

    batch = batches(1)[0]
    reference(*batch).backward()
    # Outside: the checkpoint wraps the unit. The root must be the module that runs the blocks.
    fresh = Net()
    for block in fresh.blocks:
        fully_shard(block)
    root = fully_shard(Outside(fresh))
    for _ in range(2):
        with record_collectives() as record:
            with set_checkpoint_early_stop(stops_early):
                loss = root(*mine(batch))
            loss.backward()
        assert_same_grads(fresh, reference)
        root.zero_grad()
    assert record.calls["all_gather"] <= 2 * 4 - 1, "one gather serves recompute and backward"
    # Inside: the unit's own forward checkpoints its body.
    wrap(net)
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize(
    ("use_reentrant", "stops_early"), [(False, False), (False, True), (True, True)]
)
def test_activations_may_be_recomputed(
    ranks: Ranks, use_reentrant: bool, stops_early: bool
) -> None:
    """Checkpointing outside and inside units gives the same gradients, in every manner."""
    ranks(2).run(_recomputed, use_reentrant, stops_early)


class TwoOutputs(nn.Module):
    """Checkpoints two blocks together and uses the output of the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 12)
        self.first = Block()
        self.second = Block()

    def _both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the first block's output."""
        return checkpoint(self._both, self.stem(x), use_reentrant=False)[0].square().mean()


def _recomputed_without_backward() -> None:
    torch.manual_seed(0)
    reference = TwoOutputs()
    net = copy.deepcopy(reference)
    for block in (net.first, net.second):
        fully_shard(block)
    fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    for _ in range(2):
        reference(x).backward()
        net(x[dist.get_rank()]).backward()
        assert_same_grads(net, reference)
        assert _shown(net) == {"sharded"}
        assert not any(m._fsdp_unit().is_at_work for m in (net, net.first, net.second))
        assert not any(m._fsdp_unit().is_unsharded for m in (net, net.first, net.second))


class Guard(nn.Module):
    """A block that raises in forward or backward when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.fail_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block, or fail."""
        if self.fail_in == "forward":
            raise ValueError("asked to fail")
        y = self.inner(x)
        if self.fail_in == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, grad: torch.Tensor) -> None:
        raise ValueError("asked to fail")


def _sharded_parameters(net: nn.Module) -> list[torch.Tensor]:
    units = [m._fsdp_unit() for m in net.modules() if isinstance(m, FSDPModule)]
    return [p.sharded for unit in units for group in unit.groups for p in group.parameters]


def _retry(where: str, is_reset: bool) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 12), Guard(), Guard(), nn.Linear(12, 1))
    net = copy.deepcopy(reference)
    for guard in (net[1], net[2]):
        fully_shard(guard)
    fully_shard(net)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 3, 12)
    net(x[rank]).mean().backward()
    net.zero_grad()
    net[1].fail_in = where
    with pytest.raises(ValueError, match="asked to fail"):
        net(x[rank]).mean().backward()
    net[1].fail_in = ""
    if is_reset:
        net.reset_iter_state()
        assert _shown(net) == {"sharded"}
        assert not any(m._fsdp_unit().is_unsharded for m in (net, net[1], net[2]))
    for parameter in _sharded_parameters(net):
        parameter.grad = None  # As an optimizer does, which knows nothing of the model.
    with torch.no_grad():
        for parameter in [*reference.parameters(), *_sharded_parameters(net)]:
            parameter.mul_(1.5)
    mark_main_weights_changed(net)
    for _ in range(2):
        reference(x).mean().backward()
        net(x[rank]).mean().backward()
    assert_same_grads(net, reference)
    assert _shown(net) == {"sharded"}
    assert not any(m._fsdp_unit().is_unsharded for m in (net, net[1], net[2]))


def _gradients_of_a_failed_backward() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 12), *(Guard() for _ in range(3)), nn.Linear(12, 1))
    net = copy.deepcopy(reference)
    for guard in net[1:4]:
        fully_shard(guard)
    fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    reference(x).mean().backward()
    net(x[dist.get_rank()]).mean().backward()
    net[1].fail_in = "backward"
    with pytest.raises(ValueError, match="asked to fail"):
        net(x[dist.get_rank()]).mean().backward()
    net[1].fail_in = ""
    net.reset_iter_state()
    # The second guard's reduction was under way, the third's was finished.
    for parameter in reference[3].parameters():
        parameter.grad.mul_(2)
    assert_same_grads(net, reference)
    reference(x).mean().backward()
    net(x[dist.get_rank()]).mean().backward()
    assert_same_grads(net, reference)


def test_a_failed_backward_keeps_what_was_reduced_before(ranks: Ranks) -> None:
    """As in plain torch, where gradients add up; what was under way is dropped."""
    ranks(2).run(_gradients_of_a_failed_backward)


class Choosing(nn.Module):
    """Two layers of which a forward uses one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.which: int | None = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the chosen layer."""
        return x * 1 if self.which is None else self.layers[self.which](x)


def _failed_after_a_microbatch(strategy: str, is_synced: bool, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("o", "i")[-len(mesh_shape) :])
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 12), Guard(), Choosing(), nn.Linear(12, 1))
    net = copy.deepcopy(reference)
    for unit in (net[1], net[2]):
        fully_shard(unit, strategy=strategy, mesh=mesh)
    fully_shard(net, strategy=strategy, mesh=mesh)
    x = torch.randn(dist.get_world_size(), 3, 12)
    with microbatch(net, is_last=False) if is_synced else net.no_sync():
        net(x[dist.get_rank()]).mean().backward()
    net[1].fail_in = "backward"
    with pytest.raises(ValueError, match="asked to fail"):
        net(x[dist.get_rank()]).mean().backward()
    net[1].fail_in = ""
    net.reset_iter_state()
    net.zero_grad()
    reference[2].which = net[2].which = 1
    reference(x).mean().backward()
    net(x[dist.get_rank()]).mean().backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize(
    ("strategy", "is_synced", "mesh_shape"),
    [
        ("optim", True, (2,)),
        ("optim_grads_params", False, (2,)),
        ("optim_grads_params", True, (2, 2)),
    ],
)
def test_a_step_that_failed_midway_may_be_begun_afresh(
    ranks: Ranks, strategy: str, is_synced: bool, mesh_shape: tuple[int, ...]
) -> None:
    """Sums that waited for the last microbatch are dropped, and who used what is forgotten."""
    arguments = (strategy, is_synced, mesh_shape)
    ranks(math.prod(mesh_shape)).run(_failed_after_a_microbatch, *arguments)


def _failed_before_usage_is_agreed_on(idle_rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Linear(12, 12), Guard(), Guard(), Guard(), Choosing(), nn.Linear(12, 1)
    )
    net = copy.deepcopy(reference)
    for unit in net[1:5]:
        fully_shard(unit)
    fully_shard(net)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 3, 12)
    net[4].which = None if rank == idle_rank else 0
    net[1].fail_in = "backward"
    with pytest.raises(ValueError, match="asked to fail"):
        net(x[rank]).mean().backward()
    net[1].fail_in = ""
    net.reset_iter_state()
    net.zero_grad()
    for r in range(world):
        reference[4].which = None if r == idle_rank else 0
        (reference(x[r]).mean() / world).backward()
    net(x[rank]).mean().backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("idle_rank", [0, 1])
def test_a_backward_that_failed_before_usage_was_agreed_on_leaves_no_sum(
    ranks: Ranks, idle_rank: int
) -> None:
    """What only another rank used is not in any ``.grad`` yet, and the next sum overwrites it."""
    ranks(2).run(_failed_before_usage_is_agreed_on, idle_rank)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_pass_may_be_retried(ranks: Ranks, where: str, is_reset: bool) -> None:
    """After an exception the next forward starts clean, and nothing is doubled, lost or stale."""
    ranks(2).run(_retry, where, is_reset)


def _frozen_and_detached() -> None:
    torch.manual_seed(0)

    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12)
            self.second = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x) + x @ self.first.weight.detach() + self.first.bias

    reference = nn.Sequential(nn.Linear(12, 12), Detaching(), Block(), nn.Linear(12, 1))
    reference[0].requires_grad_(False)
    reference[2].up.requires_grad_(False)
    net = copy.deepcopy(reference)
    for block in (net[0], net[1], net[2]):
        fully_shard(block)
    fully_shard(net)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 3, 12)
    for needs_grad in (False, True):
        inputs = x.clone().requires_grad_(needs_grad)
        reference(inputs).mean().backward()
        net(inputs[rank]).mean().backward()
        assert_same_grads(net, reference)


@dataclass
class Result:
    """An output that is neither tensor nor tuple."""

    value: torch.Tensor
    name: str


class Structured(nn.Module):
    """Takes keywords, returns a dataclass inside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, *, inputs: dict[str, torch.Tensor]) -> dict[str, Result]:
        """Apply the linear layer."""
        return {"result": Result(self.linear(inputs["x"]), "y")}


def _structured() -> None:
    torch.manual_seed(0)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12)
            self.inner = Structured()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs={"x": self.first(x)})["result"].value.square().mean()

    reference = Outer()
    net = copy.deepcopy(reference)
    fully_shard(net.inner)
    fully_shard(net)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 3, 12)
    for _ in range(2):
        reference(x).backward()
        net(x[rank]).backward()
    assert_same_grads(net, reference)


class Triple(NamedTuple):
    """An output with names."""

    kept: torch.Tensor
    changed: torch.Tensor
    count: int


class Contained(nn.Module):
    """Takes and returns a container of one kind."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.kind = kind

    def forward(self, inputs: Any) -> Any:
        """Apply the linear layer to the second item."""
        items = (inputs[0], self.linear(inputs[1]), inputs[2] + 1)
        return self.kind(*items) if self.kind is Triple else self.kind(items)


class Containers(nn.Module):
    """Passes each kind of container through a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.units = nn.ModuleList(Contained(kind) for kind in (Triple, tuple, list, Triple))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of what all units made."""
        passed: Any = (x, self.first(x), 0)
        for unit in self.units:
            passed = unit(passed)
            assert type(passed) is unit.kind
        assert passed.count == len(self.units)
        return (passed.kept + passed.changed).square().mean()


def _containers() -> None:
    torch.manual_seed(0)
    reference = Containers()
    net = copy.deepcopy(reference)
    for unit in net.units:
        fully_shard(unit)
    fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    for _ in range(2):
        reference(x).backward()
        with record_collectives() as record:
            net(x[dist.get_rank()]).backward()
        assert_same_grads(net, reference)
    # A unit's backward ends at its own inputs, hence it reduces before the next but one gathers.
    backward = record.events[record.events.index(("reduce_scatter", "units.2")) :]
    assert ("all_gather", "units.0") in backward


class Passing(nn.Module):
    """Takes keywords and passes one of them on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, *, kept: torch.Tensor, changed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Apply the linear layer to the other."""
        return {"kept": kept, "changed": self.linear(changed)}


class Keywords(nn.Module):
    """Passes keywords through units, one of them untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.units = nn.ModuleList(Passing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of what went through all units."""
        x = self.first(x)
        passed = {"kept": x, "changed": x}
        for unit in self.units:
            passed = unit(**passed)
        return (passed["kept"] + passed["changed"]).square().mean()


def _keywords() -> None:
    torch.manual_seed(0)
    reference = Keywords()
    net = copy.deepcopy(reference)
    for unit in net.units:
        fully_shard(unit)
    fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    for _ in range(2):
        reference(x).backward()
        with record_collectives() as record:
            net(x[dist.get_rank()]).backward()
        assert_same_grads(net, reference)
    # Inputs given by keyword end a unit's backward too, and one that is passed on, whose gradient
    # is there last, does not begin it again.
    backward = record.events[record.events.index(("reduce_scatter", "units.2")) :]
    assert ("all_gather", "units.0") in backward
    assert record.calls == {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 1}


def _forward_kept_by_one_rank() -> None:
    reference, net = pair()
    batch = mine(batches(1)[0])

    def events() -> list[tuple[str, str]]:
        net.zero_grad()
        loss = net(*batch)
        with record_collectives() as record:
            loss.backward()
        return record.events

    events()
    usual = events()
    kept = net(*batch)
    if dist.get_rank() == 1:
        del kept
    assert events() == usual, "no unit waits for a graph that has no backward"
    reference(*batches(1)[0]).backward()
    assert_same_grads(net, reference)


class UsedAndKept(nn.Module):
    """Two outputs, whose last block runs once for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        x = self.first(x)
        return self.last(x), self.last(-x)


def used_and_kept() -> tuple[UsedAndKept, UsedAndKept]:
    """Return the module, and a copy whose blocks are units."""
    torch.manual_seed(0)
    reference = UsedAndKept()
    net = copy.deepcopy(reference)
    for module in (net.first, net.last, net):
        fully_shard(module)
    return reference, net


def _output_kept_without_backward() -> None:
    reference, net = used_and_kept()
    x, rank = torch.randn(2, 3, 12, requires_grad=True), dist.get_rank()
    reference(x)[0].mean().backward()

    def second_events(keeping: tuple[int, ...]) -> list[tuple[str, str]]:
        used, kept = net(x[rank])
        used.mean().backward(retain_graph=True)
        net.zero_grad()
        if rank not in keeping:
            del kept
        with record_collectives() as record:
            used.mean().backward()
        assert_same_grads(net, reference)
        return record.events

    second_events(())
    usual = second_events(())
    assert second_events((0, 1)) == usual, "a call that has no backward is waited for once at most"
    assert second_events((0,)) == usual, "and by all ranks alike"


def _modules_as_one_unit() -> None:
    reference = Net()
    net = copy.deepcopy(reference)
    for block in net.blocks:
        fully_shard(block)
    fully_shard([net.embedding, net.norm, net.head])
    fully_shard(net)
    optimizers = [fused_adamw(reference), fused_adamw(net)]
    for step in range(2):
        batch = batches(1, seed=step)[0]
        reference(*batch).backward()
        with record_collectives() as record:
            net(*mine(batch)).backward()
        shared = [kind for kind, label in record.events if label == "embedding"]
        assert shared == ["all_gather", "all_gather", "reduce_scatter"]
        assert_same_grads(net, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)
    assert net.head.weight is net.embedding.weight


def _nested_units() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Linear(12, 12), nn.Sequential(Block(), Block(), nn.Linear(12, 12)), nn.Linear(12, 3)
    )
    net = copy.deepcopy(reference)
    fully_shard(net[1][0])
    fully_shard(net[1])
    fully_shard(net)
    owned = {id(p.sharded) for g in net[1]._fsdp_unit().groups for p in g.parameters}
    assert owned.isdisjoint(id(p) for p in net[1][0].parameters())
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 3, 12)
    for _ in range(2):
        reference(x).square().mean().backward()
        net(x[rank]).square().mean().backward()
    assert_same_grads(net, reference)


def _two_roots() -> None:
    torch.manual_seed(0)
    reference = nn.ModuleList([Block(), Block()])
    nets = copy.deepcopy(reference)
    for block in nets:
        fully_shard(block)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 3, 12)
    for _ in range(2):
        reference[1](reference[0](x)).square().mean().backward()
        nets[1](nets[0](x[rank])).square().mean().backward()
    assert_same_grads(nets, reference)


def _root_without_parameters() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Block(), Block(), Block())
    net = copy.deepcopy(reference)
    for block in net:
        fully_shard(block)
    fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    for _ in range(2):
        with record_collectives() as record:
            reference(x).square().mean().backward()
            net(x[dist.get_rank()]).square().mean().backward()
        assert_same_grads(net, reference)
    assert record.calls == {"all_gather": 5, "reduce_scatter": 3, "all_reduce": 1}, "one root"


class _RunsAnEarlierBackward(Block):
    """Runs the backward of an earlier output of its own before it ends."""

    def forward(self, x: torch.Tensor, earlier: torch.Tensor | None = None) -> torch.Tensor:
        """Return the block's output."""
        output = super().forward(x)
        if earlier is not None:
            earlier.square().mean().backward()
        return output


def _backward_inside_of_a_forward() -> None:
    torch.manual_seed(0)
    reference = _RunsAnEarlierBackward()
    net = fully_shard(copy.deepcopy(reference))
    x = torch.randn(2, 2 * dist.get_world_size(), 12)
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for module, inputs in ((reference, x), (net, x[:, rows])):
        earlier = module(inputs[0])
        module(inputs[1], earlier).square().mean().backward()
    assert_same_grads(net, reference)
    assert not net._fsdp_unit().is_at_work


def _explicit_unshard() -> None:
    _, net = pair()
    block = net.blocks[0]
    with torch.no_grad():
        net(*mine(batches(1)[0]))
    full = {n: full_tensor(p.detach()) for n, p in block.named_parameters()}
    handle = block.unshard(async_op=True)
    assert _shown(block) == {"sharded"}
    handle.wait()
    handle.wait()
    assert all(torch.equal(full[n], p) for n, p in block.named_parameters())
    block.reshard()
    assert _shown(block) == {"sharded"}
    block.unshard()
    assert _shown(block) == {"full"} and block._fsdp_unit().is_unsharded
    block.reshard()
    assert not block._fsdp_unit().is_unsharded


def _late_unshard(options: dict[str, object]) -> None:
    reference, net = pair(**options)
    block, batch = net.blocks[0], batches(1)[0]
    reference(*batch).backward()
    for use in ("backward", "forward", "reshard"):
        handle = block.unshard(async_op=True)
        if use == "reshard":
            block.reshard()
        else:
            with torch.set_grad_enabled(use == "backward"):
                loss = net(*mine(batch))
            if use == "backward":
                # Also if storage is kept for backward.
                handle.wait()
                assert _shown(net) == {"sharded"}, "between forward and backward"
                loss.backward()
        handle.wait()
        assert _shown(net) == {"sharded"}, use
        assert_same_grads(net, reference)
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


class Skips(nn.Module):
    """Two blocks of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
        """Return the output of the last block that runs."""
        x = self.first(x)
        return self.second(x) if is_whole else x


def _unshard_without_use() -> None:
    net = Skips()
    for block in (net.first, net.second):
        fully_shard(block)
    fully_shard(net)
    x = torch.randn(2, 12)
    net(x, is_whole=True).sum().backward()
    for is_late in (False, True):
        for is_training in (False, True):
            handle = net.second.unshard(async_op=True)
            if not is_late:
                handle.wait()
            with torch.set_grad_enabled(is_training):
                loss = net(x, is_whole=False).sum()
            if is_training:
                loss.backward()
            if is_late:
                handle.wait()
            assert not net.second._fsdp_unit().is_unsharded
            assert _shown(net) == {"sharded"}


def _explicit_prefetch() -> list[tuple[str, str]]:
    _, net = pair()
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[2]])
    net.blocks[2].set_modules_to_backward_prefetch([net.blocks[0]])
    reference = Net()
    batch = batches(1)[0]
    reference(*batch).backward()
    with record_collectives() as record:
        net(*mine(batch)).backward()
    assert_same_grads(net, reference)
    return [label for kind, label in record.events if kind == "all_gather"]


def test_the_user_may_choose_what_is_prefetched(ranks: Ranks) -> None:
    """The chosen unit is gathered right after the one it is chosen for, in both directions."""
    order = ranks(2).run(_explicit_prefetch)[0]
    assert order[order.index("blocks.0") + 1] == "blocks.2"


class Recomputing(nn.Sequential):
    """An embedding, a block that is recomputed, another block, and a head."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the logits."""
        x = checkpoint(self[1], self[0](tokens), use_reentrant=False)
        return self[3](self[2](x)).square().mean()


def _no_gather_in_backward() -> None:
    torch.manual_seed(0)
    reference = Recomputing(nn.Embedding(37, 12), Block(), Block(), nn.Linear(12, 3))
    net = copy.deepcopy(reference)
    for module in (net[0], net[1], net[2], net):
        fully_shard(module)
    for module in (net[0], net[1]):
        module.set_unshard_in_backward(False)
    tokens = torch.arange(6 * dist.get_world_size()).view(-1, 6)
    for _ in range(2):
        reference(tokens).backward()
        with record_collectives() as record:
            net(tokens[dist.get_rank()]).backward()
        assert_same_grads(net, reference)
    gathered = [label for kind, label in record.events if kind == "all_gather"]
    assert gathered == ["Recomputing", "0", "1", "2", "1"], "recomputation gathers by itself"


@pytest.mark.parametrize(
    "body",
    [
        _two_forwards,
        _two_forwards_two_backwards,
        _two_forwards_of_one_unit,
        _retained_graph,
        _unit_applied_twice,
        _units_without_the_root,
        _train_after_eval,
        _part_of_the_model,
        _frozen_and_detached,
        _structured,
        _containers,
        _keywords,
        _recomputed_without_backward,
        _forward_kept_by_one_rank,
        _output_kept_without_backward,
        _modules_as_one_unit,
        _nested_units,
        _two_roots,
        _root_without_parameters,
        _backward_inside_of_a_forward,
        _explicit_unshard,
        _no_gather_in_backward,
        _unshard_without_use,
    ],
)
def test_a_unit_may_be_driven_in_any_way(ranks: Ranks, body: object) -> None:
    """Each way gives the gradients of the unsharded model."""
    ranks(2).run(body)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"strategy": "optim"},
        {"strategy": "no_shard"},
    ],
    ids=str,
)
def test_a_handle_that_is_waited_for_late_shows_nothing(
    ranks: Ranks, options: dict[str, object]
) -> None:
    """After a forward or backward that used the gather, or a reshard, parameters are sharded."""
    ranks(2).run(_late_unshard, options)


def _phases_that_follow() -> set[tuple[str, str]]:
    _, net = pair()
    unit = net._fsdp_unit()
    allowed = set()
    for before in Phase:
        for after in Phase:
            unit._phase = before
            try:
                unit.phase = after
            except RuntimeError as error:
                assert before.name in str(error) and after.name in str(error)
                assert unit.phase is before
            else:
                allowed.add((before.name, after.name))
    return allowed


def test_phases_follow_one_another_by_a_table(ranks: Ranks) -> None:
    """Any transition that is not listed raises, and changes nothing."""
    assert ranks(1).run(_phases_that_follow) == [
        {
            ("RESTING", "FORWARD"),
            ("RESTING", "BACKWARD"),
            ("FORWARD", "RESTING"),
            ("BACKWARD", "RESTING"),
            # A forward that never ended begins anew, or runs the backward of an earlier one.
            ("FORWARD", "FORWARD"),
            ("FORWARD", "BACKWARD"),
        }
    ]

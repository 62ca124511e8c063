"""torch.compile of units, before and after wrapping: same numbers, hooks outside of the graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam, HybridDeviceOptimizer, Muon, full_tensor, fully_shard
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from tests.fsdp.toy import Net, adamw, assert_same_grads, batches, mine, shard
from tests.ranks import Ranks

# The tracer asks every input for .grad, and torch warns where it is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

NUM_BLOCKS = 2
MATRIX = pytest.mark.matrix("compile")
Made = tuple[nn.Module, Callable[..., torch.Tensor]]


def _compiled_before(backend: str, is_full: bool) -> Made:
    net = Net(NUM_BLOCKS)
    for block in net.blocks:
        block.compile(backend=backend, fullgraph=is_full)
    shard(net)
    for block in net.blocks:
        assert not block._forward_pre_hooks and not block._forward_hooks, "they run around it"
    return net, net


def _compiled_after(backend: str, is_full: bool) -> Made:
    net = shard(Net(NUM_BLOCKS))
    for block in net.blocks:
        block.compile(backend=backend, fullgraph=is_full)
        assert not block._forward_pre_hooks and not block._forward_hooks, "they run around it"
    return net, net


def _wrapper_before(backend: str, is_full: bool) -> Made:
    net = Net(NUM_BLOCKS)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, backend=backend, fullgraph=is_full)
    return shard(net), net


def _compiled_root(backend: str, is_full: bool) -> Made:
    net = shard(Net(NUM_BLOCKS))
    return net, torch.compile(net, backend=backend, fullgraph=is_full)


def _compiled_root_in_place(backend: str, is_full: bool) -> Made:
    net = shard(Net(NUM_BLOCKS))
    net.compile(backend=backend, fullgraph=is_full)
    return net, net


def _trains_alike(make: Callable[[str, bool], Made], backend: str, is_full: bool) -> int:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    eager = shard(Net(NUM_BLOCKS))
    net, call = make(backend, is_full)
    optimizers = [adamw(eager), adamw(net)]
    for step in range(2):
        batch = mine(batches(1, seed=step)[0])
        eager(*batch).backward()
        call(*batch).backward()
        for wanted, parameter in zip(eager.parameters(), net.parameters(), strict=True):
            # Sharded alike, hence compared as they lie; compiled kernels may round otherwise.
            torch.testing.assert_close(
                parameter.grad.to_local(), wanted.grad.to_local(), rtol=1e-4, atol=1e-6
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for wanted, parameter in zip(eager.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(
            full_tensor(parameter.detach()), full_tensor(wanted.detach()), rtol=1e-4, atol=1e-5
        )
    units = [net.get_submodule(f"blocks.{i}")._fsdp_unit() for i in range(NUM_BLOCKS)]
    assert not any(unit.is_at_work for unit in units)
    assert counters["stats"]["unique_graphs"] > 0, "something was compiled"
    breaks = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return breaks


@pytest.mark.parametrize(
    ("make", "is_full"),
    [
        (_compiled_before, True),
        (_compiled_after, False),
        (_wrapper_before, True),
        pytest.param(_compiled_before, False, marks=MATRIX),
        pytest.param(_compiled_after, True, marks=MATRIX),
        pytest.param(_wrapper_before, False, marks=MATRIX),
    ],
)
def test_a_compiled_unit_is_one_graph_without_hooks(
    ranks: Ranks, make: Callable[[str, bool], Made], is_full: bool
) -> None:
    """Compiled in place or by a wrapper, before or after fully_shard, fullgraph or not."""
    assert ranks(2).run(_trains_alike, make, "aot_eager", is_full) == [0, 0]


@pytest.mark.parametrize("make", [_compiled_root, _compiled_root_in_place])
def test_a_compiled_root_that_calls_units_in_a_loop_trains_alike(
    ranks: Ranks, make: Callable[[str, bool], Made]
) -> None:
    """Torch compiles no loop with a break in it; the units in it are graphs."""
    assert max(ranks(2).run(_trains_alike, make, "eager", False)) <= NUM_BLOCKS + 1


class Layer(nn.Module):
    """A linear layer and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tanh of a linear map."""
        return torch.tanh(self.linear(x))


class Straight(nn.Module):
    """Two layers and what is around them, without a loop, in which torch compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(4, 4), Layer(), Layer(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = torch.sin(self.a(self.first(x)))
        return self.last(torch.cos(self.b(x))).sum()


def _operators_of_graphs(strategy: str, is_in_place: bool) -> None:
    torch.manual_seed(0)
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append([n.target.__name__ for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    reference = Straight()
    x = torch.randn(3, 4, requires_grad=True)
    net = copy.deepcopy(reference)
    for part in (net.a, net.b, net):
        fully_shard(part, strategy=strategy)
    torch._dynamo.reset()
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    if is_in_place:
        net.compile(backend=backend)
    call = net if is_in_place else torch.compile(net, backend=backend)
    for _ in range(2):
        call(x).backward()
        reference(x).backward()
    assert_same_grads(net, reference)
    assert sum(breaks.values()) <= 3, breaks
    # Both layers are one graph, whichever module of the class runs it.
    assert sorted(map(len, graphs)) == [1, 1, 2, 2], graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_compiled_root_has_one_break_a_unit_and_compiles_what_is_between(
    ranks: Ranks, num_ranks: int
) -> None:
    """The units' forwards are graphs too, and the gradients those of the eager model."""
    for strategy in ("no_shard", "optim_grads_params"):
        for is_in_place in (False, True):
            ranks(num_ranks).run(_operators_of_graphs, strategy, is_in_place)


def _many_layers() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    net = nn.Sequential(*(Layer() for _ in range(12)))
    for layer in net:
        fully_shard(layer)
        layer.compile(backend="eager", fullgraph=True)
    fully_shard(net)(torch.ones(2, 4, requires_grad=True)).sum().backward()
    # Twelve are more than torch compiles of one function before it gives up.
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_layers_of_one_class_are_compiled_once(ranks: Ranks) -> None:
    """Their class is one class after fully_shard too."""
    ranks(2).run(_many_layers)


def _whole_graphs() -> None:
    torch._dynamo.reset()
    net = Straight()
    for part in (net.a, net.b, net):
        fully_shard(part)
    x = torch.ones(2, 4)
    with record_collectives() as record:
        for refuse in (lambda: net.compile(fullgraph=True), lambda: net.compile(True)):
            with pytest.raises(NotImplementedError, match=r"the unit 'a'.*unit\.compile"):
                refuse()
    assert not record.calls
    with pytest.raises(torch._dynamo.exc.Unsupported, match="megafsdp gathers a unit"):
        torch.compile(net, backend="eager", fullgraph=True)(x)
    wanted = net(x)
    torch.testing.assert_close(net(x), wanted)
    part = torch.compile(net.a, backend="eager", fullgraph=True)
    torch.testing.assert_close(part(x), net.a(x))
    torch._dynamo.reset()


def test_one_graph_of_several_units_is_refused_by_name(ranks: Ranks) -> None:
    """One unit is one graph; of a root the error says which calls compile it."""
    ranks(2).run(_whole_graphs)


STEPS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "FusedAdam": lambda net: FusedAdam(net.parameters(), lr=1e-2, eps=1e-5, max_grad_norm=1.0),
    "Muon": lambda net: Muon(net.named_parameters(), lr=1e-2),
    "HybridDeviceOptimizer": lambda net: HybridDeviceOptimizer(net.parameters(), lr=1e-2),
    "AdamW(fused)": lambda net: adamw(net, fused=True),
    "AdamW": adamw,
}


def _compiled_steps(strategy: str, name: str) -> None:
    torch._dynamo.reset()
    nets = [shard(Net(1), strategy=strategy) for _ in range(2)]
    eager, compiled = [STEPS[name](net) for net in nets]
    steps = [eager.step, torch.compile(compiled.step, backend="eager")]
    for seed in range(3):
        for optimizer, net, step in zip((eager, compiled), nets, steps, strict=True):
            # A schedule changes it between steps.
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + seed)
            net(*mine(batches(1, seed=seed)[0])).backward()
            step()
            optimizer.zero_grad()
    # torch's loops take square roots of compiled steps in another order.
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if name == "AdamW" else {"rtol": 0, "atol": 0}
    # A state dict waits for a step beside this thread.
    wanted, found = (net.state_dict() for net in nets)
    for fqn in wanted:
        torch.testing.assert_close(local_tensor(found[fqn]), local_tensor(wanted[fqn]), **tolerance)
    torch._dynamo.reset()


# torch imports its own compiler, which uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_compiled_step_is_the_step(ranks: Ranks, num_ranks: int) -> None:
    """Of our optimizers, which run as they are, and of torch's over sharded parameters."""
    for strategy in ("no_shard", "optim_grads_params"):
        for name in STEPS:
            ranks(num_ranks).run(_compiled_steps, strategy, name)


def _fails_inside() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].compile(backend="eager")
    fully_shard(net[1])
    fully_shard(net)
    with pytest.raises(RuntimeError, match="shape"):
        net[1](torch.ones(2, 5))
    assert all(hasattr(p, "device_mesh") for p in net.parameters()), "sharded again"
    torch._dynamo.reset()


def test_an_exception_in_a_compiled_unit_leaves_it_at_rest(ranks: Ranks) -> None:
    """As in one that is not compiled."""
    ranks(2).run(_fails_inside)

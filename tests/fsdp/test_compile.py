"""torch.compile of units and roots: same numbers, operators in graphs, hooks outside of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

# Before ranks are forked: each one that compiles would take a second to import these for itself.
import torch._functorch.aot_autograd
import torch._inductor.pattern_matcher
from torch import nn
from torch.nn import functional as F

from megafsdp import full_tensor, fully_shard
from megafsdp.fsdp.runtime.unit import units_below
from tests.fsdp.toy import Net, adamw, batches, mine, shard
from tests.ranks import Ranks

# The tracer asks every input for .grad, and torch warns where it is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

NUM_BLOCKS = 2
NUM_STEPS = 2
# Of a block: norm, up, relu, down, add.
NUM_BLOCK_OPERATORS = 5
MATRIX = pytest.mark.matrix("compile")
Made = tuple[nn.Module, Callable[..., torch.Tensor]]


class Unrolled(Net):
    """Net without a loop: the compiler runs a frame as it is whose graph breaks in a loop."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.blocks[0](self.embedding(tokens))
        x = self.blocks[1](x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _compiled_before(backend: object, is_full: bool) -> Made:
    net = Net(NUM_BLOCKS)
    for block in net.blocks:
        block.compile(backend=backend, fullgraph=is_full)
    return shard(net), net


def _compiled_after(backend: object, is_full: bool) -> Made:
    net = shard(Net(NUM_BLOCKS))
    for block in net.blocks:
        block.compile(backend=backend, fullgraph=is_full)
    return net, net


def _wrapper_before(backend: object, is_full: bool) -> Made:
    net = Net(NUM_BLOCKS)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, backend=backend, fullgraph=is_full)
    return shard(net), net


def _wrapper_after(backend: object, is_full: bool) -> Made:
    net = shard(Net(NUM_BLOCKS))
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, backend=backend, fullgraph=is_full)
    return net, net


def _compiled_root(backend: object, is_full: bool, **options: object) -> Made:
    net = shard(Unrolled(NUM_BLOCKS), **options)
    return net, torch.compile(net, backend=backend, fullgraph=is_full)


def _compiled_root_in_place(backend: object, is_full: bool, **options: object) -> Made:
    net = shard(Unrolled(NUM_BLOCKS), **options)
    net.compile(backend=backend, fullgraph=is_full)
    return net, net


class _Counting:
    """A backend that counts what it compiles and what runs."""

    def __init__(self, name: str) -> None:
        self.num_graphs = self.num_operators_run = 0
        self._compile = torch._dynamo.lookup_backend(name)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled = self._compile(graph, inputs)
        num_operators = sum(node.op.startswith("call") for node in graph.graph.nodes)
        self.num_graphs += 1

        def run(*args: object) -> object:
            self.num_operators_run += num_operators
            return compiled(*args)

        return run


def _trains_alike(
    make: Callable[[object, bool], Made], name: str, is_full: bool
) -> tuple[int, int, float]:
    """Return the numbers of breaks, of graphs, and of operators that run in them in a forward."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    backend = _Counting(name)
    eager = shard(Net(NUM_BLOCKS))
    net, call = make(backend, is_full)
    optimizers = [adamw(eager), adamw(net)]
    for step in range(NUM_STEPS):
        batch = mine(batches(1, seed=step)[0])
        eager(*batch).backward()
        call(*batch).backward()
        for wanted, parameter in zip(eager.parameters(), net.parameters(), strict=True):
            # Compiled kernels may round otherwise.
            torch.testing.assert_close(
                full_tensor(parameter.grad), full_tensor(wanted.grad), rtol=1e-4, atol=1e-6
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for wanted, parameter in zip(eager.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(
            full_tensor(parameter.detach()), full_tensor(wanted.detach()), rtol=1e-4, atol=1e-5
        )
    assert not any(unit.is_at_work for unit in units_below([net]).values())
    breaks = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return breaks, backend.num_graphs, backend.num_operators_run / NUM_STEPS


@pytest.mark.parametrize(
    ("make", "is_full"),
    [
        (_compiled_before, True),
        (_compiled_after, False),
        (_wrapper_before, True),
        (_wrapper_after, True),
        pytest.param(_compiled_before, False, marks=MATRIX),
        pytest.param(_compiled_after, True, marks=MATRIX),
        pytest.param(_wrapper_before, False, marks=MATRIX),
    ],
)
def test_a_compiled_unit_is_one_graph_without_hooks(
    ranks: Ranks, make: Callable[[object, bool], Made], is_full: bool
) -> None:
    """Compiled in place or by a wrapper, before or after fully_shard, fullgraph or not."""
    counted = ranks(2).run(_trains_alike, make, "aot_eager", is_full)
    # Blocks are alike and share the graph.
    assert counted == [(0, 1, NUM_BLOCKS * NUM_BLOCK_OPERATORS)] * 2


def _num_operators() -> int:
    backend = _Counting("eager")
    torch.compile(Unrolled(NUM_BLOCKS), backend=backend, fullgraph=True)(*mine(batches(1)[0]))
    torch._dynamo.reset()
    return backend.num_operators_run


@pytest.fixture(scope="module")
def num_operators(ranks: Ranks) -> int:
    """Return how many operators a forward of plain torch runs in one graph."""
    return ranks(1).run(_num_operators)[0]


@pytest.mark.parametrize(
    ("make", "num_ranks"),
    [
        (partial(_compiled_root, strategy="no_shard"), 1),
        (_compiled_root, 2),
        (_compiled_root_in_place, 1),
        (partial(_compiled_root_in_place, strategy="no_shard"), 2),
    ],
)
def test_a_compiled_root_breaks_its_graph_once_a_unit_and_has_all_operators_in_graphs(
    ranks: Ranks, make: Callable[[object, bool], Made], num_ranks: int, num_operators: int
) -> None:
    """Graphs run what plain torch has in one; no break is the root's."""
    breaks, _, num_run = ranks(num_ranks).run(_trains_alike, make, "eager", False)[0]
    assert breaks <= NUM_BLOCKS + 1
    assert num_run == num_operators


def _refuses_full_graphs(strategy: str) -> None:
    compiled = {"backend": "eager", "fullgraph": True}
    batch = mine(batches(1)[0])
    net, in_place, inner, outer = (shard(Net(NUM_BLOCKS), strategy=strategy) for _ in range(4))
    loss = net(*batch).detach()
    in_place.compile(**compiled)
    inner.blocks[0].compile(**compiled)
    calls = (torch.compile(net, **compiled), in_place, torch.compile(inner, **compiled))
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"unit 'blocks\.0'.*block\.compile\(fullgraph=True\)"
        ):
            call(*batch)
    with pytest.raises(RuntimeError, match="unit 'Net'"):
        torch.compile(lambda *args: outer(*args), **compiled)(*batch)
    torch._dynamo.reset()
    # They rest, as the same nets without the option do.
    for each in (net, inner, outer):
        each(*batch).backward()
        torch.testing.assert_close(each(*batch).detach(), loss, rtol=0, atol=0)


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "no_shard"), (2, "optim_grads_params")])
def test_one_graph_around_units_is_refused_by_the_name_of_the_unit(
    ranks: Ranks, num_ranks: int, strategy: str
) -> None:
    """A root, a root around a unit that is one graph itself, and a function that calls a root."""
    ranks(num_ranks).run(_refuses_full_graphs, strategy)


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

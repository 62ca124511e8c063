"""Optimizer steps under torch.compile: the bits of eager steps, and code around them in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import Optimizer

from megafsdp import FusedAdam, clip_grad_norm_
from megafsdp.optimizer import HybridDeviceOptimizer, LossScaler, Muon
from tests.fsdp.toy import Net, adamw, batches, fused_adamw, mine, shard
from tests.ranks import Ranks

# The tracer asks every input for .grad, and torch warns where it is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

NUM_STEPS = 3
WORLDS = pytest.mark.parametrize(
    ("num_ranks", "strategy"), [(1, "no_shard"), (2, "optim_grads_params")]
)
Make = Callable[[nn.Module], Optimizer]


def _fused_adam(net: nn.Module) -> Optimizer:
    return FusedAdam(net.parameters(), lr=1e-2)


def _clipping_adam(net: nn.Module) -> Optimizer:
    return FusedAdam(net.parameters(), lr=1e-2, max_grad_norm=0.1)


def _capturable_adam(net: nn.Module) -> Optimizer:
    return FusedAdam(net.parameters(), lr=1e-2, capturable=True)


def _muon(net: nn.Module) -> Optimizer:
    return Muon([p for p in net.parameters() if p.ndim == 2], lr=1e-2)


def _hybrid(net: nn.Module) -> Optimizer:
    return HybridDeviceOptimizer(net.parameters(), lr=1e-2)


def _assert_same(eager: nn.Module, compiled: nn.Module) -> None:
    for wanted, parameter in zip(eager.parameters(), compiled.parameters(), strict=True):
        both = [p.detach() for p in (wanted, parameter)]
        own, other = (p.to_local() if hasattr(p, "to_local") else p for p in both)
        assert torch.equal(own, other)


def _steps_have_the_bits_of_eager(make: Make, strategy: str | None) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    start = Net(1).embedding.weight.detach()
    nets = [Net(1) if strategy is None else shard(Net(1), strategy=strategy) for _ in range(2)]
    optimizers = [make(net) for net in nets]
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step, backend="aot_eager")]
    for seed in range(NUM_STEPS):
        for net, step, optimizer, scheduler in zip(
            nets, steps, optimizers, schedulers, strict=True
        ):
            net(*mine(batches(1, seed=seed)[0])).backward()
            step()
            optimizer.zero_grad()
            scheduler.step()
        _assert_same(*nets)
    assert optimizers[1].param_groups[0]["lr"] == 1e-2 * 0.5**NUM_STEPS
    counts = [[s.get("step") for s in optimizer.state.values()] for optimizer in optimizers]
    assert counts[0] == counts[1]
    moved = nets[1].embedding.weight.detach()
    moved = moved.full_tensor() if strategy is not None else moved
    assert not torch.equal(moved, start)
    assert not counters["stats"], "nothing of the step is in a graph"
    torch._dynamo.reset()


MATRIX = pytest.mark.matrix("compile")
MAKES = (_fused_adam, _clipping_adam, _capturable_adam, _muon, _hybrid, adamw, fused_adamw)


@pytest.mark.parametrize(
    ("make", "num_ranks", "strategy"),
    [
        (_fused_adam, 1, "no_shard"),
        *((make, 2, "optim_grads_params") for make in MAKES),
        *(pytest.param(make, 1, "no_shard", marks=MATRIX) for make in MAKES[1:]),
    ],
)
def test_a_compiled_step_of_sharded_parameters_has_the_bits_of_an_eager_one(
    ranks: Ranks, make: Make, num_ranks: int, strategy: str
) -> None:
    """With learning rates of a scheduler and counts of steps; torch's AdamW too."""
    ranks(num_ranks).run(_steps_have_the_bits_of_eager, make, strategy)


@pytest.mark.parametrize("make", [_clipping_adam, _muon])
def test_a_compiled_step_of_plain_parameters_has_the_bits_of_an_eager_one(
    ranks: Ranks, make: Make
) -> None:
    """Without any call of fully_shard()."""
    ranks(1).run(_steps_have_the_bits_of_eager, make, None)


def _trains_in_one_function(strategy: str) -> None:
    torch._dynamo.reset()
    operators: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        operators.extend(node.target for node in graph.graph.nodes)
        return graph

    def train(net: nn.Module, optimizer: Optimizer, batch: tuple[torch.Tensor, ...]) -> object:
        loss = net(*batch)
        loss.backward()
        norm = clip_grad_norm_(net, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return torch.sinh(loss.detach()), norm

    eager, net = (shard(Net(1), strategy=strategy) for _ in range(2))
    optimizers = [adamw(eager), adamw(net)]
    compiled = torch.compile(train, backend=backend)
    for seed in range(NUM_STEPS):
        batch = mine(batches(1, seed=seed)[0])
        assert train(eager, optimizers[0], batch) == compiled(net, optimizers[1], batch)
        _assert_same(eager, net)
    # Before the step a block's, after it the function's.
    assert torch.relu in operators and torch.sinh in operators
    torch._dynamo.reset()


@WORLDS
def test_a_training_step_may_be_one_compiled_function(
    ranks: Ranks, num_ranks: int, strategy: str
) -> None:
    """Forward, backward, clipping and step run eagerly where they must, the rest in graphs."""
    ranks(num_ranks).run(_trains_in_one_function, strategy)


def _scales(make: Callable[[], LossScaler | torch.amp.GradScaler], strategy: str) -> None:
    torch._dynamo.reset()
    nets = [shard(Net(1), strategy=strategy) for _ in range(2)]
    optimizers, scalers = [_fused_adam(net) for net in nets], [make(), make()]
    for seed in range(NUM_STEPS):
        for i, (net, optimizer, scaler) in enumerate(zip(nets, optimizers, scalers, strict=True)):
            scaler.scale(net(*mine(batches(1, seed=seed)[0]))).backward()
            step = torch.compile(scaler.step, backend="aot_eager") if i else scaler.step
            step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        _assert_same(*nets)
    assert all(len(optimizer.state) for optimizer in optimizers), "they did step"
    torch._dynamo.reset()


# torch instantiates an autograd function where it traces full_tensor() of a replicated gradient.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("make", [LossScaler, partial(torch.amp.GradScaler, "cpu")])
@WORLDS
def test_a_compiled_step_of_a_scaler_has_the_bits_of_an_eager_one(
    ranks: Ranks,
    make: Callable[[], LossScaler | torch.amp.GradScaler],
    num_ranks: int,
    strategy: str,
) -> None:
    """It unscales, checks and steps; torch's does so by operators on sharded gradients."""
    ranks(num_ranks).run(_scales, make, strategy)


def _compiles_what_is_not_sharded() -> None:
    torch._dynamo.reset()
    sharded, plain = shard(Net(1)), nn.Linear(3, 3)
    sharded(*mine(batches(1)[0])).backward()
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(2, 3)).sum().backward()

    def fail() -> float:
        raise RuntimeError("of the closure")

    with pytest.raises(RuntimeError, match="of the closure"):
        torch.compile(adamw(sharded).step, backend="eager")(fail)
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.compile(optimizer.step, backend="eager")()
    assert counters["stats"]["unique_graphs"] == 1
    # Or torch remembers that it gave up the frame of the step.
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"fully_shard\(\).*Leave out fullgraph=True"):
        torch.compile(adamw(sharded).step, backend="eager", fullgraph=True)()
    torch._dynamo.reset()


# torch imports its compiler backend where it traces a step of its own.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_steps_of_plain_parameters_are_compiled_beside_sharded_ones(ranks: Ranks) -> None:
    """Also after a compiled step over sharded ones has raised; one graph of a step is refused."""
    ranks(1).run(_compiles_what_is_not_sharded)

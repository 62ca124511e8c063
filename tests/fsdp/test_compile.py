"""torch.compile of units, before and after wrapping: same numbers, hooks outside of the graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megafsdp import full_tensor, fully_shard
from tests.fsdp.toy import Net, adamw, batches, mine, shard
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
def test_a_compiled_root_breaks_its_graph_at_the_units_hooks(
    ranks: Ranks, make: Callable[[str, bool], Made]
) -> None:
    """Compiling the root gives the numbers of the eager model."""
    assert min(ranks(2).run(_trains_alike, make, "eager", False)) > 0


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

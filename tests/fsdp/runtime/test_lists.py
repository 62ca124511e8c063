"""Lists of modules as one unit, of which a forward runs some: a head that is called by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafsdp import OffloadPolicy, clip_grad_norm_, full_tensor, fully_shard, microbatch
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.runtime.unit import units_below
from tests.end_to_end.strategy_cases import ENGINES, MeshShape, mesh_of_shape
from tests.fsdp.toy import (
    VOCABULARY,
    WIDTH,
    Block,
    assert_same_grads,
    assert_same_parameters,
    batches,
    fused_adamw,
    mine,
    with_grads,
)
from tests.ranks import Ranks

NUM_CHUNKS = 3
NUM_STEPS = 2


class Headless(nn.Module):
    """Embedding, blocks, norm and a head, which the forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the head is to take."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _sharded(net: Headless, engine: str, shape: MeshShape, **options: object) -> Headless:
    options = {**ENGINES[engine].options, "mesh": mesh_of_shape(shape), **options}
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard([net.norm, net.head], **options)
    return fully_shard(net, **options)


def _loss(net: Headless, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net.head(hidden).flatten(0, 1), labels.flatten())


def _chunks(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(t.chunk(NUM_CHUNKS, dim=1) for t in tensors), strict=True))


def _in_one(net: Headless, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    _loss(net, net(tokens), labels).backward()


def _summed_chunks(net: Headless, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    losses = [_loss(net, *chunk) for chunk in _chunks(net(tokens), labels)]
    (sum(losses) / NUM_CHUNKS).backward()


def _chunk_by_chunk(net: Headless, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    """Go back through the head after each chunk, and through the rest at the end."""
    hidden = net(tokens)
    leaf = hidden.detach().requires_grad_()
    for chunk in _chunks(leaf, labels):
        (_loss(net, *chunk) / NUM_CHUNKS).backward()
    hidden.backward(leaf.grad)


def _chunks_reduced_once(net: Headless, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    """The same, with a head that stays gathered and is reduced with the last chunk."""
    hidden = net(tokens)
    leaf = hidden.detach().requires_grad_()
    for k, chunk in enumerate(_chunks(leaf, labels)):
        _keep_head(net, k < NUM_CHUNKS - 1)
        (_loss(net, *chunk) / NUM_CHUNKS).backward()
    hidden.backward(leaf.grad)


def _keep_head(net: Headless, is_kept: bool) -> None:
    if hasattr(net.head, "set_reshard_after_backward"):
        net.head.set_reshard_after_backward(not is_kept)
        net.head.set_requires_gradient_sync(not is_kept)


WAYS = (_in_one, _summed_chunks, _chunk_by_chunk, _chunks_reduced_once)


def _assert_at_rest(net: nn.Module) -> None:
    units = units_below([net]).values()
    assert not any(unit.is_at_work or unit.is_unsharded for unit in units)
    assert all(isinstance(p, DTensor) for p in net.parameters())
    net.state_dict()


def _one_process(way: Callable[..., None]) -> list[nn.Module]:
    """Return the net with the gradients of each step, and then as the last step leaves it."""
    net = Headless()
    optimizer = fused_adamw(net)
    steps = []
    for step in range(NUM_STEPS):
        for batch in batches(step + 1, seed=step):
            way(net, *batch)
        steps.append(with_grads(net))
        optimizer.step()
        optimizer.zero_grad()
    return [*steps, net]


def _trains(
    engine: str, shape: MeshShape, way: Callable[..., None], one_process: list[nn.Module]
) -> None:
    net = _sharded(Headless(), engine, shape)
    optimizer = fused_adamw(net)
    *steps, end = one_process
    for step, reference in enumerate(steps):
        for k, batch in enumerate(batches(step + 1, seed=step)):
            with microbatch(net, is_last=k == step):
                way(net, *mine(batch))
            _assert_at_rest(net)
        assert_same_grads(net, reference)
        wanted = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        torchs = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        for norm in (clip_grad_norm_(net.parameters(), 1e9), full_tensor(torchs)):
            torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(net, end, rtol=1e-4, atol=1e-5)


def _shapes(engine: str, world: int) -> list[MeshShape]:
    return [(world,)] if len(ENGINES[engine].meshes[0]) == 1 else [(1, world), (world, 1)]


def _trains_in_every_strategy(way: Callable[..., None]) -> None:
    one_process = _one_process(way)
    for engine in ENGINES:
        for shape in dict.fromkeys(_shapes(engine, dist.get_world_size())):
            try:
                _trains(engine, shape, way, one_process)
            except Exception as error:
                error.add_note(f"{engine} on {shape}")
                raise


@pytest.mark.parametrize(
    ("way", "num_ranks"), [*((way, 1) for way in WAYS), *zip(WAYS, (2, 2, 3, 2), strict=True)]
)
def test_a_head_outside_of_the_roots_forward_leaves_nothing_at_work(
    ranks: Ranks, way: Callable[..., None], num_ranks: int
) -> None:
    """Gradients, norms and steps are torch's; between backwards all parameters are sharded."""
    ranks(num_ranks).run(_trains_in_every_strategy, way)


def _num_events(way: Callable[..., None], label: str) -> list[str]:
    net = _sharded(Headless(), "optim_grads_params", (2,))
    for _ in range(3):
        with record_collectives() as record:
            way(net, *mine(batches(1)[0]))
    return [kind for kind, of in record.events if of == label]


def test_a_head_on_what_the_root_returned_is_gathered_and_reduced_with_the_norm(
    ranks: Ranks,
) -> None:
    """One pass: the list is kept between forward and backward, as the last unit is."""
    for way in (_in_one, _summed_chunks):
        assert ranks(2).run(_num_events, way, "norm")[0] == ["all_gather", "reduce_scatter"]


def _order_of_gathers() -> list[str]:
    net = _sharded(Headless(), "optim_grads_params", (2,))
    for _ in range(3):
        with record_collectives() as record:
            _chunk_by_chunk(net, *mine(batches(1)[0]))
    labels = [f"{kind} {label}" for kind, label in record.events]
    return labels[labels.index("all_gather blocks.1", labels.index("reduce_scatter norm")) :]


def test_backwards_of_chunks_do_not_break_the_order_of_the_roots(ranks: Ranks) -> None:
    """The gather of a block is under way before the block after it is reduced."""
    order = ranks(2).run(_order_of_gathers)[0]
    assert order.index("all_gather blocks.0") < order.index("reduce_scatter blocks.1")
    assert order.count("all_gather blocks.1") == 1


def _head_alone(engine: str) -> None:
    reference = Headless()
    net = _sharded(copy.deepcopy(reference), engine, (2,))
    hidden = torch.randn(2, 3, WIDTH)
    for is_root_first in (False, True):
        with torch.no_grad():
            if is_root_first:
                net(torch.zeros(1, 2, dtype=torch.long))
                _assert_at_rest(net)
            torch.testing.assert_close(net.head(hidden), reference.head(hidden))
        _assert_at_rest(net)
    # With a graph that has no backward.
    net.head(hidden)
    assert all(isinstance(p, DTensor) for p in net.parameters())
    net.state_dict()
    _in_one(net, *mine(batches(1)[0]))
    _assert_at_rest(net)


def _without_a_root(engine: str) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    reference = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
    net = copy.deepcopy(reference)
    first, second, head = net
    fully_shard([first, second, head], **ENGINES[engine].options)
    world, rank = dist.get_world_size(), dist.get_rank()
    for step, parts in enumerate(([0, 1, 2], [2], [2, 2], [1], [0, 1, 2], [1, 0], [0, 1, 2])):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(world, 3, WIDTH, generator=generator)
        with record_collectives() as record:
            for model, y in ((reference, x), (net, x[rank])):
                outputs = torch.zeros(())
                for part in parts:
                    y, outputs = (
                        (model[part](y), outputs) if part < 2 else (y, outputs + model[2](y))
                    )
                (y.square().mean() + outputs.square().mean()).backward()
        assert_same_grads(net, reference)
        assert all(isinstance(p, DTensor) for p in net.parameters())
        unit = first._fsdp_unit()
        assert not (unit.is_at_work or unit.is_unsharded)
        with torch.no_grad():
            net[1](x)
        assert not (unit.is_at_work or unit.is_unsharded)
    return record.events


class _LooksAside(Headless):
    """Norms what it recomputes, for a look that has no gradient."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the head is to take."""

        def region(x: torch.Tensor) -> torch.Tensor:
            self.norm(x.detach())
            return self.blocks[0](x)

        return checkpoint(region, self.embedding(tokens), use_reentrant=False)


def _recomputed_aside(engine: str) -> None:
    reference = _LooksAside()
    net = _sharded(copy.deepcopy(reference), engine, (2,))
    for batch in batches(2):
        _chunk_by_chunk(reference, *batch)
        _chunk_by_chunk(net, *mine(batch))
        _assert_at_rest(net)
    assert_same_grads(net, reference)


def _parts_alone() -> None:
    for engine in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        _head_alone(engine)
        _recomputed_aside(engine)
        events = _without_a_root(engine)
        if engine == "optim_grads_params":
            kinds = [kind for kind, _ in events]
            assert kinds == ["all_gather", "reduce_scatter", "all_reduce"], "one run, kept until"


def test_modules_of_a_list_run_in_any_number(ranks: Ranks) -> None:
    """Without gradients, without a backward and without a root; at rest after each of them."""
    ranks(2).run(_parts_alone)


class Pair(nn.Module):
    """Two layers with a tied bias, each of which adds to the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(5, 7)
        self.second.bias = self.first.bias

    def forward(self, x: torch.Tensor, uses_first: bool) -> torch.Tensor:
        """Return a loss."""
        loss = 3 * self.second(x).square().mean()
        return loss + self.first(x).square().mean() if uses_first else loss


def _clear_one_module(engine: str, shape: MeshShape, is_offloaded: bool) -> None:
    options = {**ENGINES[engine].options, "mesh": mesh_of_shape(shape)}
    options["offload_policy"] = OffloadPolicy(params=is_offloaded, pin_memory=False)
    reference = Pair()
    net = copy.deepcopy(reference)
    fully_shard([net.first, net.second], **options)
    fully_shard(net, **options)
    world, rank = dist.get_world_size(), dist.get_rank()
    batches = torch.randn(4, world, 3, 5)

    def backward(step: int, users_of_first: Sequence[int] = range(world)) -> None:
        for each in range(world):
            (reference(batches[step][each], each in users_of_first) / world).backward()
        net(batches[step][rank], rank in users_of_first).backward()

    # One sum in `.grad`, one over the inner axis alone, and one that is not reduced.
    backward(0)
    net.set_requires_all_reduce(False)
    with microbatch(net, is_last=False):
        backward(1)
    net.set_requires_gradient_sync(False)
    backward(2)
    for module in (reference, net):
        module.first.zero_grad()
    net.set_requires_gradient_sync(True)
    net.set_requires_all_reduce(True)
    # Of the bias too, which both have.
    assert reference.second.weight.grad is not None and reference.second.bias.grad is None
    backward(3)
    assert_same_grads(net, reference)
    for module in (reference, net):
        module.second.zero_grad()
    assert net.second.weight.grad is None and net.first.weight.grad is not None
    backward(1)
    assert_same_grads(net, reference)
    # What waited is neither zeros later nor a part of sums, also where one rank alone had it.
    for earlier, later in (((0, 1), ()), ((1,), (0, 1))):
        with microbatch(net, is_last=False):
            backward(0, earlier)
        for module in (reference, net):
            module.first.zero_grad()
        backward(2, later)
        assert_same_grads(net, reference)


@pytest.mark.parametrize(
    ("engine", "shape"),
    [
        ("no_shard", (2,)),
        ("optim", (2,)),
        ("optim_grads_params", (2,)),
        ("hsdp", (1, 2)),
        ("hsdp", (2, 1)),
        ("hfsdp", (2, 1)),
    ],
)
def test_clearing_one_module_of_a_list_leaves_the_sums_of_the_others(
    ranks: Ranks, engine: str, shape: MeshShape
) -> None:
    """Whether they are in `.grad`, or wait for the last microbatch in full size or as shards."""
    for is_offloaded in (False, True):
        if not (is_offloaded and engine == "no_shard"):
            ranks(2).run(_clear_one_module, engine, shape, is_offloaded)

"""Gathers into registered slabs: equal gradients, slabs of one user, bytes by formula."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from megafsdp import MixedPrecisionPolicy, fully_shard, summon_full_params
from megafsdp.buffer.comm.user_buffers import PlannedPool
from megafsdp.device.memory import Category, FlatStorage, Slab, Slabs
from megafsdp.fsdp.runtime import slabs as runtime_slabs
from megafsdp.fsdp.runtime.unit import units_below
from tests.fsdp.toy import Net, batches, full_grads, mine, pair, shard
from tests.ranks import Ranks

WIDTH, NUM_STEPS = 8, 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_fp32=("LayerNorm",))


class Turns:
    """The slabs that storages took, in order; asserts that no two storages are in one at once.

    Attributes:
        taken: Numbers of the slabs, in the order in which they were first taken.
    """

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._numbers: dict[int, int] = {}
        self._users: dict[int, FlatStorage] = {}
        self._slabs: list[Slab] = []

    def note(self, storage: FlatStorage) -> None:
        """Note that a storage was allocated."""
        slab = storage._slab
        if slab is None:
            return
        before = self._users.get(id(slab))
        assert before in (None, storage) or before._slab is not slab, "one at a time"
        self._users[id(slab)] = storage
        # Alive, so that no other slab gets its id.
        self._slabs.append(slab)
        self.taken.append(self._numbers.setdefault(id(slab), len(self._numbers)))


@contextlib.contextmanager
def registering() -> Iterator[Turns]:
    """Take any process group for one of NCCL, whose pools are planned ones."""
    turns, allocate = Turns(), FlatStorage.allocate

    def noting(self: FlatStorage) -> None:
        if not self.is_allocated:
            allocate(self)
            turns.note(self)

    names = ("why_not_registered", "registered_pools")
    kept = [getattr(runtime_slabs, name) for name in names]
    runtime_slabs.why_not_registered = lambda *_: None
    runtime_slabs.registered_pools = lambda *_: PlannedPool
    FlatStorage.allocate = noting
    try:
        yield turns
    finally:
        FlatStorage.allocate = allocate
        for name, value in zip(names, kept, strict=True):
            setattr(runtime_slabs, name, value)


class Transposed(nn.Module):
    """A layer whose graph has two views of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the weight's transpose, and the weight."""
        return x + torch.tanh(x @ self.weight.t()) @ self.weight


class Chain(nn.Module):
    """Layers in an order that can be changed, with or without recomputation."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Transposed() for _ in range(num_layers))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.order = list(range(num_layers))
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for index in self.order:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return (x * self.scale).square().mean()


class Nested(nn.Module):
    """A layer around a layer around a layer: each is unsharded while those inside run."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = Transposed()
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the own layer before and after those inside."""
        x = self.own(x)
        return x if self.inner is None else self.own(self.inner(x))


def _x(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def _one_forward(net: nn.Module, step: int) -> None:
    net(_x(step)).backward()


def _two_forwards(net: nn.Module, step: int) -> None:
    losses = [net(_x(step)), net(_x(step + 100))]
    sum(losses).backward()


def _kept_graph(net: nn.Module, step: int) -> None:
    loss = net(_x(step))
    loss.backward(retain_graph=True)
    net(_x(step + 100)).backward()
    loss.backward()


def _summoned(net: nn.Module, step: int) -> None:
    loss = net(_x(step))
    # All units are in memory at once, more than there are slabs.
    with summon_full_params(net):
        pass
    loss.backward()


def _other_order(net: nn.Module, step: int) -> None:
    net.order = [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 2, 0, 4, 0]][step]
    net(_x(step)).backward()


def _recomputed(net: nn.Module, step: int) -> None:
    net.recomputes = True
    net(_x(step)).backward()


def _frozen(net: nn.Module, step: int) -> None:
    for layer in net.layers[1:4]:
        layer.requires_grad_(step == 2)
    net(_x(step)).backward()


def _shard_chain(net: nn.Module, **options: object) -> nn.Module:
    for layer in net.layers:
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def _shard_nested(net: nn.Module, **options: object) -> nn.Module:
    if net.inner is not None:
        _shard_nested(net.inner, **options)
    return fully_shard(net, **options)


def _loss_of_nested(net: nn.Module, step: int) -> None:
    net(_x(step)).square().mean().backward()


# In groups of one rank forward reads the main weight, unless it computes in another dtype.
NARROW = MixedPrecisionPolicy(torch.bfloat16)
Run = Callable[[nn.Module, int], None]
Case = tuple[Run, dict[str, object], bool]
# What runs in a step, options, and whether some storages find all slabs in use.
CASES: dict[str, Case] = {
    "views": (_one_forward, {}, False),
    "two forwards": (_two_forwards, {}, False),
    "two backwards of a graph": (_kept_graph, {}, False),
    "recomputation": (_recomputed, {}, False),
    "other orders": (_other_order, {}, False),
    "other orders, prefetch 2": (_other_order, {"prefetch": 2}, False),
    "frozen": (_frozen, {}, False),
    "kept after forward": (_one_forward, {"reshard_after_forward": False}, False),
    "all summoned": (_summoned, {}, True),
    "bf16": (_one_forward, {"mp_policy": NARROW}, False),
    "hsdp": (_two_forwards, {"mesh": (2, 1), "mp_policy": NARROW}, False),
    "hfsdp": (_other_order, {"mesh": (1, 2), "outer_strategy": "optim"}, False),
    "nested": (_loss_of_nested, {"prefetch": 0}, True),
}


def _train(
    name: str, is_on: bool, **more: object
) -> tuple[list[dict[str, torch.Tensor | None]], nn.Module]:
    run, given, _ = CASES[name]
    options = {**given, **more}
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("o", "i"))
    torch.manual_seed(0)
    net = Nested(5) if name == "nested" else Chain()
    shard_net = _shard_nested if name == "nested" else _shard_chain
    net = shard_net(net, nccl_user_buffers=is_on, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    grads = []
    for step in range(NUM_STEPS):
        run(net, step)
        grads.append(full_grads(net))
        optimizer.step()
        optimizer.zero_grad()
    return grads, net


def _storages_of(net: nn.Module) -> list[FlatStorage]:
    groups = [group for unit in units_below([net]).values() for group in unit.groups]
    return [s for group in groups for s in group.compute_weight.gathered_storages]


def _slabs_of(net: nn.Module) -> list[Slabs | None]:
    return list(dict.fromkeys(storage.slabs for storage in _storages_of(net)))


def _compare(name: str, **more: object) -> list[int]:
    wanted, _ = _train(name, is_on=False, **more)
    with registering() as turns:
        found, net = _train(name, is_on=True, **more)
    for mine_, theirs in zip(found, wanted, strict=True):
        assert mine_.keys() == theirs.keys()
        for key, grad in theirs.items():
            assert (grad is None) == (mine_[key] is None), key
            assert grad is None or torch.equal(mine_[key], grad), key
    assert any(grad is not None and grad.abs().sum() > 0 for grad in found[-1].values())
    assert turns.taken, "storages took slabs"
    is_refused = any(slabs.num_refused for slabs in _slabs_of(net))
    assert is_refused == CASES[name][2]
    return turns.taken


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_memory(ranks: Ranks, name: str) -> None:
    """Bit for bit, with no slab in two storages; all ranks take the same slabs in the same order.

    NCCL wants each buffer registered on all ranks or on none.
    """
    first, second = ranks(2).run(_compare, name)
    assert first == second


def _compare_some() -> None:
    for name in ("two forwards", "recomputation", "other orders", "all summoned", "nested"):
        _compare(name, mp_policy=NARROW)


def test_one_rank_has_slabs_too(ranks: Ranks) -> None:
    """Gradients are those of plain memory."""
    ranks(1).run(_compare_some)


def _resting_nbytes(prefetch: int, num_blocks: int, keeps: bool) -> tuple[int, int, int]:
    options = {"prefetch": prefetch, "mp_policy": BF16, "nccl_user_buffers": True}
    with registering():
        net = Net(num_blocks)
        for block in net.blocks:
            fully_shard(block, reshard_after_forward=False if keeps else None, **options)
        fully_shard(net, **options)
        for batch in batches(3):
            net(*mine(batch)).backward()
    ledger, groups = net._fsdp_unit().ledger, net._fsdp_unit().context.groups
    nbytes = sorted(
        (g.layout.gathered_numel * g.dtypes.compute.itemsize for g in groups), reverse=True
    )
    live, peak = ledger.live[Category.UNSHARDED], ledger.peak[Category.UNSHARDED]
    # A group of weights and one of norms in fp32, in each block and in the root.
    assert len(nbytes) == 2 * num_blocks + 2
    block, root = nbytes[0], nbytes[num_blocks]
    assert nbytes[:num_blocks] == [block] * num_blocks, "blocks of the same size"
    assert 2 * root < block, "the root's weights are in a class of their own"
    norms = nbytes[num_blocks + 1]
    assert nbytes[num_blocks + 1 :] == [norms] * (num_blocks + 1)
    assert 2 * norms < root, "norms are in a class of their own, the root's too"
    num_unsharded = num_blocks if keeps else min(prefetch + 1, num_blocks)
    del net, groups
    assert ledger.live[Category.UNSHARDED] == 0, "slabs go with the model"
    return live, peak, num_unsharded * (block + norms) + root + norms


@pytest.mark.parametrize(
    ("prefetch", "num_blocks", "keeps"),
    [(0, 6, False), (1, 6, False), (2, 6, False), (2, 2, False), (1, 6, True)],
)
def test_slabs_are_those_of_the_units_that_are_unsharded_at_once(
    ranks: Ranks, num_blocks: int, prefetch: int, keeps: bool
) -> None:
    """The root, the unit at work and those gathered ahead, or those that stay; never all layers.

    They are allocated at rest, too, and nothing is beside them at the peak.
    """
    for live, peak, wanted in ranks(2).run(_resting_nbytes, prefetch, num_blocks, keeps):
        assert live == peak == wanted


class Pyramid(nn.Module):
    """Layers of widths that are all different."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, w, bias=False) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return sum(layer(x).square().mean() for layer in self.layers)


def _of_classes() -> list[int]:
    net = Pyramid((64, 60, 48, 40, 34, 32, 20, 18, 16, 10))
    with registering():
        for layer in net.layers:
            fully_shard(layer, nccl_user_buffers=True, prefetch=0, mp_policy=NARROW)
        fully_shard(net, nccl_user_buffers=True, prefetch=0, mp_policy=NARROW)
        for _ in range(3):
            # Without gradients of inputs no unit would end before the whole backward.
            net(torch.ones(1, 16, requires_grad=True)).backward()
    nbytes = [s.tensor.nbytes for layer in net.layers for s in _storages_of(layer)]
    sizes = [s.slabs._nbytes for layer in net.layers for s in _storages_of(layer)]
    assert nbytes == [32 * width for width in (64, 60, 48, 40, 34, 32, 20, 18, 16, 10)]
    live = net._fsdp_unit().ledger.live[Category.UNSHARDED]
    assert live == sum(set(sizes)), "prefetch 0: one slab of each size"
    return [size // 32 for size in sizes]


def test_sizes_above_half_of_the_largest_share_its_slabs(ranks: Ranks) -> None:
    """Slabs of ten sizes would be the whole model."""
    assert ranks(1).run(_of_classes) == [[64] * 5 + [32] * 3 + [16] * 2]


def _on_gloo() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("megafsdp.fsdp")
    logger.addHandler(handler)
    try:
        _, net = pair(nccl_user_buffers=True)
        for batch in batches(2):
            net(*mine(batch)).backward()
    finally:
        logger.removeHandler(handler)
    assert _slabs_of(net) == [None]
    assert net._fsdp_unit().ledger.live[Category.UNSHARDED] == 0
    return messages


def test_another_backend_leaves_memory_plain_with_one_warning(ranks: Ranks) -> None:
    """It says which backend, and what is lost."""
    for messages in ranks(2).run(_on_gloo):
        assert len(messages) == 1
        assert "got a process group of gloo on cpu" in messages[0]
        assert "gathers fill plain memory instead" in messages[0]


def _by_torchs_name() -> None:
    net = shard(Net(2), mp_policy=NARROW)
    for module in (net, *net.blocks):
        module.set_allocate_memory_from_process_group_for_comm(True)
    net.blocks[0].set_allocate_memory_from_process_group_for_comm(False)
    with registering():
        net(*mine(batches(1)[0])).backward()
    assert [_storages_of(block)[0].slabs is None for block in net.blocks] == [True, False]
    net.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(RuntimeError, match=r"got unit 'Net', .* Call it before the first forward"):
        net.set_allocate_memory_from_process_group_for_comm(False)


def test_torchs_name_of_the_option_works_until_the_first_forward(ranks: Ranks) -> None:
    """For each unit by itself."""
    ranks(1).run(_by_torchs_name)


def _refused() -> None:
    for strategy in ("no_shard", "optim", "optim_grads"):
        with pytest.raises(ValueError, match=rf"got '{strategy}'.*nccl_user_buffers"):
            fully_shard(nn.Linear(2, 2), strategy=strategy, nccl_user_buffers=True)


def test_strategies_that_keep_weights_gathered_refuse_the_option(ranks: Ranks) -> None:
    """They gather at most once a step."""
    ranks(1).run(_refused)

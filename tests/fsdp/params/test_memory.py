"""Bytes alive at rest, while gradients accumulate, and at the peak, by formula for every strategy.

F is the whole main weight, C the whole compute weight, N the ranks that divide them; the bytes are
the ledger's, padding included, but each is computed from the layouts alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from megafsdp import MixedPrecisionPolicy, microbatch
from megafsdp.device.memory import ByteLedger, Category, FlatStorage
from tests.end_to_end.strategy_cases import ENGINES, MeshShape
from tests.fsdp.toy import Net, batches, mine
from tests.pairwise import each_value, gate_of
from tests.ranks import Ranks


@dataclass(frozen=True)
class Sizes:
    """The quantities of the formulas, in bytes.

    Attributes:
        main: F, the whole main weight.
        compute: C, the whole compute weight.
        num_shards: Ranks that divide the main weight: N, or N x M with an outer axis that does.
        num_gathered: N, the ranks among which the compute weight is gathered.
        is_same_dtype: Whether compute and main weights have one dtype.
        block_compute: The compute weight of one block; gradients before reduction take the same.
        root_compute: That of the root.
    """

    main: int
    compute: int
    num_shards: int
    num_gathered: int
    is_same_dtype: bool
    block_compute: int
    root_compute: int

    @property
    def block_main_shard(self) -> int:
        """Return this rank's bytes of one block's main gradient."""
        block_main = self.block_compute if self.is_same_dtype else 2 * self.block_compute
        return block_main // self.num_shards

    @property
    def shard(self) -> int:
        """Return F / N, or F / (N M)."""
        return self.main // self.num_shards


# (main weight, compute weight, main gradient) at rest; a main gradient only until it is cleared.
AT_REST: dict[str, Callable[[Sizes], tuple[int, int, int]]] = {
    "no_shard": lambda s: (s.main, 0 if s.is_same_dtype else s.compute, s.main),
    "optim": lambda s: (s.shard, s.compute, s.shard),
    "optim_grads": lambda s: (s.shard, s.compute, s.shard),
    "optim_grads_params": lambda s: (s.shard, 0, s.shard),
    "hsdp": lambda s: (s.shard, 0, s.shard),
    "hfsdp": lambda s: (s.shard, s.compute // s.num_gathered, s.shard),
}
# (main gradient, partial gradient) between two microbatches of microbatch().
ACCUMULATING: dict[str, Callable[[Sizes], tuple[int, int]]] = {
    "no_shard": lambda s: (0, s.main),
    "optim": lambda s: (0, s.main),
    "optim_grads": lambda s: (s.shard, 0),
    "optim_grads_params": lambda s: (s.shard, 0),
    "hsdp": lambda s: (s.shard, 0),
    "hfsdp": lambda s: (s.main // s.num_gathered, 0),
}
RELEASES_PARAMETERS = ("optim_grads_params", "hsdp", "hfsdp")


def _sizes(net: Net) -> Sizes:
    groups = [group for module in (net, *net.blocks) for group in module._fsdp_unit().groups]
    assert len(groups) == 1 + len(net.blocks), "one group a unit"
    layouts = [group.layout for group in groups]
    num_shards = groups[0].axes.num_shards
    assert all(layout.gathered_numel == num_shards * layout.shard_numel for layout in layouts)
    itemsize = groups[0].dtypes.compute.itemsize
    numel = sum(layout.gathered_numel for layout in layouts)
    return Sizes(
        main=4 * numel,
        compute=itemsize * numel,
        num_shards=num_shards,
        num_gathered=num_shards // groups[0].axes.num_pieces,
        is_same_dtype=itemsize == 4,
        block_compute=itemsize * layouts[1].gathered_numel,
        root_compute=itemsize * layouts[0].gathered_numel,
    )


def _live(ledger: ByteLedger, *categories: Category) -> tuple[int, ...]:
    return tuple(ledger.live[category] for category in categories)


def _step(net: nn.Module, num_microbatches: int = 1) -> None:
    for batch in batches(num_microbatches):
        net(*mine(batch)).backward()


@contextmanager
def _constructed() -> Iterator[Counter[Category]]:
    """Count the storages that are made, by category."""
    counts: Counter[Category] = Counter()
    original = FlatStorage.__init__

    def counting(self: FlatStorage, *args: object, category: Category, **kwargs: object) -> None:
        counts[category] += 1
        original(self, *args, category=category, **kwargs)

    FlatStorage.__init__ = counting
    try:
        yield counts
    finally:
        FlatStorage.__init__ = original


def _check_bytes(
    engine: str, shape: MeshShape, dtype: torch.dtype, prefetch: int, num_blocks: int
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    given = ENGINES[engine].with_options(mp_policy=policy, prefetch=prefetch)
    net = given.shard(Net(num_blocks), shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(2):
        _step(net)
        optimizer.step()
        optimizer.zero_grad()
    sizes, ledger = _sizes(net), net._fsdp_unit().ledger
    main_weight, compute_weight, main_grad = AT_REST[engine](sizes)
    weights = (Category.MAIN_WEIGHT, Category.COMPUTE_WEIGHT, Category.UNSHARDED)
    grads = (Category.MAIN_GRAD, Category.PARTIAL_GRAD)
    at_rest = (main_weight, compute_weight, 0, 0, 0)
    assert _live(ledger, *weights, *grads) == at_rest
    with _constructed() as counts:
        ledger.reset_peak()
        _step(net, 2)
        assert _live(ledger, *grads) == (main_grad, 0)
        _check_peak(ledger, engine, sizes, prefetch, num_blocks)
        optimizer.step()
        optimizer.zero_grad()
        for k, batch in enumerate(batches(3)):
            with microbatch(net, is_last=k == 2):
                net(*mine(batch)).backward()
            assert _live(ledger, *grads) == (
                (main_grad, 0) if k == 2 else ACCUMULATING[engine](sizes)
            )
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            net(*mine(batches(1)[0]))
    assert _live(ledger, *weights, *grads) == at_rest
    assert counts[Category.MAIN_GRAD] > 0, "main gradients are fresh, so the count is at work"
    assert [counts[category] for category in weights] == [0, 0, 0], "allocated again, not made anew"


def _check_peak(
    ledger: ByteLedger, engine: str, sizes: Sizes, prefetch: int, num_blocks: int
) -> None:
    """Check the peaks of a plain loop: prefetch + 1 units beside the root, two reductions."""
    num_units = min(prefetch + 1, num_blocks)
    # Until its backward begins, the last unit, kept since forward, is one of those at work.
    unsharded = sizes.root_compute + num_units * sizes.block_compute
    # One rank computes with its main weight where that is the whole in the same dtype.
    is_whole = sizes.num_shards == 1 and sizes.is_same_dtype
    is_released = engine in RELEASES_PARAMETERS and not is_whole
    assert ledger.peak_num_live[Category.UNSHARDED] == (1 + num_units if is_released else 0)
    assert ledger.peak[Category.UNSHARDED] == (unsharded if is_released else 0)
    # One rank sums gradients where they are.
    is_packed = engine == "no_shard" or sizes.num_gathered > 1
    assert ledger.peak_num_live[Category.PARTIAL_GRAD] == (2 if is_packed else 0)
    two_inputs = sizes.block_compute + max(sizes.block_compute, sizes.root_compute)
    assert ledger.peak[Category.PARTIAL_GRAD] == (two_inputs if is_packed else 0)
    # Under HSDP and HFSDP sums over the inner axis wait beside the main gradient: of the group at
    # work, of the one before it, and of the one whose outer sum is under way.
    num_inner_sums = 3 if engine in ("hsdp", "hfsdp") else 0
    main_grad = AT_REST[engine](sizes)[2]
    num_pieces = sizes.num_shards // sizes.num_gathered
    waiting = num_inner_sums * sizes.block_main_shard * num_pieces
    assert ledger.peak[Category.MAIN_GRAD] == main_grad + waiting
    # Main weights are cast into what the gather fills; under HFSDP pieces of all units are cast at
    # once, and joined over the outer axis.
    casts = ledger.peak[Category.COMPUTE_WEIGHT] - ledger.live[Category.COMPUTE_WEIGHT]
    is_joined = engine == "hfsdp" and not sizes.is_same_dtype
    assert casts == (sizes.compute // sizes.num_shards if is_joined else 0)


NAMES = ("engine", "mesh", "dtype", "prefetch", "num_blocks")
MESHES = {"hsdp": ((2, 2), (4, 1)), "hfsdp": ((2, 2), (4, 1))}
PRODUCT = [
    (name, shape, dtype, prefetch, num_blocks)
    for name in AT_REST
    for shape in MESHES.get(name, ((2,), (3,)))
    for dtype in (torch.float32, torch.bfloat16)
    for prefetch in (0, 1, 2)
    for num_blocks in (3, 6)
]


@pytest.mark.parametrize(NAMES, gate_of(PRODUCT, "memory", each_value(PRODUCT)))
def test_bytes_are_those_of_the_formula(
    ranks: Ranks,
    engine: str,
    mesh: MeshShape,
    dtype: torch.dtype,
    prefetch: int,
    num_blocks: int,
) -> None:
    """At rest, between microbatches, and at the peak, which does not grow with the layers.

    After two steps storages of weights are released and allocated again, never made anew.
    """
    ranks(math.prod(mesh)).run(_check_bytes, engine, mesh, dtype, prefetch, num_blocks)

"""Collectives and bytes of a step with quantized weights, exactly and by formula."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafsdp import fully_shard, microbatch
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.device.memory import Category
from megafsdp.fsdp.runtime.unit import units_below
from tests.fsdp.quantized import (
    INNER,
    RECIPES,
    WIDTH,
    Net,
    batch,
    optimizer_of,
    options_of,
    policy_for,
    quantized_parameters,
    recipe_for,
    shard,
)
from tests.ranks import Ranks

NUM_BLOCKS = 3
# Of one block: both matrices, which leave no gap, and all else.
MATRIX_NUMEL = 2 * WIDTH * INNER
TILE_NUMELS = {"fp8_block": 128, "mxfp8": 32, "nvfp4": 16}
TABLE_NBYTES = {"fp8_block": 4, "mxfp8": 1, "nvfp4": 1}
CODE_BITS = dict.fromkeys(RECIPES, 8) | {"nvfp4": 4}


@dataclass
class Step:
    """What one step cost.

    Attributes:
        gathers: All-gathers.
        gathered: Their bytes.
        reductions: Reduce-scatters.
        maxima: Bytes of each all-reduce of maxima.
        num_all_reduces: All-reduces, those of maxima among them.
        resting: Bytes by category between steps.
        peak: Largest bytes by category in the step.
    """

    gathers: int
    gathered: int
    reductions: int
    maxima: int
    num_all_reduces: int
    resting: dict[Category, int]
    peak: dict[Category, int]


def _num_maxima(name: str) -> int:
    """Return how many maxima the weights of one block have."""
    if name not in TILE_NUMELS:
        return 2
    tile = TILE_NUMELS[name]
    return 2 * math.ceil(INNER / tile) * math.ceil(WIDTH / tile)


def _table_nbytes(name: str) -> int:
    """Return the bytes of the tables of one block: multiples of 16 for each weight."""
    of_weight = _num_maxima(name) // 2 * TABLE_NBYTES.get(name, 4)
    of_weight += 4 if name == "nvfp4" else 0
    return 2 * 16 * math.ceil(of_weight / 16)


def _net(name: str | None, operands: str, layout: str, num_blocks: int = NUM_BLOCKS) -> nn.Module:
    recipe = None if name is None else recipe_for(name, operands)
    return shard(Net(num_blocks), policy_for(recipe), **options_of(layout))


def _step(
    name: str | None,
    operands: str,
    layout: str,
    num_microbatches: int = 1,
    num_blocks: int = NUM_BLOCKS,
) -> Step:
    """Return what the third step costs, once the order of units is recorded."""
    net = _net(name, operands, layout, num_blocks)
    optimizer = optimizer_of(list(net.parameters()))
    ledger = net._fsdp_unit().ledger
    for step in range(3):
        ledger.reset_peak()
        with record_collectives() as record:
            for index in range(num_microbatches):
                with microbatch(net, is_last=index == num_microbatches - 1):
                    net(batch(step, index, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    labels = [label for kind, label in record.events if kind == "all_reduce"]
    # Beside maxima there is one byte a parameter, of usage.
    num_parameters = sum(1 for _ in net.parameters())
    maxima = record.nbytes["all_reduce"] - num_parameters if "maxima" in labels else 0
    return Step(
        record.calls["all_gather"],
        record.nbytes["all_gather"],
        record.calls["reduce_scatter"],
        maxima,
        len(labels),
        dict(ledger.live),
        dict(ledger.peak),
    )


@pytest.fixture(scope="module")
def step_of(ranks: Ranks) -> Callable[..., Step]:
    """Return what a step costs on the first of two ranks, once for all who ask for the same."""
    return functools.cache(lambda *args: ranks(2).run(_step, *args)[0])


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_gathers_codes_and_reduces_maxima_once(
    ranks: Ranks, step_of: Callable[..., Step], name: str
) -> None:
    """Twice a unit and group, half or a quarter of the bytes of bf16, and one all-reduce."""
    quantized = step_of(name, "weights", "zero3 free")
    plain = step_of(None, "weights", "zero3 free")
    # Blocks have vectors besides, and the root has a head that fp8_block alone takes.
    num_groups = 2 * NUM_BLOCKS + (2 if name == "fp8_block" else 1)
    assert (plain.gathers, plain.reductions) == (2 * (NUM_BLOCKS + 1), NUM_BLOCKS + 1)
    assert (quantized.gathers, quantized.reductions) == (2 * num_groups, num_groups)
    assert (plain.num_all_reduces, quantized.num_all_reduces) == (1, 2)
    num_head = 1 if name == "fp8_block" else 0
    assert quantized.maxima == 4 * (NUM_BLOCKS * _num_maxima(name) + num_head)
    # The difference is that of the matrices alone: 16 bits an element, or 8, or 4.
    saved = 2 * NUM_BLOCKS * MATRIX_NUMEL * (16 - CODE_BITS[name]) // 8
    if name != "fp8_block":
        # Shards of the vectors may be padded otherwise where they are by themselves.
        padding = ranks(2).run(_vector_nbytes, name)[0] - ranks(2).run(_vector_nbytes, None)[0]
        assert plain.gathered - quantized.gathered == saved - 2 * padding
    assert quantized.gathered < (0.56 if CODE_BITS[name] == 8 else 0.33) * plain.gathered


def _vector_nbytes(name: str | None) -> int:
    """Return the bytes of one gather of all that is not in the blocks' matrices."""
    groups = [g for u in units_below([_net(name, "weights", "zero3")]).values() for g in u.groups]
    plain = [2 * g.layout.gathered_numel for g in groups if g.quantization is None]
    return sum(plain) - (0 if name else 2 * NUM_BLOCKS * MATRIX_NUMEL)


def _code_nbytes(name: str) -> tuple[int, int]:
    found = quantized_parameters(_net(name, "weights", "zero3"))
    numel = sum(math.prod(record.shape) for _, record in found.values())
    full = {id(g): g.compute_weight.gathered_storages[0].nbytes for g, _ in found.values()}
    return sum(full.values()), numel


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp8_block"])
def test_codes_are_half_or_a_quarter_of_bf16_without_padding(ranks: Ranks, name: str) -> None:
    """Matrices that ranks cut evenly have no gap between them."""
    assert ranks(2).run(_code_nbytes, name)[0] == (
        NUM_BLOCKS * MATRIX_NUMEL * CODE_BITS[name] // 8,
        NUM_BLOCKS * MATRIX_NUMEL,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_ledgers_count_codes_tables_maxima_and_histories(
    step_of: Callable[..., Step], name: str
) -> None:
    """At rest a shard of codes and whole tables; maxima only while they are combined."""
    found = step_of(name, "weights", "zero3 free")
    num_head = 1 if name == "fp8_block" else 0
    tables = NUM_BLOCKS * _table_nbytes(name) + 16 * num_head
    # Weights, inputs and gradients, 1,024 steps each, of two weights a block.
    histories = NUM_BLOCKS * 2 * 3 * 1024 * 4 if name == "fp8_delayed" else 0
    maxima = 4 * (NUM_BLOCKS * _num_maxima(name) + num_head)
    assert found.resting[Category.SCALES] == tables + histories
    assert found.peak[Category.SCALES] == tables + histories + maxima
    codes = NUM_BLOCKS * MATRIX_NUMEL * CODE_BITS[name] // 8 // 2
    # The head's five rows on two ranks are padded.
    head = found.resting[Category.COMPUTE_WEIGHT] - codes
    assert head == 0 or (num_head and head <= 5 * WIDTH)
    assert found.resting[Category.UNSHARDED] == 0


def test_recorded_maxima_travel_with_those_of_weights(ranks: Ranks) -> None:
    """Two numbers more a weight in the same all-reduce; also where nothing is divided."""
    for layout, num_all_reduces in (("zero3 free", 2), ("zero0", 2 + 2 * NUM_BLOCKS + 1)):
        found = ranks(2).run(_step, "fp8_delayed", "all", layout)[0]
        assert found.num_all_reduces == num_all_reduces
    assert ranks(2).run(_step, "fp8_delayed", "all", "zero3")[0].maxima == 4 * NUM_BLOCKS * 2 * 3


@pytest.mark.parametrize(("layout", "num_ranks"), [("zero0", 2), ("zero3", 1), ("hsdp 2x1", 2)])
def test_no_maxima_travel_where_every_rank_has_all_rows(
    ranks: Ranks, layout: str, num_ranks: int
) -> None:
    """Replicas have the same maxima, and one rank needs no other."""
    found = ranks(num_ranks).run(_step, "mxfp8", "all", layout)[0]
    assert (found.maxima, found.gathers) == (0, 0)


def _labels_of_two_forwards() -> list[list[str]]:
    net = _net("mxfp8", "all", "zero3")
    seen = []
    for step in range(2):
        with record_collectives() as record:
            for index in range(3):
                net(batch(step, index, dist.get_rank())).backward()
        seen.append([label for kind, label in record.events if kind == "all_reduce"])
        net.zero_grad()
    # A load writes to all weights, which the first unit's forward finds for all.
    net.load_state_dict(net.state_dict())
    with record_collectives() as record:
        loss = net(batch(0, 0, dist.get_rank()))
    seen.append([label for kind, label in record.events if kind == "all_reduce"])
    # And so does a change of one weight by hand.
    with torch.no_grad():
        net.blocks[1].up.weight.mul_(2)
    with record_collectives() as record:
        assert not torch.equal(net(batch(0, 0, dist.get_rank())), loss)
    seen.append([label for kind, label in record.events if kind == "all_reduce"])
    return seen


def test_unchanged_weights_combine_nothing_again(ranks: Ranks) -> None:
    """Not in the next microbatch, nor without a step; once after a load, or a change by hand."""
    assert ranks(2).run(_labels_of_two_forwards)[0] == [
        ["maxima", "usage", "usage", "usage"],
        ["usage"] * 3,
        ["maxima"],
        ["maxima"],
    ]


@pytest.mark.parametrize("layout", ["zero1", "zero2"])
def test_persistent_codes_are_gathered_once_a_step(ranks: Ranks, layout: str) -> None:
    """Three microbatches, one gather a group."""
    found = ranks(2).run(_step, "mxfp8", "all", layout, 3)[0]
    assert found.gathers == 2 * NUM_BLOCKS + 1
    assert found.reductions == (2 * NUM_BLOCKS + 1) * (1 if layout == "zero1" else 3)


def _gathers_of_a_root(name: str, keeps: bool, recomputes: bool) -> tuple[int, int]:
    net = fully_shard(
        nn.Linear(WIDTH, INNER, bias=False),
        mp_policy=policy_for(recipe_for(name, "all")),
        reshard_after_forward=not keeps,
    )
    for step in range(2):
        x = batch(step, 0, dist.get_rank())
        with record_collectives() as record:
            y = checkpoint(net, x, use_reentrant=False) if recomputes else net(x)
            y.float().square().mean().backward()
    return record.calls["all_gather"], record.nbytes["all_gather"]


@pytest.mark.parametrize("name", ["fp8_current", "nvfp4"])
def test_one_set_of_codes_serves_forward_and_backward(ranks: Ranks, name: str) -> None:
    """A byte an element, or a half, for each; none in backward if codes stay; recomputed or not."""
    nbytes = WIDTH * INNER * CODE_BITS[name] // 8
    for recomputes in (False, True):
        for keeps, num in ((False, 2), (True, 1)):
            found = ranks(2).run(_gathers_of_a_root, name, keeps, recomputes)
            assert found == [(num, num * nbytes)] * 2, (keeps, recomputes)


def test_what_is_unsharded_at_once_does_not_grow_with_layers(ranks: Ranks) -> None:
    """A unit at work and the next one, in codes, for four layers and for eight."""
    few, many = (ranks(2).run(_step, "mxfp8", "all", "zero3 free", 1, n)[0] for n in (4, 8))
    assert few.peak[Category.UNSHARDED] == many.peak[Category.UNSHARDED]
    plain = ranks(2).run(_step, None, "all", "zero3 free", 1, 4)[0]
    assert few.peak[Category.UNSHARDED] < 0.6 * plain.peak[Category.UNSHARDED]

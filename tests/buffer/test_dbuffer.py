"""Flat buffers: views, gathers, reductions, gaps, and their bytes."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import record_collectives, reduce_scatter
from megafsdp.buffer.dbuffer import DBuffer, gather_buffers
from megafsdp.buffer.layout import FlatLayout, TensorSpec
from megafsdp.buffer.planner import plan_layout
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.mesh.placement import Residence
from tests.buffer.classes_apart import classes_apart
from tests.buffer.cuts import random
from tests.ranks import Ranks

SHAPES = [(9, 7), (4, 11), (100,), (3, 2, 7), (1, 11), (1,)]


def _layout(num_shards: int) -> FlatLayout:
    specs = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(SHAPES)]
    with classes_apart():
        layout = plan_layout(specs, num_shards)
    assert len(layout.sub_buffers) > 1
    return layout


def _buffer(
    layout: FlatLayout,
    residence: Residence,
    shard: int = 0,
    dtype: torch.dtype = torch.float32,
    ledger: ByteLedger | None = None,
) -> DBuffer:
    return DBuffer(
        layout,
        residence,
        shard=shard,
        dtype=dtype,
        device=torch.device("cpu"),
        ledger=ledger or ByteLedger(),
        category=Category.UNSHARDED,
    )


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _filled_shard(layout: FlatLayout, shard: int, dtype: torch.dtype, salt: int = 0) -> DBuffer:
    """Return a shard with this rank's part of each tensor; the gaps stay poisoned."""
    buffer = _buffer(layout, Residence.SHARD, shard, dtype)
    for index, shape in enumerate(SHAPES):
        start, stop = layout.owned_range(index, shard)
        whole = random(*shape, seed=salt + index).reshape(-1)
        buffer.tensor(index).copy_(whole[start:stop])
    return buffer


def _gather(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    layout = _layout(dist.get_world_size())
    sources = [_filled_shard(layout, rank, dtype, salt) for salt in (0, 50)]
    fulls = [_buffer(layout, Residence.REPLICATE, rank, dtype) for _ in sources]
    views = [full.full_views() for full in fulls]
    with record_collectives() as record:
        gather_buffers(fulls, sources, group=_world(), label="unit").wait()
    is_sent = dist.get_world_size() > 1
    assert record.calls["all_gather"] == is_sent
    nbytes = 2 * layout.gathered_numel * dtype.itemsize
    assert record.nbytes["all_gather"] == is_sent * nbytes
    for views_of_one, salt in zip(views, (0, 50), strict=True):
        for index, (view, shape) in enumerate(zip(views_of_one, SHAPES, strict=True)):
            assert torch.equal(view, random(*shape, seed=salt + index).to(dtype))
    # What was poison before is poison after: the tensors never depended on the gaps.
    gaps = [torch.arange(*gap) for gap in layout.gaps()]
    assert fulls[0].flat[torch.cat(gaps)].isnan().all()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gather_fills_every_view(ranks: Ranks, num_ranks: int) -> None:
    """Views made before the gather show every tensor whole, for two buffers in one launch."""
    for dtype in (torch.float32, torch.bfloat16):
        ranks(num_ranks).run(_gather, dtype)


def _reduce(accumulate: bool) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    layout = _layout(world)
    partial = _buffer(layout, Residence.PARTIAL, rank, torch.bfloat16)
    for index, shape in enumerate(SHAPES):
        partial.full_views()[index].copy_(random(*shape, seed=100 * rank + index))
    grad = _filled_shard(layout, rank, torch.float32, salt=1000)
    reduce_scatter(
        grad.pieces(),
        partial.pieces(),
        group=_world(),
        scale=0.5,
        accumulate=accumulate,
        reduce_dtype=torch.float32,
        label="unit",
    ).wait()
    for index, shape in enumerate(SHAPES):
        start, stop = layout.owned_range(index, rank)
        total = random(*shape, seed=index).bfloat16().float()
        for other in range(1, world):
            total += random(*shape, seed=100 * other + index).bfloat16().float()
        total *= 0.5
        if accumulate:
            total += random(*shape, seed=1000 + index)
        assert torch.equal(grad.tensor(index), total.reshape(-1)[start:stop])


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_reduction_leaves_each_rank_its_sums(
    ranks: Ranks, num_ranks: int, accumulate: bool
) -> None:
    """Shards hold the scaled sums of their ranges bit by bit, poisoned gaps notwithstanding."""
    ranks(num_ranks).run(_reduce, accumulate)


@pytest.mark.parametrize("residence", list(Residence))
def test_zeroing_gaps_leaves_tensors_alone(residence: Residence) -> None:
    """Every element that no tensor owns becomes zero, and no other."""
    layout = _layout(3)
    for shard in range(3):
        buffer = _buffer(layout, residence, shard)
        for index in range(len(SHAPES)):
            buffer.tensor(index).fill_(index + 1)
        buffer.zero_gaps()
        assert not buffer.flat.isnan().any()
        for index in range(len(SHAPES)):
            assert (buffer.tensor(index) == index + 1).all()
        owned = sum(buffer.tensor(index).numel() for index in range(len(SHAPES)))
        assert (buffer.flat != 0).sum() == owned


def test_pieces_are_the_sub_buffers_in_order() -> None:
    """They alias the buffer and cover it."""
    layout = _layout(2)
    for residence, factor in ((Residence.SHARD, 1), (Residence.PARTIAL, 2)):
        buffer = _buffer(layout, residence)
        buffer.flat.copy_(torch.arange(buffer.flat.numel()))
        assert [p.numel() for p in buffer.pieces()] == [
            factor * sub.shard_numel for sub in layout.sub_buffers
        ]
        assert torch.equal(torch.cat(buffer.pieces()), buffer.flat)
        assert buffer.pieces()[-1].data_ptr() > buffer.flat.data_ptr()


def test_views_after_an_exchange_lie_in_the_new_memory() -> None:
    """Views that were made before stay on the memory that they had."""
    layout = _layout(2)
    for residence in (Residence.SHARD, Residence.REPLICATE):
        buffers = [_buffer(layout, residence) for _ in range(2)]

        def views(buffer: DBuffer) -> list[torch.Tensor]:
            is_shard = buffer.residence is Residence.SHARD
            return [*buffer.pieces(), *buffer.gaps, *([] if is_shard else buffer.full_views())]

        before = [[view.data_ptr() for view in views(buffer)] for buffer in buffers]
        buffers[0].exchange(buffers[1])
        after = [[view.data_ptr() for view in views(buffer)] for buffer in buffers]
        assert after == before[::-1] != before


def test_a_shard_has_no_full_views() -> None:
    """Asking for one is our mistake."""
    with pytest.raises(AssertionError, match="no full views"):
        _buffer(_layout(2), Residence.SHARD).full_views()


def _views_outlive_a_release() -> None:
    layout = _layout(dist.get_world_size())
    source = _filled_shard(layout, dist.get_rank(), torch.float32)
    full = _buffer(layout, Residence.REPLICATE)
    weight = full.full_views()[0].requires_grad_()
    gather_buffers([full], [source], group=_world(), label="").wait()
    version = full.flat._version
    x = random(5, 7, seed=9).requires_grad_()
    out = (x @ weight.t()).square().sum()
    full.storage.release()
    assert weight.untyped_storage().nbytes() == 0
    full.storage.allocate()
    with torch.no_grad():
        gather_buffers([full], [source], group=_world(), label="").wait()
    torch._C._autograd._unsafe_set_version_counter((full.flat,), (version,))
    out.backward()
    plain, plain_x = random(9, 7).requires_grad_(), x.detach().clone().requires_grad_()
    (plain_x @ plain.t()).square().sum().backward()
    assert torch.equal(x.grad, plain_x.grad)
    assert torch.equal(weight.grad, plain.grad)


def test_views_saved_by_autograd_outlive_a_release(ranks: Ranks) -> None:
    """Gather, forward, release, gather again, backward: the gradients are those of plain torch."""
    ranks(2).run(_views_outlive_a_release)


def test_ledger_sees_exactly_the_padded_bytes() -> None:
    """A shard is 1/N of the whole; release, allocation and deletion are counted at once."""
    layout, ledger = _layout(3), ByteLedger()
    shard = _buffer(layout, Residence.SHARD, 1, torch.float32, ledger)
    assert ledger.total == 4 * layout.shard_numel == 4 * layout.gathered_numel // 3
    full = _buffer(layout, Residence.REPLICATE, 1, torch.bfloat16, ledger)
    assert ledger.total == 4 * layout.shard_numel + 2 * layout.gathered_numel
    full.storage.release()
    assert ledger.total == 4 * layout.shard_numel
    full.storage.allocate()
    gc.disable()
    try:
        del full
        assert ledger.total == 4 * layout.shard_numel
        del shard
        assert ledger.total == 0
    finally:
        gc.enable()
    assert ledger.peak_total == 4 * layout.shard_numel + 2 * layout.gathered_numel

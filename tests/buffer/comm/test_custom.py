"""Collectives that an object of the user's makes, beside those that torch makes."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import all_gather, record_collectives
from megafsdp.buffer.comm.custom import all_gather_by, reduce_scatter_by
from tests.ranks import Ranks
from tests.user_comms import UserAllGather, UserReduceScatter

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NUMELS = (5, 1, 8)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _gathers() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (F32, BF16, torch.uint8):
        for in_place in (False, True):
            results = []
            comm, total = UserAllGather(), sum(NUMELS)
            for gather in (functools.partial(all_gather_by, comm), all_gather):
                output = [torch.zeros(world * n, dtype=dtype) for n in NUMELS]
                shards = [torch.arange(n).to(dtype) + 20 * rank for n in NUMELS]
                if in_place:
                    parts = [out.chunk(world)[rank] for out in output]
                    shards = [p.copy_(shard) for p, shard in zip(parts, shards, strict=True)]
                with record_collectives() as record:
                    gather(output, shards, group=_world(), label="unit").wait()
                results.append((output, record.nbytes.total()))
            assert (comm.calls, comm.sizes) == ([(total, dtype)], [world * total])
            (found, nbytes), (wanted, wanted_nbytes) = results
            assert nbytes == wanted_nbytes
            for out, expected in zip(found, wanted, strict=True):
                assert torch.equal(out, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gather_of_the_users_fills_what_the_default_fills(ranks: Ranks, num_ranks: int) -> None:
    """Sub-buffers of any lengths, in one call, also in place."""
    ranks(num_ranks).run(_gathers)


def _sums() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    addends = [torch.randn(world, world * n, generator=generator, dtype=F64) for n in NUMELS]
    for dtype, reduce_dtype, tolerance in (
        (F64, F64, 1e-12),
        (BF16, F32, 1e-5),
        (F32, BF16, 2e-2),
        (F32, F16, 5e-3),
    ):
        sent = [each.to(dtype) for each in addends]
        for accumulate in (False, True):
            main_dtype = F64 if dtype == F64 else F32
            output = [torch.full((n,), 3.0, dtype=main_dtype) for n in NUMELS]
            partials = [each[rank].clone() for each in sent]
            comm = UserReduceScatter()
            reduce_scatter_by(
                comm,
                output,
                partials,
                group=_world(),
                scale=0.3,
                accumulate=accumulate,
                reduce_dtype=reduce_dtype,
                label="unit",
            ).wait()
            total = sum(NUMELS)
            assert comm.calls == [(world * total, reduce_dtype)]
            assert comm.sizes == [world * total, total]
            for out, each, partial in zip(output, sent, partials, strict=True):
                assert torch.equal(partial, each[rank]), "partials stay as they are"
                wanted = 0.3 * each.double().sum(dim=0).chunk(world)[rank] + 3.0 * accumulate
                torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_of_the_users_are_those_of_the_formula(ranks: Ranks, num_ranks: int) -> None:
    """In the dtype of the sum, with any factor, overwriting or adding."""
    ranks(num_ranks).run(_sums)


def _large_addends() -> None:
    world = dist.get_world_size()
    out, comm = torch.zeros(4), UserReduceScatter()
    # The sum of the ranks is beyond the largest number of fp16, their mean is not.
    partial = torch.full((4 * world,), 30_000.0)
    options = {"scale": 1 / world, "accumulate": False, "reduce_dtype": F16, "label": ""}
    reduce_scatter_by(comm, [out], [partial], group=_world(), **options).wait()
    torch.testing.assert_close(out, torch.full((4,), 30_000.0), rtol=1e-3, atol=0.0)


def test_a_sum_in_fp16_does_not_overflow(ranks: Ranks) -> None:
    """Addends are divided before, as for a library."""
    ranks(3).run(_large_addends)


def _dropped() -> None:
    world = dist.get_world_size()
    out = torch.full((4,), 3.0)
    options = {"scale": 1.0, "accumulate": True, "reduce_dtype": F32, "label": ""}
    comm = UserReduceScatter()
    partials = [torch.ones(4 * world)]
    reduce_scatter_by(comm, [out], partials, group=_world(), **options).discard()
    assert len(comm.calls) == 1 and torch.equal(out, torch.full((4,), 3.0))


def test_a_dropped_sum_leaves_the_output(ranks: Ranks) -> None:
    """The object has summed, and nothing is added."""
    ranks(2).run(_dropped)


def _wrong_memory() -> None:
    out, shard = [torch.zeros(8)], [torch.full((4,), 1.0 + dist.get_rank())]
    wrong = {
        r"got one of \(9,\) elements, torch.float32 on cpu": torch.empty(9),
        r"got one of \(8,\) elements, torch.float64 on cpu": torch.empty(8, dtype=F64),
        r"got one of \(8,\) elements, torch.float32 on meta": torch.empty(8, device="meta"),
        "got one that is not contiguous": torch.empty(16)[::2],
        "got None": None,
    }
    for message, memory in wrong.items():
        comm = UserAllGather()
        comm.allocate = lambda size, memory=memory, **_: memory
        with pytest.raises(TypeError, match=message):
            all_gather_by(comm, out, shard, group=_world(), label="unit")
        assert not comm.calls
    all_gather_by(UserAllGather(), out, shard, group=_world(), label="unit").wait()
    assert out[0].tolist() == [1.0] * 4 + [2.0] * 4, "the group still works"


def test_memory_that_was_not_asked_for_is_refused(ranks: Ranks) -> None:
    """Before the call, on all ranks alike: another size, dtype or device, gaps, or none."""
    ranks(2).run(_wrong_memory)

"""The door to collectives: sums, gathers, counters, and errors that all ranks share."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megafsdp.buffer.comm import gloo
from megafsdp.buffer.comm.agreement import raise_together
from megafsdp.buffer.comm.collectives import (
    Pending,
    all_gather,
    all_gather_equal,
    all_gather_objects,
    all_reduce,
    all_reduce_partials,
    all_to_all,
    barrier,
    broadcast_object,
    record_collectives,
    reduce_scatter,
    require_equal,
)
from megafsdp.buffer.comm.trace import DEBUG_VARIABLE, read_environment
from megafsdp.errors import ConfigError
from tests.ranks import Ranks, RanksError

pytestmark = pytest.mark.native

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _partial(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return a rank's partial buffer; the same values on every rank that asks."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def _rank_order_sum(numel: int, dtype: torch.dtype, out_dtype: torch.dtype, scale: float) -> Any:
    """Return the whole scaled sum, added in rank order in fp32 or fp64, in the wide dtype."""
    wide = torch.float64 if torch.float64 in (dtype, out_dtype) else torch.float32
    total = _partial(0, numel, dtype).to(wide)
    for rank in range(1, dist.get_world_size()):
        total = total + _partial(rank, numel, dtype).to(wide)
    return total * torch.tensor(scale, dtype=wide)


def _reduce_scatter_is_exact(
    dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, scale: float
) -> None:
    world, rank, shard = dist.get_world_size(), dist.get_rank(), 96
    partial = _partial(rank, world * shard, dtype)
    kept = partial.clone()
    out = _partial(rank, shard, out_dtype, salt=1)
    wanted = _rank_order_sum(world * shard, dtype, out_dtype, scale)
    wanted = wanted[rank * shard : (rank + 1) * shard]
    if accumulate:
        wanted = wanted + out.to(wanted.dtype)
    pending = reduce_scatter(
        [out],
        [partial],
        group=_world(),
        scale=scale,
        accumulate=accumulate,
        reduce_dtype=torch.float32,
        label="unit",
    )
    pending.wait()
    assert torch.equal(out, wanted.to(out_dtype))
    assert torch.equal(partial, kept), "partial buffers are only read"


def _all_reduce_scatters_are_exact() -> None:
    for dtype in FLOATS:
        _reduce_scatter_is_exact(dtype, torch.float32, False, 1.0)
        _reduce_scatter_is_exact(dtype, dtype, True, 1 / 3)
    _reduce_scatter_is_exact(torch.float32, torch.float64, True, 0.5)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_reduce_scatter_equals_the_sum_in_rank_order(ranks: Ranks, num_ranks: int) -> None:
    """Bit by bit for every wire dtype, overwriting or adding, scaled or not."""
    ranks(num_ranks).run(_all_reduce_scatters_are_exact)


def _bf16_wire_sums_in_fp32() -> torch.Tensor:
    values = [256.0, 1.0, 1.0, 1.0]
    partial = torch.full((8,), values[dist.get_rank()], dtype=torch.bfloat16)
    out = torch.empty(2, dtype=torch.float32)
    options = {"scale": 1.0, "accumulate": False, "reduce_dtype": torch.float32, "label": ""}
    reduce_scatter([out], [partial], group=_world(), **options).wait()
    return out


def test_bf16_wire_is_summed_in_fp32(ranks: Ranks) -> None:
    """256 + 1 + 1 + 1 is 259 in fp32 and 256 in bf16."""
    for out in ranks(4).run(_bf16_wire_sums_in_fp32):
        assert out.tolist() == [259.0, 259.0]


def _several_sub_buffers() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    numels = (32, 64, 5)
    shards = [_partial(rank, n, torch.float32, salt=k) for k, n in enumerate(numels)]
    outputs = [torch.full((world * n,), torch.nan) for n in numels]
    with record_collectives() as record:
        all_gather(outputs, shards, group=_world(), label="layers.0").wait()
    assert record.calls == Counter(all_gather=1)
    assert record.nbytes == Counter(all_gather=4 * world * sum(numels))
    assert record.events == [("all_gather", "layers.0")]
    for k, (out, n) in enumerate(zip(outputs, numels, strict=True)):
        wanted = torch.cat([_partial(r, n, torch.float32, salt=k) for r in range(world)])
        assert torch.equal(out, wanted)
    sums = [torch.full((n,), torch.nan) for n in numels]
    with record_collectives() as record:
        reduce_scatter(
            sums,
            [out.bfloat16() for out in outputs],
            group=_world(),
            scale=1.0,
            accumulate=False,
            reduce_dtype=torch.float32,
            label="layers.0",
        ).wait()
    assert record.calls == Counter(reduce_scatter=1)
    assert record.nbytes == Counter(reduce_scatter=2 * world * sum(numels))
    for total, shard in zip(sums, shards, strict=True):
        torch.testing.assert_close(total, world * shard.bfloat16().float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sub_buffers_are_one_collective(ranks: Ranks, num_ranks: int) -> None:
    """Sub-buffers of different size are filled right and count as one call with their bytes."""
    ranks(num_ranks).run(_several_sub_buffers)


def _never_coalesced() -> None:
    with mock.patch.object(dist, "_coalescing_manager", side_effect=AssertionError("coalesced")):
        _several_sub_buffers()
        _mixed_dtypes()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gloo_is_given_no_coalesced_gather(ranks: Ranks, num_ranks: int) -> None:
    """Threads of torch corrupt the heap when one ends beside another collective."""
    ranks(num_ranks).run(_never_coalesced)


def _bytes_are_gathered(dtype: torch.dtype) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shard = torch.arange(16 * rank, 16 * rank + 16, dtype=torch.uint8).view(dtype)
    out = torch.empty(16 * world, dtype=dtype)
    with record_collectives() as record:
        all_gather([out], [shard], group=_world(), label="").wait()
    assert out.view(torch.uint8).tolist() == list(range(16 * world))
    assert record.nbytes["all_gather"] == 16 * world


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_one_byte_dtypes_are_gathered(ranks: Ranks, num_ranks: int, dtype: torch.dtype) -> None:
    """FP8 formats travel as bytes where the backend does not know them."""
    ranks(num_ranks).run(_bytes_are_gathered, dtype)


def _largest_allocation_of_a_gather() -> int:
    shard, out = torch.full((4096,), float(dist.get_rank())), torch.empty(8192)
    all_gather([out], [shard], group=_world(), label="").wait()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        all_gather([out], [shard], group=_world(), label="").wait()
    assert out.view(2, -1).mean(dim=1).tolist() == [0.0, 1.0]
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max((e.nbytes() for e in events if e.name() == "[memory]"), default=0)


def test_two_ranks_gather_into_the_output_and_nowhere_else(ranks: Ranks) -> None:
    """An all-gather of gloo's makes an output of its own; what two ranks do needs none."""
    assert max(ranks(2).run(_largest_allocation_of_a_gather)) < 4096


def _mixed_dtypes() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    dtypes = (torch.bfloat16, torch.int8, torch.float32, torch.float8_e4m3fn)
    numels = (6, 5, 3, 7)
    outputs = [torch.empty(world * n, dtype=d) for n, d in zip(numels, dtypes, strict=True)]
    shards = [_partial(rank, n, d) for n, d in zip(numels, dtypes, strict=True)]
    with record_collectives() as record:
        all_gather(outputs, shards, group=_world(), label="").wait()
    assert record.calls == Counter(all_gather=1)
    assert record.nbytes["all_gather"] == world * (12 + 5 + 12 + 7)
    for out, n, dtype in zip(outputs, numels, dtypes, strict=True):
        wanted = torch.cat([_partial(r, n, dtype) for r in range(world)])
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sub_buffers_of_different_dtypes_are_one_collective(ranks: Ranks, num_ranks: int) -> None:
    """Codes and their scales travel together."""
    ranks(num_ranks).run(_mixed_dtypes)


def _gathered_rows() -> torch.Tensor:
    strided = torch.arange(6.0).view(3, 2)[:, 0] + 10 * dist.get_rank()
    return all_gather_equal(strided, group=_world(), label="")


def test_equal_shards_are_gathered_as_rows(ranks: Ranks) -> None:
    """One row a rank; the shard need not be contiguous."""
    for rows in ranks(3).run(_gathered_rows):
        assert rows.tolist() == [[0, 2, 4], [10, 12, 14], [20, 22, 24]]


def _partials_are_reduced(dtype: torch.dtype) -> None:
    partial = _partial(dist.get_rank(), 50, dtype)
    out = torch.ones(50)
    wanted = 1 + _rank_order_sum(50, dtype, torch.float32, 0.5)
    with record_collectives() as record:
        all_reduce_partials(
            out,
            partial,
            group=_world(),
            scale=0.5,
            accumulate=True,
            reduce_dtype=torch.float32,
            label="unit",
        ).wait()
    assert record.nbytes == Counter(all_reduce=200)
    # Two ranks add in any order to the same bits; gloo's order for three is its own.
    tolerance = 0 if dist.get_world_size() == 2 else 1e-6
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_partials_are_summed_whole(ranks: Ranks, num_ranks: int, dtype: torch.dtype) -> None:
    """Replicated groups add the scaled sum, made in fp32."""
    ranks(num_ranks).run(_partials_are_reduced, dtype)


def _small_reductions() -> list[float]:
    results = []
    for op in ("sum", "max", "min", "avg"):
        value = torch.tensor([1.0, 3.0, 8.0][dist.get_rank()])
        all_reduce(value, op=op)
        results.append(value.item())
    return results


def test_small_tensors_are_reduced_in_place(ranks: Ranks) -> None:
    """Sum, largest, smallest and mean of 1, 3, 8."""
    assert ranks(3).run(_small_reductions) == [[12.0, 8.0, 1.0, 4.0]] * 3


class _Work:
    """A work handle that counts its waits, and then fails if it is told so.

    Args:
        failure: What the error says.
        num_looks: How often it is asked in vain whether it has ended.
    """

    def __init__(self, failure: str = "", num_looks: float = 0) -> None:
        self.num_waits = 0
        self.failure = failure
        self.num_looks = num_looks

    def is_completed(self) -> bool:
        """Count down."""
        self.num_looks -= 1
        return self.num_looks < 0

    def wait(self) -> None:
        """Count."""
        self.num_waits += 1
        if self.failure:
            raise RuntimeError(self.failure)


def test_pending_waits_and_finishes_once() -> None:
    """Works first, then the finishing step; a second wait does nothing."""
    work, log = _Work(), []
    pending = Pending([work, None], lambda: log.append(work.num_waits))
    pending.wait()
    pending.wait()
    assert log == [1]
    assert work.num_waits == 1


def test_a_failure_waits_for_the_works_beside_it() -> None:
    """Their memory may be freed after it; the first failure is the cause that is shown."""
    works, log = [_Work(), _Work("first"), _Work(), _Work("second"), _Work()], []
    pending = Pending(works, lambda: log.append("finished"))
    with pytest.raises(RuntimeError) as raised:
        pending.wait()
    errors = (raised.value, raised.value.__context__)
    assert {str(error) for error in errors} == {"first", "second"}
    pending.wait()
    assert [work.num_waits for work in works] == [1] * len(works)
    assert log == []


def test_waits_on_gloo_look_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a work has ended; it is waited for all the same, and its error comes from there."""
    monkeypatch.setattr(gloo, "_LOOK_OUT_S", math.inf)
    work, failed = _Work(num_looks=3), _Work("late", num_looks=2)
    Pending([work], is_on_gloo=True).wait()
    assert (work.num_looks, work.num_waits) == (-1, 1)
    with pytest.raises(RuntimeError, match="late"):
        Pending([failed], is_on_gloo=True).wait()
    assert failed.num_looks == -1


def test_waits_on_gloo_sleep_at_once_where_ranks_share_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that is awake takes time from the rank that it waits for."""
    monkeypatch.setattr(gloo, "is_core_shared", lambda: True)
    work = _Work(num_looks=3)
    Pending([work], is_on_gloo=True).wait()
    assert (work.num_looks, work.num_waits) == (3, 1)


def test_waits_on_gloo_sleep_in_the_end() -> None:
    """A work that does not end is waited for in a thread that sleeps."""
    work = _Work(num_looks=math.inf)
    Pending([work], is_on_gloo=True).wait()
    assert work.num_waits == 1


def test_waits_of_a_stream_are_not_looked_out_for() -> None:
    """The thread has only to tell the stream, and does not wait for the work to end."""
    work = _Work(num_looks=3)
    Pending([work]).wait()
    assert (work.num_looks, work.num_waits) == (3, 1)


def _looked_out_for(kind: str) -> int:
    """Return how many works one collective on gloo looks out for."""
    num_ranks, seen = dist.get_world_size(), []
    full, part = torch.ones(4 * num_ranks), torch.ones(4)
    sums = {"scale": 1.0, "accumulate": False, "reduce_dtype": torch.float32, "label": ""}
    with mock.patch("megafsdp.buffer.comm.collectives.look_out", seen.append):
        match kind:
            case "all_gather":
                all_gather([full], [part], group=_world(), label="").wait()
            case "reduce_scatter":
                reduce_scatter([part], [full], group=_world(), **sums).wait()
            case "all_reduce_partials":
                all_reduce_partials(part, part.clone(), group=_world(), **sums).wait()
            case "all_to_all":
                splits = [4] * num_ranks, [4] * num_ranks
                all_to_all(full, full.clone(), splits, _world(), "")
            case "all_reduce":
                all_reduce(part)
    return len(seen)


@pytest.mark.parametrize(
    "kind", ["all_gather", "reduce_scatter", "all_reduce_partials", "all_to_all", "all_reduce"]
)
def test_every_collective_on_gloo_is_looked_out_for(ranks: Ranks, kind: str) -> None:
    """On two ranks, which have ways of their own, and on three."""
    assert ranks(2).run(_looked_out_for, kind) == [1] * 2
    assert ranks(3).run(_looked_out_for, kind) == [1] * 3


def test_discarded_pending_waits_and_never_finishes() -> None:
    """The bytes have arrived and are dropped, also if wait() is called after all."""
    work, log = _Work(), []
    pending = Pending([work], lambda: log.append("finished"))
    pending.discard()
    pending.wait()
    assert work.num_waits == 1
    assert log == []


def _discarded_reduction_leaves_output() -> torch.Tensor:
    out = torch.full((4,), 7.0)
    options = {"scale": 1.0, "accumulate": True, "reduce_dtype": torch.float32, "label": ""}
    partial = torch.ones(4 * dist.get_world_size())
    reduce_scatter([out], [partial], group=_world(), **options).discard()
    barrier()
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_discarded_reduction_leaves_the_output_alone(ranks: Ranks, num_ranks: int) -> None:
    """A backward that failed adds nothing."""
    for out in ranks(num_ranks).run(_discarded_reduction_leaves_output):
        assert out.tolist() == [7.0] * 4


def _objects() -> tuple[list[object], object]:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    return all_gather_objects(("rank", rank), mine), broadcast_object(rank, src=1, group=mine)


def test_objects_are_exchanged_within_a_group(ranks: Ranks) -> None:
    """Sources are numbered within the group."""
    first = ([("rank", 0), ("rank", 1)], 1)
    second = ([("rank", 2), ("rank", 3)], 3)
    assert ranks(4).run(_objects) == [first, first, second, second]


class _OddError(Exception):
    """An error that only a test raises."""


def _error_of_raise_together(failing: list[int]) -> tuple[str, str]:
    rank = dist.get_rank()
    try:
        raise_together(_OddError(f"cheese {rank}") if rank in failing else None)
    except Exception as error:
        barrier()  # Every rank gets here, so none is left waiting.
        return type(error).__name__, str(error)
    return "nothing", ""


def test_one_error_is_raised_on_all_ranks(ranks: Ranks) -> None:
    """The own error where it happened, a quotation with the rank elsewhere."""
    answers = ranks(3).run(_error_of_raise_together, [1])
    assert answers[1] == ("_OddError", "cheese 1")
    for rank in (0, 2):
        assert answers[rank][0] == "RuntimeError"
        assert "rank 1: _OddError: cheese 1" in answers[rank][1]


def _class_of_raise_together(errors: list[Exception | None]) -> str:
    try:
        raise_together(errors[dist.get_rank()])
    except Exception as error:
        barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_of_this_package_has_one_class_on_all_ranks(ranks: Ranks) -> None:
    """A command ends all ranks by one message and one code; other errors are bugs of one rank."""
    answers = ranks(3).run(_class_of_raise_together, [None, ConfigError("no"), ValueError("x")])
    assert answers[1:] == ["ConfigError: no", "ValueError: x"]
    assert answers[0].startswith("ConfigError: 2 other rank(s) raised:\nrank 1: ConfigError: no")
    answers = ranks(3).run(_class_of_raise_together, [None, ValueError("x"), ConfigError("no")])
    assert answers[0].startswith("RuntimeError: 2 other rank(s) raised")


def test_several_errors_stay_with_their_ranks(ranks: Ranks) -> None:
    """Each failing rank raises its own; the third quotes both."""
    answers = ranks(3).run(_error_of_raise_together, [0, 2])
    assert answers[0] == ("_OddError", "cheese 0")
    assert answers[2] == ("_OddError", "cheese 2")
    assert "2 other rank(s)" in answers[1][1]
    assert "rank 0" in answers[1][1] and "rank 2" in answers[1][1]


def test_no_error_raises_nothing(ranks: Ranks) -> None:
    """All is well on every rank."""
    assert ranks(3).run(_error_of_raise_together, []) == [("nothing", "")] * 3


def _require(values: list[str]) -> None:
    value = values[dist.get_rank()]
    require_equal(value, what="layout", group=_world(), hint="Build the same model everywhere")


def test_different_values_are_refused_on_all_ranks(ranks: Ranks) -> None:
    """Every rank learns what differs and where."""
    ranks(3).run(_require, ["a", "a", "a"])
    with pytest.raises(RanksError) as failure:
        ranks(3).run(_require, ["a", "a", "b"])
    assert set(failure.value.failures) == {0, 1, 2}
    for text in failure.value.failures.values():
        assert "ValueError: Expected the same layout on all ranks" in text
        assert "on ranks [2]" in text


def _require_long_value() -> int:
    with record_collectives() as record:
        require_equal("a" * 100_000, what="layout", group=_world(), hint="")
    return sum(record.nbytes.values())


def test_values_of_any_length_are_compared_by_few_bytes(ranks: Ranks) -> None:
    """Ranks exchange 32 bytes each: at thousands of ranks the values would be megabytes."""
    assert ranks(2).run(_require_long_value) == [64, 64]


def test_without_process_group_everything_is_local() -> None:
    """One process needs no process group; errors are still raised."""
    assert not dist.is_initialized()
    value = torch.tensor(3.0)
    with record_collectives() as record:
        all_reduce(value)
        barrier()
        assert all_gather_objects("x") == ["x"]
        assert broadcast_object("y") == "y"
        raise_together(None)
        with pytest.raises(_OddError):
            raise_together(_OddError())
    assert value.item() == 3.0
    assert record.calls == Counter(), "nothing was communicated"


def _uneven_exchange() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    # Rank r sends r * s elements to rank s: nothing from or to rank 0.
    sent = [rank * s for s in range(world)]
    source = torch.cat([torch.full((n,), 10.0 * rank + s) for s, n in enumerate(sent)])
    output = torch.empty(sum(sent))
    with record_collectives() as record:
        all_to_all(output, source, (sent, sent), group=_world(), label="x")
    wanted = [torch.full((n,), 10.0 * s + rank) for s, n in enumerate(sent)]
    assert torch.equal(output, torch.cat(wanted))
    assert record.calls == {"all_to_all": 1}
    assert record.nbytes["all_to_all"] == 4 * source.numel()


@pytest.mark.parametrize("is_debug", [False, True])
def test_pieces_of_any_length_are_exchanged(ranks: Ranks, is_debug: bool) -> None:
    """Ranks send different numbers of bytes, which the debug mode does not take for an error."""
    ranks(3).run(_with_debug, is_debug)


def _with_debug(is_debug: bool) -> None:
    with mock.patch.dict(os.environ, {DEBUG_VARIABLE: "1" if is_debug else "0"}):
        read_environment()
        _uneven_exchange()
    read_environment()

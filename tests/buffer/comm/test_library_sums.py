"""What a backend's library is given: dtypes, factors, launches, and what is left to a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp.buffer.comm.collectives import (
    all_gather,
    all_reduce_partials,
    record_collectives,
    reduce_scatter,
)
from megafsdp.fsdp.estimate.meta_engine import fake_ranks
from tests.library import Library, library_on_gloo
from tests.ranks import Ranks

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
BACKENDS = ("nccl", "another")
SHARD = 32


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _partial(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's partial buffer; the same values on every rank that asks."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=F64).to(dtype)


def _mean(numel: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    total = sum(_partial(r, numel, dtype).double() for r in range(dist.get_world_size()))
    assert isinstance(total, torch.Tensor)
    return total * scale


# Partials, sum over ranks, main gradient; and the relative error that the narrowest may make.
DTYPES = [
    (F32, F32, F32, 1e-6),
    (F64, F64, F64, 1e-15),
    (BF16, F32, F32, 1e-6),
    (F32, BF16, F32, 2e-2),
    (BF16, BF16, F32, 2e-2),
    (BF16, BF16, BF16, 2e-2),
    (F32, F32, BF16, 1e-2),
    (F16, F16, F32, 4e-3),
]


def _sums_are_right(backend: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    own = slice(rank * SHARD, (rank + 1) * SHARD)
    for dtype, reduce_dtype, out_dtype, tolerance in DTYPES:
        for scale in (1 / world, 1 / 6, 1.0):
            for accumulate in (False, True):
                before = torch.full((world * SHARD,), 3.0, dtype=out_dtype)
                wanted = _mean(world * SHARD, dtype, scale) + accumulate * before.double()
                options: dict[str, Any] = {
                    "group": _world(),
                    "scale": scale,
                    "accumulate": accumulate,
                    "reduce_dtype": reduce_dtype,
                    "label": "",
                }
                for kind in (reduce_scatter, all_reduce_partials):
                    is_whole = kind is all_reduce_partials
                    out = before.clone() if is_whole else before[own].clone()
                    partial = _partial(rank, world * SHARD, dtype)
                    with library_on_gloo(backend), record_collectives() as record:
                        if is_whole:
                            all_reduce_partials(out, partial, **options).wait()
                        else:
                            reduce_scatter([out], [partial], **options).wait()
                    sent_nbytes = reduce_dtype.itemsize * partial.numel() if world > 1 else 0
                    assert record.nbytes.total() == sent_nbytes
                    torch.testing.assert_close(
                        out.double(),
                        wanted if is_whole else wanted[own],
                        rtol=tolerance,
                        atol=tolerance,
                    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sums_of_a_library_are_those_of_the_formula(
    ranks: Ranks, num_ranks: int, backend: str
) -> None:
    """Any dtypes of partials, sum and main gradient, any factor, overwriting or adding."""
    ranks(num_ranks).run(_sums_are_right, backend)


def _reduced(
    backend: str,
    scale: float,
    dtype: torch.dtype = F32,
    accumulate: bool = False,
    force_sum: bool = False,
) -> Library:
    world = dist.get_world_size()
    out = torch.zeros(SHARD, dtype=dtype)
    with library_on_gloo(backend) as library:
        reduce_scatter(
            [out],
            [torch.ones(world * SHARD, dtype=dtype)],
            group=_world(),
            scale=scale,
            accumulate=accumulate,
            reduce_dtype=dtype,
            label="",
            force_sum=force_sum,
        ).wait()
    torch.testing.assert_close(out, torch.full_like(out, world * scale))
    return library


def _chosen_ops() -> None:
    assert _reduced("nccl", 1 / 3).ops == [("AVG", 1.0)]
    assert _reduced("nccl", 1 / 6).ops == [("PREMUL_SUM", 1 / 6)]
    assert _reduced("nccl", 1.0).ops == [("SUM", 1.0)]
    # Added to what is there by a pass, which scales for nothing.
    assert _reduced("nccl", 1 / 3, accumulate=True).ops == [("SUM", 1.0)]
    assert _reduced("nccl", 1 / 6, F16).ops == [("PREMUL_SUM", 1 / 4)]
    for scale in (1 / 3, 1 / 6):
        # A factor would be rounded to bf16, 1/3 by 0.2 %.
        assert _reduced("nccl", scale, BF16).ops == [("SUM", 1.0)]
        for dtype in (F32, F16):
            assert _reduced("another", scale, dtype).ops == [("SUM", 1.0)]
            assert _reduced("nccl", scale, dtype, force_sum=True).ops == [("SUM", 1.0)]


def test_nccl_scales_what_it_sums_straight_into_the_output(ranks: Ranks) -> None:
    """By AVG where the factor is 1/ranks; no other library is asked to, and NCCL need not."""
    ranks(3).run(_chosen_ops)


def _scaled_in_fp32() -> None:
    world = dist.get_world_size()
    for accumulate in (False, True):
        out = torch.ones(SHARD)
        partial = torch.ones(world * SHARD, dtype=BF16)
        with library_on_gloo():
            reduce_scatter(
                [out],
                [partial],
                group=_world(),
                scale=1 / 9,
                accumulate=accumulate,
                reduce_dtype=BF16,
                label="",
            ).wait()
        torch.testing.assert_close(out, torch.full_like(out, accumulate + 1 / 3))


def test_a_narrow_sum_is_scaled_in_the_main_gradients_dtype(ranks: Ranks) -> None:
    """Three of nine is a third in fp32, which bf16 would round by 0.2 %."""
    ranks(3).run(_scaled_in_fp32)


def _overflow(backend: str) -> None:
    world = dist.get_world_size()
    options: dict[str, Any] = {"group": _world(), "accumulate": False, "reduce_dtype": F16}

    def both(value: float, scale: float) -> list[torch.Tensor]:
        outputs = [torch.empty(SHARD), torch.empty(world * SHARD)]
        partials = [torch.full((world * SHARD,), value, dtype=F16) for _ in outputs]
        reduce_scatter(outputs[:1], partials[:1], scale=scale, label="", **options).wait()
        all_reduce_partials(outputs[1], partials[1], scale=scale, label="", **options).wait()
        return outputs

    def check() -> None:
        for out in both(40000.0, 1 / world):
            torch.testing.assert_close(out, torch.full_like(out, 40000.0), rtol=2e-3, atol=0)
        # Divided by 64 in fp16, this would be zero.
        for out in both(2.0**-20, 1 / 64):
            torch.testing.assert_close(
                out, torch.full_like(out, world * 2.0**-26), rtol=1e-6, atol=0
            )

    if backend == "gloo":
        check()
    else:
        with library_on_gloo(backend):
            check()


@pytest.mark.parametrize("backend", ["gloo", *BACKENDS])
def test_sums_in_fp16_do_not_overflow_where_the_mean_does_not(ranks: Ranks, backend: str) -> None:
    """Three times 40000 is beyond 65504; small gradients are not lost for it."""
    ranks(3).run(_overflow, backend)


def _sub_buffers() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    numels = (32, 64, 5)
    for accumulate in (False, True):
        outputs = [torch.ones(n) for n in numels]
        partials = [_partial(rank, world * n, F32) for n in numels]
        with library_on_gloo() as library:
            reduce_scatter(
                outputs,
                partials,
                group=_world(),
                scale=1 / world,
                accumulate=accumulate,
                reduce_dtype=F32,
                label="",
            ).wait()
        assert library.num_launches == 1 and len(library.ops) == 3
        for out, n in zip(outputs, numels, strict=True):
            wanted = _mean(world * n, F32, 1 / world)[rank * n : (rank + 1) * n] + accumulate
            torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sub_buffers_are_reduced_in_one_launch(ranks: Ranks, num_ranks: int) -> None:
    """Each lands in its own output."""
    ranks(num_ranks).run(_sub_buffers)


class _Ops(TorchDispatchMode):
    """Note the operators that do anything but make views and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Note and run."""
        name = func._schema.name
        if name not in ("aten::empty", "aten::new_empty", "aten::detach", "aten::empty_like"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _ops_of(
    num_buffers: int, dtype: torch.dtype, *, accumulate: bool, scale: float = 1 / 8
) -> list[str]:
    """Return the operators of a reduction of fp32 partials on a backend that does nothing."""
    group = _world()
    outputs = [torch.zeros(SHARD, dtype=dtype) for _ in range(num_buffers)]
    partials = [torch.ones(group.size() * SHARD) for _ in range(num_buffers)]
    with _Ops() as ops:
        reduce_scatter(
            outputs,
            partials,
            group=group,
            scale=scale,
            accumulate=accumulate,
            reduce_dtype=F32,
            label="",
        ).wait()
    return ops.names


def test_torch_is_given_one_collective_and_at_most_one_pass() -> None:
    """Several sub-buffers in torch's coalesced one; of one rank the pass alone."""
    with fake_ranks(8):
        assert _ops_of(3, F32, accumulate=False) == [
            "c10d::reduce_scatter_tensor_coalesced_",
            *["aten::mul"] * 3,
        ]
        scatter = "c10d::_reduce_scatter_base_"
        assert _ops_of(1, F32, accumulate=False, scale=1.0) == [scatter]
        assert _ops_of(1, F32, accumulate=False) == [scatter, "aten::mul"]
        assert _ops_of(1, F32, accumulate=True) == [scatter, "aten::add_"]
        assert _ops_of(1, BF16, accumulate=False) == [scatter, "aten::mul"]
    with fake_ranks(1):
        assert _ops_of(1, F32, accumulate=False) == ["aten::mul"]
        assert _ops_of(1, F32, accumulate=True) == ["aten::add_"]


class _Gathers(TorchDispatchMode):
    """Note the dtypes of the outputs of each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Note and run."""
        if func.namespace == "c10d":
            outputs = args[0] if isinstance(args[0], list) else args[:1]
            self.launches.append([output.dtype for output in outputs])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtypes", "sent"), [((BF16, F32), [torch.uint8] * 2), ((BF16, BF16), [BF16] * 2)]
)
def test_buffers_of_two_dtypes_are_gathered_as_bytes(
    dtypes: tuple[torch.dtype, ...], sent: list[torch.dtype]
) -> None:
    """One launch for all: NCCL coalesces tensors of one dtype alone."""
    with fake_ranks(8), _Gathers() as gathers:
        outputs = [torch.zeros(8 * SHARD, dtype=dtype) for dtype in dtypes]
        shards = [torch.zeros(SHARD, dtype=dtype) for dtype in dtypes]
        all_gather(outputs, shards, group=_world(), label="").wait()
    assert gathers.launches == [sent]


def _discarded() -> list[list[float]]:
    outputs = []
    for accumulate in (False, True):
        out = torch.full((4,), 7.0)
        partial = torch.ones(4 * dist.get_world_size())
        with library_on_gloo() as library:
            reduce_scatter(
                [out],
                [partial],
                group=_world(),
                scale=1.0,
                accumulate=accumulate,
                reduce_dtype=F32,
                label="",
            ).discard()
        assert library.log == ["issue 0", "wait 0"]
        outputs.append(out.tolist())
    return outputs


def test_a_discarded_sum_is_not_added(ranks: Ranks) -> None:
    """The collective is waited for; where nothing is added it has overwritten the output."""
    assert ranks(2).run(_discarded) == [[[2.0] * 4, [7.0] * 4]] * 2

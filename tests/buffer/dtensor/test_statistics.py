"""Statistics of unevenly cut tensors are those of the whole, and wait for full_tensor()."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.model_part import whole_part
from tests.buffer.cuts import cut, random, whole_mesh
from tests.buffer.dtensor.test_op_rules import CUTS, _path
from tests.ranks import Ranks

# By the number of ranks; with an empty shard at either end.
CUTS_ON = {
    1: ({"skipped": 0},),
    2: ({"skipped": 0}, {"skipped": 4}, {"skipped": 10}),
    3: CUTS,
}

STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda a: a.mean(),
    "mean of columns": lambda a: a.mean(0),
    "mean as double": lambda a: a.mean(dtype=torch.float64),
    "root mean square": lambda a: a.square().mean(),
    "std": lambda a: a.std(),
    "std of columns": lambda a: a.std(0, keepdim=True),
    "biased std": lambda a: torch.std(a, unbiased=False),
    "var": lambda a: a.var(),
    "var about a large mean": lambda a: (a * 1e-4 + 100).var(correction=0),
    "max": lambda a: a.max(),
    "max of negative values": lambda a: (a - 100).max(),
    "max of integers": lambda a: (a * 10).to(torch.int64).max(),
    "max of bools": lambda a: (a > 1).max(),
    "min": lambda a: a.min(),
    "min of positive values": lambda a: (a + 100).min(),
    "amax of columns": lambda a: a.amax(0),
    "amin": lambda a: a.amin(keepdim=True),
    "abs max": lambda a: a.abs().max(),
    "norm": lambda a: torch.norm(a),
    "norm of columns": lambda a: a.norm(dim=0),
    "3-norm": lambda a: torch.linalg.vector_norm(a, 3),
    "0-norm": lambda a: torch.linalg.vector_norm(a, 0),
    "infinite norm": lambda a: torch.linalg.vector_norm(a, math.inf),
    "infinite norm by keyword": lambda a: a.norm(p=math.inf),
    "norm of order minus infinity": lambda a: torch.linalg.vector_norm(a, -math.inf),
    "foreach infinite norm": lambda a: torch._foreach_norm([a, a * 2], math.inf)[1],
    "isnan any": lambda a: a.isnan().any(),
    "isfinite all": lambda a: a.isfinite().all(),
    "not all positive": lambda a: (a > 0).all(),
    "count_nonzero": lambda a: (a > 0).count_nonzero(),
    "count_nonzero of columns": lambda a: torch.count_nonzero(a.clamp(min=0), 0),
    "sum": lambda a: a.sum(),
    "sum with dims kept": lambda a: a.sum((0, 1), keepdim=True),
}
REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean of rows": lambda a: a.mean(1),
    "std of rows": lambda a: a.std(-1),
    "max of rows": lambda a: a.amax(1),
    "max with places": lambda a: a.max(0),
    "norm of negative order": lambda a: torch.linalg.vector_norm(a, -1),
    "var and mean": lambda a: torch.var_mean(a),
    "median": lambda a: a.median(),
}


def _are_those_of_the_whole(is_bypassed: bool) -> None:
    mesh, full = whole_mesh(), random(10, 4)
    with _path(is_bypassed):
        for name, statistic in STATISTICS.items():
            for cuts in CUTS_ON[dist.get_world_size()]:
                tensor = cut(full, mesh, **cuts)
                with record_collectives() as record:
                    result = statistic(tensor)
                assert not record.calls, name
                assert isinstance(result, DTensor) and result.shape == statistic(full).shape
                # The order of the sum over ranks is not that of one process.
                torch.testing.assert_close(
                    result.full_tensor(), statistic(full), msg=lambda m, n=name: f"{n}: {m}"
                )
        for statistic in REFUSED.values():
            with pytest.raises(NotImplementedError, match=r"shape \(10, 4\)"):
                statistic(cut(full, mesh))
        with pytest.raises(NotImplementedError, match="got 'linalg_vector_norm'"):
            cut(full, mesh).norm(-1)
        with pytest.raises(NotImplementedError, match="got 'linalg_vector_norm of each row'"):
            cut(full, mesh).norm(dim=1)


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_statistics_are_those_of_the_whole(ranks: Ranks, num_ranks: int, is_bypassed: bool) -> None:
    """With empty shards at either end; others are refused on all ranks."""
    ranks(num_ranks).run(_are_those_of_the_whole, is_bypassed)


def _other_shapes() -> None:
    mesh = whole_mesh()
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    # A stack of two 3 x 4 matrices, cut into rows of 4 elements: the second matrix is divided.
    full = random(2, 3, 4)
    layout = UnevenLayout(whole_part((2, 3, 4)), 4, 0, 8, num_ranks, rank)
    start, stop = layout.element_range()
    rows = full.reshape(-1)[start:stop].clone().view(layout.local_shape())
    stack = UnevenDTensor.from_local_rows(rows, mesh, layout)
    for statistic in (torch.mean, torch.std, torch.amax, torch.norm, torch.count_nonzero):
        torch.testing.assert_close(statistic(stack).full_tensor(), statistic(full))
    kept = stack.mean((0, 1, 2), keepdim=True).full_tensor()
    torch.testing.assert_close(kept, full.mean((0, 1, 2), keepdim=True))
    with pytest.raises(NotImplementedError, match="mean of each row"):
        stack.mean(0)
    single = cut(random(1, 4), mesh, skipped=0, shard_rows=1)
    for statistic in (torch.mean, torch.std, torch.max):
        torch.testing.assert_close(statistic(single).full_tensor(), statistic(random(1, 4)))


def test_stacks_cut_within_a_matrix_have_statistics_of_the_whole_alone(ranks: Ranks) -> None:
    """Their local tensor has other columns; and a row of which one rank has all."""
    ranks(3).run(_other_shapes)


def _one_rank_alone() -> None:
    full = random(10, 4)
    full[0, 0] = math.nan
    tensor = cut(full, whole_mesh())
    if dist.get_rank() == 1:
        for statistic in STATISTICS.values():
            statistic(tensor)
    dist.barrier()
    for statistic in (torch.max, torch.amin, torch.mean, torch.std, lambda a: a.norm(math.inf)):
        assert statistic(tensor).full_tensor().isnan(), "one rank has the NaN, in its first row"
    assert tensor.isnan().any().full_tensor()


def test_one_rank_may_call_alone_and_nan_reaches_all(ranks: Ranks) -> None:
    """No call waits for other ranks; a library's maximum over ranks would drop a NaN."""
    ranks(3).run(_one_rank_alone)


def _two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    full = random(10, 4)
    outer, inner = mesh.get_coordinate()
    layout = UnevenLayout(whole_part((10, 4)), 4, 8, 12, 4, inner * 2 + outer)
    start, stop = layout.element_range()
    rows = full.reshape(-1)[start:stop].clone().view(layout.local_shape())
    tensor = UnevenDTensor.from_local_rows(rows, mesh, layout, num_shard_axes=2)
    for name, statistic in STATISTICS.items():
        torch.testing.assert_close(
            statistic(tensor).full_tensor(), statistic(full), msg=lambda m, n=name: f"{n}: {m}"
        )


def test_statistics_of_rows_divided_over_two_axes(ranks: Ranks) -> None:
    """As under HFSDP."""
    ranks(4).run(_two_axes)


def _deviations(is_bypassed: bool) -> None:
    with _path(is_bypassed):
        deviation = cut(random(10, 4), whole_mesh()).std()
        assert deviation.shape == () and deviation.dtype == torch.float32
        for use in (
            lambda s: s * 2,
            float,
            lambda s: s < 1,
            lambda s: cut(random(10, 4), whole_mesh()) / s,
        ):
            with pytest.raises(NotImplementedError, match=r"full_tensor\(\) on all ranks"):
                use(deviation)
        replicated = deviation.redistribute(placements=[torch.distributed.tensor.Replicate()])
        torch.testing.assert_close(replicated.to_local(), random(10, 4).std())


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_a_deviation_is_no_number_before_full_tensor(ranks: Ranks, is_bypassed: bool) -> None:
    """Those of the own rows say nothing of the whole."""
    ranks(2).run(_deviations, is_bypassed)

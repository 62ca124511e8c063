"""Models with tp against themselves in one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megafsdp.buffer.comm.trace import record_collectives
from megafsdp.models import ModelConfig, sample
from tests.parallel.cases import (
    CONFIG,
    CONFIGS,
    EPS,
    GPT,
    batch_of,
    build,
    mesh_of,
    shard_by_torch,
    wholes,
)
from tests.ranks import Ranks

# An odd length, which tp 2 does not divide, and one that it does.
_LENGTHS = (7, 8)
_ROWS = 4
Trajectory = list[tuple[float, dict[str, tuple[Tensor, Tensor]]]]


def _train(model: nn.Module, rank: int, num_data: int) -> Trajectory:
    """Take three clipped AdamW steps; return losses, and whole weights and gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    found: Trajectory = []
    for step in range(3):
        batch = batch_of(_ROWS, _LENGTHS[step % 2], step)
        own = [part.chunk(num_data)[rank] for part in batch]
        loss = model(*own)
        loss.backward()
        grads = {name: grad.clone() for name, _, grad in wholes(model)}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), {name: (w.clone(), grads[name]) for name, w, _ in wholes(model)}))
        optimizer.zero_grad()
    return found


def _train_cut(config: ModelConfig, dtype: torch.dtype, num_data: int, outer: int) -> Trajectory:
    data, tp = mesh_of(num_data, 2, outer=outer)
    model = build(config, dtype)
    model.set_device_mesh(tp_mesh=tp)
    rank = 0
    if num_data * outer > 1:
        shard_by_torch(model, data)
        rank = data.get_local_rank() if outer == 1 else data.get_coordinate()[0]
    return _train(model, rank, num_data * outer)


def _train_all(num_data: int, outer: int) -> list[Trajectory]:
    dtypes = (torch.float64, torch.float32) if num_data == 1 else (torch.float64,)
    return [
        _train_cut(config, dtype, num_data, outer)
        for config in CONFIGS.values()
        for dtype in dtypes
    ]


@pytest.mark.parametrize(("num_data", "outer"), [(1, 1), (2, 1), (1, 2)])
def test_three_steps_equal_one_process(ranks: Ranks, num_data: int, outer: int) -> None:
    """Alone, under FSDP2 and its HSDP: losses, gradients and weights, tied and not."""
    dtypes = (torch.float64, torch.float32) if num_data == 1 else (torch.float64,)
    by_rank = ranks(2 * num_data * outer).run(_train_all, num_data, outer)
    cases = [(name, dtype) for name in CONFIGS for dtype in dtypes]
    for index, (name, dtype) in enumerate(cases):
        model = build(CONFIGS[name], dtype)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        wanted = _train(model, 0, 1)
        # Sums over two ranks in another order, three steps on.
        tolerance = 1e-9 if dtype == torch.float64 else 1e-5
        for step in range(3):
            loss = sum(found[index][step][0] for found in by_rank) / len(by_rank)
            assert abs(loss - wanted[step][0]) < tolerance, (name, step)
            for parameter, tensors in wanted[step][1].items():
                for which, expected in enumerate(tensors):
                    got = by_rank[0][index][step][1][parameter][which]
                    torch.testing.assert_close(
                        got, expected, rtol=tolerance, atol=tolerance, msg=f"{name} {parameter}"
                    )
        after = wanted[-1][1]
        assert all(not torch.equal(before[n], after[n][0]) for n in before)

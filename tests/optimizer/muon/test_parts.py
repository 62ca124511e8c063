"""Muon of matrices that a model axis cuts: whole matrices, as one process steps them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor
from megafsdp.mesh.annotation import FusedParts, annotate
from megafsdp.optimizer.muon.muon import Muon
from tests.buffer.cuts import random
from tests.buffer.parts import joined, part_on
from tests.ranks import Ranks

GATE_AND_UP = FusedParts(("gate", "up"), (10, 10))
QKV = FusedParts(("query", "key", "value"), (8, 4, 4), num_groups=2)
# Shape, dim that the model axis cuts, fused matrices, elements of a row of a stack.
CUTS: tuple[tuple[tuple[int, ...], int | None, FusedParts | None, int | None], ...] = (
    ((12, 8), 0, None, None),
    ((9, 7), 0, None, None),
    ((6, 10), 1, None, None),
    ((6, 5), 1, None, None),
    ((20, 6), 0, GATE_AND_UP, None),
    ((32, 8), 0, QKV, None),
    ((8, 32), 1, FusedParts(("query", "key", "value"), (8, 4, 4), dim=1, num_groups=2), None),
    ((6, 6), None, None, None),
    # Experts lie in one rank each; of the other stack every matrix is cut.
    ((3, 6, 8), 0, None, 8),
    ((3, 6, 8), 2, None, 4),
    ((2, 20, 6), 0, FusedParts(("gate", "up"), (10, 10), dim=1), 6),
    ((1, 6), 0, None, None),
    ((11,), 0, None, None),
)


def _pair(
    shape: tuple[int, ...], num_shard_axes: int, split_fused: str
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[Muon]]:
    mesh = joined(*shape)
    plain, ours = [], []
    for seed, (whole, dim, fused, row_numel) in enumerate(CUTS):
        plain.append(nn.Parameter(random(*whole, seed=seed)))
        if dim is None and num_shard_axes == 0:
            continue
        part = part_on(
            mesh,
            plain[-1],
            dim,
            fused=fused,
            num_shard_axes=num_shard_axes,
            row_numel=row_numel,
            # Other paddings on the ranks of the model axis, as parts beside would make.
            padding_rows=1 + mesh.get_local_rank("tp"),
        )
        ours.append(nn.Parameter(part))
        for parameter in (plain[-1], ours[-1]):
            annotate(parameter, fused=fused, tp_dim=dim)
    options = {"split_fused": split_fused, "lr": 0.1, "bucket_numel": 128}
    return plain, ours, [Muon(plain, **options), Muon(ours, **options)]


def _steps(shape: tuple[int, ...], num_shard_axes: int, split_fused: str) -> None:
    plain, ours, optimizers = _pair(shape, num_shard_axes, split_fused)
    if num_shard_axes == 0:
        plain = [p for p, (_, dim, _, _) in zip(plain, CUTS, strict=True) if dim is not None]
    before = [parameter.detach().clone() for parameter in plain]
    for step in range(2):
        for index, (one, other) in enumerate(zip(plain, ours, strict=True)):
            one.grad = random(*one.shape, seed=100 * step + index)
            grad = torch.zeros_like(other)
            grad.copy_from_full_(one.grad)
            other.grad = grad
        with record_collectives() as record:
            for optimizer in optimizers:
                optimizer.step()
        # Ranges are exchanged once, when the plan is made.
        assert record.calls["all_gather"] == (1 - step)
    for one, other, old in zip(plain, ours, before, strict=True):
        assert not torch.equal(one, old)
        assert isinstance(other, UnevenDTensor)
        # The owner multiplies the same matrix in the same order.
        torch.testing.assert_close(other.full_tensor(), one.detach(), rtol=1e-6, atol=1e-6)
        state, wanted = optimizers[1].state[other], optimizers[0].state[one]
        for name in wanted.keys() - {"step"}:
            assert torch.equal(full_tensor(state[name]), wanted[name])


@pytest.mark.parametrize(
    ("shape", "num_shard_axes", "split_fused"),
    [
        ((2, 2), 1, "parts"),
        ((2, 2), 0, "groups"),
        ((2, 1, 2), 1, "groups"),
        ((2, 1, 2), 2, "parts"),
    ],
)
def test_matrices_of_parts_are_the_whole_ones(
    ranks: Ranks, shape: tuple[int, ...], num_shard_axes: int, split_fused: str
) -> None:
    """Column, row, gate|up, query groups, stacks and uneven parts: equal to one process."""
    ranks(4).run(_steps, shape, num_shard_axes, split_fused)


def test_matrices_are_cut_by_tp_alone(ranks: Ranks) -> None:
    """Two ranks, of which each has half of every matrix."""
    ranks(2).run(_steps, (1, 2), 1, "parts")

"""Norms, clipping and counts of gradients that a model axis cuts or repeats, against the whole."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.factories import make_replicated
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.fsdp.params.main_gradient import _UnevenFlatGradient, wrapper_as
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.optimizer.grads.clip import clip_grad_norm_
from megafsdp.optimizer.grads.norms import num_zero_grads, parts_of, total_norm
from tests.buffer.cuts import random
from tests.buffer.parts import joined, part_on
from tests.ranks import Ranks

GATE_AND_UP = FusedParts(("gate", "up"), (5, 5))
# Shape, dim that tp cuts, fused tensors: a column, a row, gate and up, and what tp repeats.
CUTS: tuple[tuple[tuple[int, ...], int | None, FusedParts | None], ...] = (
    ((9, 4), 0, None),
    ((5, 6), 1, None),
    ((10, 3), 0, GATE_AND_UP),
    ((7,), None, None),
    ((3, 5), None, None),
)


def _full_grads() -> list[torch.Tensor]:
    # Values of other scales, so that one that is missing or counted twice is seen.
    grads = [random(*shape, seed=i) * 2**i for i, (shape, _, _) in enumerate(CUTS)]
    for grad in grads:
        grad.view(-1)[0] = 0
    return grads


def _parameters(mesh: DeviceMesh, num_shard_axes: int) -> list[nn.Parameter]:
    parameters = []
    for full, (_, dim, fused) in zip(_full_grads(), CUTS, strict=True):
        if dim is None and num_shard_axes == 0:
            grad = make_replicated(full, mesh)
        else:
            grad = part_on(mesh, full, dim, fused=fused, num_shard_axes=num_shard_axes)
        parameters.append(nn.Parameter(torch.zeros_like(grad)))
        parameters[-1].grad = grad
    return parameters


def _norms(shape: tuple[int, ...], num_shard_axes: int) -> list[float]:
    parameters, full = _parameters(joined(*shape), num_shard_axes), _full_grads()
    grads = [p.grad for p in parameters]
    plain = [nn.Parameter(torch.zeros_like(grad)) for grad in full]
    for parameter, grad in zip(plain, full, strict=True):
        parameter.grad = grad
    found = []
    for order in (2.0, 1.0, math.inf):
        total_norm(grads)
        with record_collectives() as record:
            found.append(total_norm(grads, order).item())
        assert record.calls == {"all_reduce": 1}
        # Sums in double, of as many addends in another order, rounded to fp32 once.
        wanted = torch.nn.utils.get_total_norm([g.double() for g in full], order).item()
        assert math.isclose(found[-1], wanted, rel_tol=1e-7)
    assert num_zero_grads(parameters) == num_zero_grads(plain) == len(CUTS)
    for parameter in parameters:
        assert parameter.grad is not None
        before = parameter.grad._local_tensor.clone()
        coefficient = 0.5 / (torch.tensor(found[0]) + 1e-6)
        parameter.before = before * coefficient
    norm = clip_grad_norm_(parameters, 0.5)
    assert norm.item() == found[0]
    for parameter, grad in zip(parameters, full, strict=True):
        assert torch.equal(parameter.grad._local_tensor, parameter.before)
        torch.testing.assert_close(parameter.grad.full_tensor(), grad * (0.5 / found[0]))
    return found


@pytest.mark.parametrize(
    ("shape", "num_shard_axes"),
    [((2, 2), 1), ((2, 2), 0), ((2, 1, 2), 1), ((2, 1, 2), 2), ((1, 4), 1)],
)
def test_norm_and_clipping_of_parts_are_those_of_the_whole(
    ranks: Ranks, shape: tuple[int, ...], num_shard_axes: int
) -> None:
    """Each element counts once, by one all-reduce, and all ranks have the same bits."""
    answers = ranks(4).run(_norms, shape, num_shard_axes)
    assert all(answer == answers[0] for answer in answers)


class _Buffer:
    """A flat gradient buffer without gaps."""

    def __init__(self, flat: torch.Tensor, num_tensors: int) -> None:
        self.flat, self.gaps = flat, []
        self.layout = SimpleNamespace(slots=list(range(num_tensors)))


def _buffers() -> tuple[int, float]:
    mesh = joined(2, 2)
    column, row = part_on(mesh, random(8, 4), 0), part_on(mesh, random(4, 8, seed=1) * 2, 1)
    same = part_on(mesh, random(6) * 4, None)
    for grads in ([column, same], [same, row, column], [column, row]):
        flat = torch.cat([grad.local.flatten() for grad in grads])
        buffer, views = (
            _Buffer(flat, len(grads)),
            flat.split([grad.local.numel() for grad in grads]),
        )
        flat_grads: list[torch.Tensor] = []
        for index, (grad, view) in enumerate(zip(grads, views, strict=True)):
            wrap = wrapper_as(_UnevenFlatGradient, grad, flat.dtype, flat.device)
            flat_grads.append(wrap(view.view(grad.local.shape)))
            flat_grads[-1].buffer, flat_grads[-1].index = buffer, index
        parts = parts_of(flat_grads)
        num_joined = sum(tensor is flat for part in parts for tensor in part.tensors)
        # The buffer stands for all where all count, and otherwise for none.
        assert num_joined == all(grad.is_counted for grad in grads)
        wanted = torch.cat([grad.full_tensor().flatten() for grad in grads]).double().norm()
        assert math.isclose(total_norm(flat_grads).item(), wanted.item(), rel_tol=1e-7)
    return 0, total_norm(flat_grads).item()


def test_buffers_with_cut_and_repeated_tensors_are_taken_apart(ranks: Ranks) -> None:
    """What tp repeats counts on one rank, also where it lies beside what tp cuts."""
    answers = ranks(4).run(_buffers)
    assert all(answer == answers[0] for answer in answers)


def _experts() -> None:
    # Another mesh over the same ranks, with groups of its own.
    dense, experts = joined(2, 1, 2), joined(2, 1, 2)
    grads: list[UnevenDTensor] = [
        part_on(dense, random(8, 4), 0),
        part_on(experts, random(4, 3, 5, seed=1) * 3, 0, row_numel=5),
        part_on(dense, random(5, seed=2), None),
    ]
    assert grads[0].copy_group is not grads[1].copy_group
    with record_collectives() as record:
        norm = total_norm(grads)
    assert record.calls == {"all_reduce": 1}
    wanted = [random(8, 4), random(4, 3, 5, seed=1) * 3, random(5, seed=2)]
    whole = torch.nn.utils.get_total_norm([w.double() for w in wanted])
    assert math.isclose(norm.item(), whole.item(), rel_tol=1e-7)


def test_experts_on_another_mesh_share_the_all_reduce(ranks: Ranks) -> None:
    """Groups are told apart by their ranks; experts under tp count once."""
    ranks(4).run(_experts)


def _drifted(num_shard_axes: int) -> float:
    parameters = _parameters(joined(2, 2), num_shard_axes)
    drift = 1 + 1e-3 * dist.get_rank()
    for parameter, (_, dim, _) in zip(parameters, CUTS, strict=True):
        if dim is None:
            parameter.grad._local_tensor.mul_(drift if dist.get_rank() % 2 else 1)
    return total_norm([p.grad for p in parameters]).item()


@pytest.mark.parametrize("num_shard_axes", [0, 1])
def test_norms_are_equal_where_copies_differ(ranks: Ranks, num_shard_axes: int) -> None:
    """Gradients that tp ranks have in common count on the first: clipping cannot part weights."""
    answers = ranks(4).run(_drifted, num_shard_axes)
    assert answers[0] == answers[1] and answers[2] == answers[3]
